"""A probe that fails is reported once and switched off, unless the device failed: that is the script's own error."""

from __future__ import annotations

import io
from typing import NoReturn

import pytest
import torch

from surefoot.core import device
from surefoot.watch import messages
from surefoot.watch.probe_runner import ProbeRunner
from surefoot.watch.watch_state import WatchState


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What surefoot reports. Nothing has happened to the device yet."""
    stream = io.StringIO()
    monkeypatch.setattr(device, "_failure", [])
    monkeypatch.setattr(messages, "_stream", stream)
    return stream


def failing(error: Exception) -> NoReturn:
    raise error


def test_a_probe_that_fails_is_reported_once_and_not_run_again(said: io.StringIO) -> None:
    probes = ProbeRunner(WatchState())
    for _ in range(2):
        assert probes.safely("spikes", failing, ValueError("strange")) is None
    assert probes.problems == {"spikes": "ValueError: strange"}
    assert said.getvalue().count("stopped watching spikes (ValueError: strange)") == 1


def test_an_error_of_the_device_is_no_problem_of_the_probe_that_meets_it(said: io.StringIO) -> None:
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    state = WatchState()
    probes = ProbeRunner(state)
    for probe in ("looking", "gradients", "series"):
        assert probes.safely(probe, failing, error) is None
    assert probes.problems == {}
    assert said.getvalue() == ""
    assert device.failure() == ("AcceleratorError", str(error))
    assert state.sampling_stopped  # nothing else is read from the device


def test_a_probe_that_lacks_memory_is_reported_unless_the_script_ended_for_want_of_it(said: io.StringIO) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    probes = ProbeRunner(WatchState())
    probes.out_of_memory = True
    probes.safely("looking", failing, error)
    assert said.getvalue() == ""
    probes.out_of_memory = False
    probes.safely("looking", failing, error)
    assert "stopped watching looking" in said.getvalue()
