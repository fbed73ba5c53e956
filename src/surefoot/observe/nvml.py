"""Readings of the NVIDIA driver: memory, temperature, power, clocks, ECC errors, throttling, XID errors.

They come from `nvidia-ml-py` (`pip install -e ".[nvml]"`), which queries the driver and never the CUDA context:
nothing here waits for the device or uses its memory. If the package, the driver, the permission or the sensor is
missing, the reading is missing, and nothing is logged. A device is found by its UUID in torch, so that index 0 is the
right card for any `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`. A MIG slice provides its memory and little else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_XIDS = 64
"""The maximum number of errors read at once: a lost device may report indefinitely."""


class Nvml:
    """The driver's library, if it is available; `device` returns a card by UUID."""

    def __init__(self) -> None:
        self._library: Any = None
        try:
            library = import_module("pynvml")
            library.nvmlInit()
            self._library = library
        except Exception:  # no package, no driver, a driver of another version: no readings
            return

    def device(self, uuid: str) -> NvmlDevice | None:
        """The card with this UUID, in torch's format (without `GPU-`)."""
        if self._library is None:
            return None
        for prefix in ("GPU-", "MIG-"):
            try:
                return NvmlDevice(self._library, self._library.nvmlDeviceGetHandleByUUID(prefix + uuid))
            except Exception:  # not a card of this kind, or the driver is gone
                continue
        return None

    def close(self) -> None:
        """Close the library."""
        library, self._library = self._library, None
        if library is not None:
            try:
                library.nvmlShutdown()
            except library.NVMLError:  # gone already
                return


class NvmlDevice:
    """One card."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self._questions = _questions(library, handle)
        self._events = self._listen()

    def numbers(self) -> dict[str, float]:
        """All numbers that the card provides. Unsupported ones are not queried again."""
        found: dict[str, float] = {}
        for name, ask in list(self._questions.items()):
            try:
                found |= ask()
            except self._library.NVMLError as error:
                if error.value in _final(self._library):
                    del self._questions[name]
        return found

    def xids(self) -> tuple[int, ...]:
        """The numbers of critical errors since the last call. Does not wait for any."""
        if self._events is None:
            return ()
        found: list[int] = []
        while len(found) < _MOST_XIDS:
            try:
                event = self._library.nvmlEventSetWait_v2(self._events, 0)
            except self._library.NVMLError:  # usually a timeout: there is none
                break
            if event.eventType & self._library.nvmlEventTypeXidCriticalError:
                found.append(int(event.eventData))
        return tuple(found)

    def _listen(self) -> Any:
        library = self._library
        try:
            wanted = library.nvmlDeviceGetSupportedEventTypes(self._handle) & library.nvmlEventTypeXidCriticalError
            if not wanted:
                return None
            events = library.nvmlEventSetCreate()
            library.nvmlDeviceRegisterEvents(self._handle, wanted, events)
            return events
        except library.NVMLError:  # not supported, or not allowed, as in some containers
            return None

    def close(self) -> None:
        """Stop waiting for driver events."""
        events, self._events = self._events, None
        if events is not None:
            try:
                self._library.nvmlEventSetFree(events)
            except self._library.NVMLError:
                return


def _questions(library: Any, handle: Any) -> dict[str, Callable[[], dict[str, float]]]:
    """Queries each number separately, so that one failure does not affect the others. Units as in `DeviceRow`."""
    reasons = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or library.nvmlDeviceGetCurrentClocksThrottleReasons

    def memory() -> dict[str, float]:
        info = library.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_used": float(info.used), "memory_total": float(info.total)}

    def ecc(kind: int) -> float:
        return float(library.nvmlDeviceGetTotalEccErrors(handle, kind, library.NVML_VOLATILE_ECC))

    single: dict[str, Callable[[], float]] = {
        "temperature": lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU),
        "power": lambda: library.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "power_limit": lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "sm_clock": lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
        "memory_clock": lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM),
        "utilization": lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "ecc_corrected": lambda: ecc(library.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected": lambda: ecc(library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        "throttle": lambda: reasons(handle),
    }

    def asked(name: str, ask: Callable[[], float]) -> Callable[[], dict[str, float]]:
        return lambda: {name: float(ask())}

    return {"memory": memory} | {name: asked(name, ask) for name, ask in single.items()}


def _final(library: Any) -> tuple[int, ...]:
    """Error codes that will not change during the run."""
    return (library.NVML_ERROR_NOT_SUPPORTED, library.NVML_ERROR_NO_PERMISSION, library.NVML_ERROR_FUNCTION_NOT_FOUND)
