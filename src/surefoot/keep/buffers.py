"""Copies of buffers that the forward pass changes, restored after a refused step.

BatchNorm's running statistics include a batch before it is judged: after one NaN row they stay NaN, however well the
weights are guarded. So before each step that has not been judged, the buffers that change are copied, and a refused
step restores them. If the host decides, this is exact; if the device decides, the few steps until the decision arrives
are undone too, which hardly changes an average.

A buffer is not restored if it has been replaced by one of another shape (a cache that grows with the longest sequence),
set to `None`, deleted, or created under `inference_mode`. A state that is loaded between two steps becomes the new copy
(`loaded`), and batch norm statistics that were reset since the last copy, as `update_bn` does, are left unchanged
unless they are broken.

The copies are part of a saved run: the step after a restart may also be refused, and it is then restored to the state
before its first microbatch, which may have been long before the save.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from surefoot.core.device_copies import ArrivingNumber, KnownNumber, begin_reading_number
from surefoot.core.save_restore import LARGEST_STATISTIC, is_batch_norm, is_writable, may_have_changed, write_all


def infinite_buffers(model: nn.Module) -> list[str]:
    """The names of buffers that contain an infinity but no NaN, such as masks and the initial values of minima."""
    return [
        name
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.is_floating_point()
        and buffer.layout is torch.strided
        and not buffer.is_meta
        and bool(buffer.isinf().any())
        and not bool(buffer.isnan().any())
    ]


class BufferKeeper:
    """Copies of changing buffers, one per step that has not been judged yet. Keeps no module alive."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}.values()
        self._names = [  # each buffer by its module and its name there
            (weakref.ref(module), name)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.layout is torch.strided and 0 < buffer.numel() <= LARGEST_STATISTIC
        ]
        self.has_any = bool(self._names)
        """Whether there are buffers to keep."""
        self._statistics = _statistics(self._names)
        self._versions = _versions(self._current())
        self._copies: dict[int, list[Tensor | None]] = {0: [_copied(buffer) for buffer in self._current()]}

    def _current(self) -> list[Tensor | None]:
        """The buffers; `None` for one that was deleted or cannot be written to."""
        modules = ((reference(), name) for reference, name in self._names)
        found = (None if module is None else _buffer(module, name) for module, name in modules)
        return [buffer if buffer is not None and is_writable(buffer) else None for buffer in found]

    def _changed(self, current: Sequence[Tensor | None]) -> list[bool]:
        """Which buffers may have changed since the latest copy."""
        versions = _versions(current)
        return [
            (module := reference()) is not None and may_have_changed(module, versions[i] != self._versions[i])
            for i, (reference, _) in enumerate(self._names)
        ]

    def save(self, step: int) -> None:
        """Copy the buffers before `step`. Unchanged ones share their earlier copy."""
        if not self._names:
            return
        current = self._current()
        latest = list(self._copies[max(self._copies)])
        for i, changed in enumerate(self._changed(current)):
            if changed:
                latest[i] = _copied(current[i])
        self._versions = _versions(current)
        self._copies[step] = latest

    def restore(self, step: int) -> None:
        """Restore the buffers to their values before `step`."""
        if not self._names or step not in self._copies:
            return
        good, current = list(self._copies[step]), self._current()
        for i in self._reset(current):
            good[i] = _copied(current[i])
        pairs = [
            (buffer, copy)
            for buffer, copy in zip(current, good, strict=True)
            if buffer is not None and copy is not None and buffer.shape == copy.shape
        ]
        write_all([buffer for buffer, _ in pairs], [copy for _, copy in pairs])
        self._copies = dict.fromkeys(self._copies, good)

    def _reset(self, current: Sequence[Tensor | None]) -> list[int]:
        """Finite batch norm statistics that were written since the latest copy, but not by a forward pass."""
        now = _versions(current)
        writes = [
            0 if before is None or after is None or before[0] != after[0] else after[1] - before[1]
            for before, after in zip(self._versions, now, strict=True)
        ]
        # Eager kernels do not count their writes; compiled ones count one write for each counted batch.
        reset = [
            (statistics, counter)
            for statistics, counter in self._statistics
            if any(writes[i] not in (0, writes[counter]) for i in statistics)
        ]
        sound = [each for each in reset if all(_is_sound(current[i]) for i in each[0])]
        return [i for statistics, counter in sound for i in (*statistics, counter)]

    def loaded(self, module: nn.Module) -> None:
        """A state was loaded into a module: its earlier copies are replaced."""
        of_module = [i for i, (reference, _) in enumerate(self._names) if reference() is module]
        current = self._current() if of_module else []
        versions = _versions(current)
        for i in of_module:
            self._versions[i], copy = versions[i], _copied(current[i])
            for copies in self._copies.values():
                copies[i] = copy

    def modules(self) -> list[nn.Module]:
        """The modules whose buffers are kept."""
        alive = (reference() for reference, _ in self._names)
        return list(dict.fromkeys(module for module in alive if module is not None))

    def before(self, step: int) -> dict[int, Tensor]:
        """The copied buffers from before `step`, by their address."""
        kept = self._copies.get(step, []) if self._names else []
        pairs = zip(self._current(), kept, strict=False)
        return {
            buffer.data_ptr(): copy
            for buffer, copy in pairs
            if buffer is not None and copy is not None and buffer.shape == copy.shape
        }

    def settle(self, step: int) -> None:
        """`step` has been judged: drop its copies."""
        if len(self._copies) > 1:
            self._copies.pop(step, None)

    def state_dict(self) -> dict[str, list[Tensor | None]]:
        """The copies by step; `None` for an unchanged buffer. No tensor is copied, because the copies never change."""
        latest = self._copies[max(self._copies)]
        as_now = [not changed for changed in self._changed(self._current())]
        return {
            str(step): [None if as_now[i] and copy is latest[i] else copy for i, copy in enumerate(copies)]
            for step, copies in self._copies.items()
        }

    def load_state_dict(self, state: dict[str, list[Tensor | None]]) -> None:
        """Continue with saved copies, after the buffers themselves are loaded."""
        now = [_copied(buffer) for buffer in self._current()]
        self._copies = {int(step): _placed(copies, now) for step, copies in state.items()}


def _statistics(names: Sequence[tuple[weakref.ref[nn.Module], str]]) -> list[tuple[list[int], int]]:
    """For each batch norm, the positions of its running statistics and of its count of batches."""
    places: dict[int, dict[str, int]] = {}
    for i, (reference, name) in enumerate(names):
        if is_batch_norm(module := reference()):
            places.setdefault(id(module), {})[name] = i
    return [
        ([i for name, i in each.items() if name != "num_batches_tracked"], each["num_batches_tracked"])
        for each in places.values()
        if "num_batches_tracked" in each
    ]


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    buffers = module._buffers
    return buffers[name] if name in buffers else None  # noqa: SIM401 (a scripted module has no `get` there)


def _is_sound(buffer: Tensor | None) -> bool:
    return buffer is None or bool(buffer.isfinite().all())


def _versions(buffers: Sequence[Tensor | None]) -> list[tuple[int, int] | None]:
    return [None if buffer is None else (id(buffer), buffer._version) for buffer in buffers]


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _placed(copies: Sequence[Tensor | None], now: list[Tensor | None]) -> list[Tensor | None]:
    """The saved copies on the devices of the buffers; the current buffers if the model has different ones."""
    pairs = list(zip(copies, now, strict=False))
    if len(copies) != len(now) or not all(_fits(saved, mine) for saved, mine in pairs):
        return now
    return [mine if saved is None or mine is None else saved.to(mine, copy=True) for saved, mine in pairs]


def _fits(saved: Tensor | None, mine: Tensor | None) -> bool:
    return saved is None or mine is None or saved.shape == mine.shape


CHECK_STEPS = 10
_NAMES = ("running_mean", "running_var")


class RunningStatistics:
    """Detects running statistics of batch norm that are not finite, and restores the last finite ones.

    A step on a non-finite batch is refused, and its buffers are restored. But any forward in training mode writes
    statistics: over validation data, for logging, or with a loss that is never used. Nothing reads them in training
    mode, so the loss stays finite, but the model is broken wherever it is evaluated or saved.

    So every `CHECK_STEPS` steps the statistics are copied, and one number shows whether all are finite. On a CPU it is
    read immediately, on a GPU at a later step, without waiting. If they are finite, the copy becomes the last finite
    one. Keeps no module alive.

    Not covered: statistics that were broken before the first check (there is nothing to restore), and norms other than
    torch's batch norm.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.norms = [
            (name, weakref.ref(module))
            for model in models
            for name, module in model.named_modules()
            if is_batch_norm(module) and module.running_mean is not None
        ]
        self._sound: tuple[int, dict[str, Tensor]] | None = None
        """The last finite copy, with its step."""
        self._read: tuple[int, dict[str, Tensor], ArrivingNumber | KnownNumber] | None = None
        """A copy that has not been judged yet."""

    def check(self, step: int) -> str | None:
        """`step` steps are done. Restores what is not finite and returns a sentence about it; otherwise `None`."""
        if self._read is None and step % CHECK_STEPS == 0:
            self._begin(step)
        if self._read is None or not self._read[2].has_arrived():
            return None
        (taken_at, copies, broken), self._read = self._read, None
        if not broken.wait():
            self._sound = taken_at, copies
            return None
        return self._put_back()

    @torch.no_grad()
    def _begin(self, step: int) -> None:
        copies = {name: tensor.detach().clone() for name, tensor in self._current().items()}
        if copies:
            largest = torch._foreach_norm(list(copies.values()), float("inf"))
            home = largest[0].device
            finite = torch.stack([each.to(home, torch.float32) for each in largest]).isfinite()
            self._read = step, copies, begin_reading_number((~finite).sum().float())

    def _current(self) -> dict[str, Tensor]:
        found = (
            (f"{name}.{each}", getattr(reference(), each, None)) for name, reference in self.norms for each in _NAMES
        )
        return {
            name: tensor
            for name, tensor in found
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and is_writable(tensor)
        }

    def _put_back(self) -> str | None:
        """Restore the last finite copy of those that are not finite."""
        broken = {name: tensor for name, tensor in self._current().items() if not bool(tensor.isfinite().all())}
        if not broken:  # a load or a return has repaired them since
            return None
        first = next(iter(broken))
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        fault = f"{first}{more} is not finite: a forward pass in training mode got a non-finite value"
        if self._sound is None:
            return f"{fault}; there is no earlier copy to restore"
        taken_at, copies = self._sound
        pairs = [
            (now, copies[name]) for name, now in broken.items() if name in copies and copies[name].shape == now.shape
        ]
        write_all([now for now, _ in pairs], [then for _, then in pairs])
        return (
            f"{fault}; restored to step {taken_at}. Call model.eval() before a forward pass that is not a training step"
        )
