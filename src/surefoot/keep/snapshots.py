"""The last good states in memory, which can be restored in milliseconds.

A snapshot contains what optimizer steps change: parameters, buffers, optimizer state, and the small states of the rules
that judge steps. It does not contain learning rates, schedule, random streams or the data position: the run returns to
earlier weights, not to an earlier time. Snapshots are written back into the tensors that they were taken from, so
compiled code, CUDA graphs and the user's references stay valid. If the model has new parameters or buffers (a layer is
added, pruned or replaced), earlier states no longer fit and are dropped. A buffer that only has another shape, such as
a cache, is left unchanged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from surefoot.core.device import has_streams, total_bytes, unreserved_bytes
from surefoot.core.save_restore import is_writable, write_all
from surefoot.core.weak_reference import weak_reference, weak_references
from surefoot.keep.checkpoint.tree import local_part
from surefoot.keep.staging import Place, Staged, bytes_of, map_tensors, sharded_like, stage, with_layout_of
from surefoot.keep.weight_movement import MovementJumps, ScriptWrites, WeightMovement

if TYPE_CHECKING:
    from surefoot.keep.position.data import DataPlace

log = logging.getLogger("surefoot")

CHUNK_ENTRIES = 1 << 24
SHARE_OF_DEVICE = 0.1
"""The maximum share of a GPU's memory for snapshots, by default …"""
SHARE_OF_UNRESERVED = 0.5
"""… and the maximum share of the unreserved memory when the first one is made."""


class StateTree(TypedDict):
    """The content of a snapshot."""

    tensors: list[Tensor]
    """Parameters and buffers, each once."""
    optimizer: list[dict[Any, Any] | None]
    """The optimizer's state of each parameter; `None` if it has none."""
    rules: Any
    """The state of the detectors and of other parts that follow the run."""
    beside: Any
    """Weights that follow those of the models, such as an average of them."""


class LiveTensors(NamedTuple):
    """The tensors of a training run at one moment."""

    tensors: list[Tensor]
    """Parameters and buffers, each once."""
    trained: list[Tensor]
    """The parameters of the optimizer."""
    outline: list[Any]
    """The structure of the state: a copied tree fits while this is unchanged."""


class TrainedState:
    """Everything that an optimizer step changes, read as one tree and written back in place.

    Keeps neither the models nor the optimizer alive.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: Any,
        rules: Callable[[], list[Any]],
        set_rules: Callable[[Any], None],
        beside: Callable[[], Any] = lambda: None,
        set_beside: Callable[[Any], None] = lambda saved: None,
    ) -> None:
        """Read and write the state of these models and their optimizer.

        Args:
            models: the trained models.
            optimizer: their optimizer.
            rules: returns the state of the detectors and of other parts that follow the run.
            set_rules: restores it.
            beside: returns weights that follow those of the models.
            set_beside: restores them.
        """
        self._models, self._reference = weak_references(models), weak_reference(optimizer)
        self._rules, self._set_rules = rules, set_rules
        self._beside, self._set_beside = beside, set_beside

    @property
    def _optimizer(self) -> Any:
        return self._reference()

    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def live(self) -> LiveTensors:
        """The tensors as they are now. Walks all modules, which takes a while: pass the result on."""
        found: dict[int, Tensor] = {}
        outline: list[Any] = []
        for model in self._models():
            own = list(model.parameters())
            buffers = dict(model.named_buffers())
            found.update((id(tensor), tensor) for tensor in (*own, *buffers.values()))
            outline += [*((id(parameter), parameter.shape) for parameter in own), *buffers]
        trained = self.parameters()
        found.update((id(parameter), parameter) for parameter in trained)
        outline += [(id(parameter), parameter.shape) for parameter in trained]
        return LiveTensors(list(found.values()), trained, outline)

    def tree(self, live: LiveTensors) -> StateTree:
        """The live tensors, nested as `put_back` expects."""
        states = self._optimizer.state
        return {
            "tensors": live.tensors,
            "optimizer": [dict(states[p]) if p in states else None for p in live.trained],
            "rules": self._rules(),
            "beside": self._beside(),
        }

    @torch.no_grad()
    def put_back(self, tree: StateTree) -> None:
        """Write a copied tree back into the live tensors."""
        now_live = self.live()
        pairs = [
            (local_part(now), then)
            for now, then in zip(now_live.tensors, tree["tensors"], strict=True)
            if _can_take(now, then)
        ]
        for parameter, state in zip(now_live.trained, tree["optimizer"], strict=True):
            pairs += self._moments_to_write(parameter, state)
        write_all([now for now, _ in pairs], [then for _, then in pairs])
        self._set_rules(tree["rules"])
        self._set_beside(tree["beside"])

    def _moments_to_write(self, parameter: Tensor, saved: Mapping[str, Any] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The tensors to write in place; values that cannot be written in place are replaced immediately."""
        if saved is None:
            self._optimizer.state.pop(parameter, None)
            return
        state = self._optimizer.state[parameter]
        for key in set(state) - set(saved):
            del state[key]
        for key, value in saved.items():
            now = state.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and local_part(now).shape == value.shape:
                yield local_part(now), value
            else:
                state[key] = map_tensors(value, partial(_beside, parameter))

    @torch.no_grad()
    def moved_since(self, before: Sequence[Tensor], live: LiveTensors) -> Tensor:
        """The distance of each trained parameter from the `tensors` of a copied tree. Does not read from a device."""
        trained = set(map(id, live.trained))
        pairs = [
            (local_part(now), then)
            for now, then in zip(live.tensors, before, strict=True)
            if id(now) in trained and (then.is_floating_point() or then.is_complex())
        ]
        home = pairs[0][0].device
        return torch.cat([_distances(chunk).to(home, torch.float64) for chunk in _chunks(pairs)])

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of the current parameters. Does not read from a device."""
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for each in map(local_part, self.parameters()):
            if each.is_floating_point() or each.is_complex():
                groups.setdefault((each.device, each.dtype), []).append(each.detach())
        home = next(iter(groups))[0]
        norms = [_norms(group).to(home, torch.float64) for group in groups.values()]
        found: Tensor = torch.linalg.vector_norm(torch.cat(norms))
        return found

    def norm_of(self, tree: StateTree) -> float:
        """Norm of the parameters in a copied tree. Waits for the device."""
        live = self.live()
        trained = set(map(id, live.trained))
        kept = [then for now, then in zip(live.tensors, tree["tensors"], strict=True) if id(now) in trained]
        real = (torch.view_as_real(each) if each.is_complex() else each for each in kept)
        return math.hypot(*(float(torch.linalg.vector_norm(each.double())) for each in real))

    def reset_moments(self) -> None:
        """Drop the optimizer's state; the next step creates it again."""
        self._optimizer.state.clear()


def _can_take(now: Tensor, then: Tensor) -> bool:
    """Whether a copy can be written back. A tensor of an odd kind was never copied: it is the tensor itself."""
    if then is now or now.layout is not torch.strided:
        return False
    return local_part(now).shape == then.shape and is_writable(local_part(now))


def _beside(parameter: Tensor, saved: Tensor) -> Tensor:
    return sharded_like(parameter, with_layout_of(parameter, saved, parameter.device))


def _chunks(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Pairs of the same kind, as many as fit in a bounded amount of memory."""
    chunk: list[tuple[Tensor, Tensor]] = []
    kind, entries = None, 0
    for pair in pairs:
        now = pair[0]
        if chunk and (kind != (now.device, now.dtype) or entries + now.numel() > CHUNK_ENTRIES):
            yield chunk
            chunk, entries = [], 0
        kind, entries = (now.device, now.dtype), entries + now.numel()
        chunk.append(pair)
    if chunk:
        yield chunk


def _distances(chunk: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The norm of the difference of each pair, in fp32 at least."""
    now = [now for now, _ in chunk]
    then = [then.to(now.device, non_blocking=True) for now, then in chunk]
    return _norms(list(torch._foreach_sub(now, then)))


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norms of tensors of one dtype on one device, in fp32 at least, with few launches."""
    if tensors[0].is_complex():
        tensors = [torch.view_as_real(each) for each in tensors]
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide))


@dataclass(frozen=True)
class Snapshot:
    """A state before the optimizer step `step`."""

    step: int
    staged: Staged
    moved: Tensor | None
    """The distance that each parameter moved per step since the previous snapshot; `None` if not measured."""
    moment: Moment | None = None
    """The rest of the moment; `None` if only the weights can be restored."""


class Moment(NamedTuple):
    """The state of a run besides its weights and moments, at the time of a snapshot."""

    rest: Staged
    """Settings of the optimizer, schedule, `also_save`, the stabilizer's own state, random streams."""
    place: DataPlace
    """The data position."""


class AbandonedState:
    """The state before a return, in case the return is undone."""

    def __init__(self, state: TrainedState) -> None:
        self._state = state
        self._kept: tuple[Staged, list[Any]] | None = None

    def keep(self) -> None:
        """Keep the current state."""
        live = self._state.live()
        self._kept = stage(self._state.tree(live)), live.outline

    def take_back(self) -> bool:
        """Restore it; `False` if there is none, or the model has different parameters or buffers now."""
        kept, self._kept = self._kept, None
        if kept is None or kept[1] != self._state.live().outline:
            return False
        kept[0].hold_updates()
        self._state.put_back(kept[0].tree)
        return True

    def forget(self) -> None:
        """Drop it."""
        self._kept = None


class SnapshotRing:
    """The last few good states."""

    def __init__(self, state: TrainedState, every_steps: int, keep: int, device_bytes: int | None) -> None:
        self._state, self._every, self._keep, self._device_bytes = state, every_steps, keep, device_bytes
        self._kept: list[Snapshot] = []
        self._spare: list[Staged] = []
        self._place: Place | None = None
        self._outline: list[Any] = []
        self._lacks_memory = False
        self.hold_before: int | None = None
        """The newest state that is not newer than this step is not replaced, because later ones are in doubt."""
        self.abandoned = AbandonedState(state)
        self.writes = ScriptWrites()
        self.jumps = MovementJumps()
        self.movement = WeightMovement(state, every_steps, self.writes, self.jumps)

    @property
    def steps(self) -> list[int]:
        """The steps of the kept states, oldest first."""
        return [snapshot.step for snapshot in self._kept]

    @property
    def newest(self) -> Snapshot | None:
        """The snapshot that was taken last."""
        return self._kept[-1] if self._kept else None

    def take_if_due(self, step: int, moment: Callable[[Place], Moment] | None = None) -> None:
        """Copy the state before `step` if a snapshot is due. Call this when the run is healthy."""
        if not self._kept or step - self._kept[-1].step >= self._every:
            self.take(step, moment)

    def take(self, step: int, moment: Callable[[Place], Moment] | None = None) -> None:
        """Copy the state before `step`, reusing the memory of the oldest one when there are enough.

        `moment` copies the rest of the moment; it gets the place of the copies. If there is not enough memory for a
        copy, all states are dropped, no further ones are taken, and training continues.
        """
        if self._lacks_memory:
            return
        try:
            self._take(step, moment)
        except torch.OutOfMemoryError:
            self.clear()
            self._lacks_memory = True
            log.warning(
                "surefoot: there was not enough memory for a copy of the weights before step %d. Earlier copies are "
                "discarded and recovery is disabled: bad steps are still skipped, but damaged weights are not "
                "restored. `sf.TrainingRecovery(device_bytes=0)` keeps copies in host memory.",
                step,
            )

    def _take(self, step: int, moment: Callable[[Place], Moment] | None) -> None:
        live = self._state.live()
        self._drop_if_changed(live)
        tree = self._state.tree(live)
        if self._place is None:
            self._place = _choose_place(tree, self._keep, self._device_bytes)
        moved = self.movement.to(step, self.newest, live, is_slow=self._place == "pinned")
        if moved is not None and self.newest is not None and self._place != "pinned":
            self.jumps.take(self.newest.step, step, moved, self._state.norm())
        if self._kept and self._kept[-1].step == step:  # the same state again, with the rest of the moment
            moved = self._kept[-1].moved
            self._spare.append(self._kept.pop().staged)
        elif len(self._kept) >= self._keep:
            self._spare.append(self._kept.pop(self._oldest_to_drop()).staged)
        staged = stage(tree, self._place, self._spare.pop() if self._spare else None)
        self._kept.append(Snapshot(step, staged, moved, None if moment is None else moment(self._place)))

    def _oldest_to_drop(self) -> int:
        """The position of the oldest state that may be replaced."""
        in_doubt = [each.step > self.hold_before for each in self._kept] if self.hold_before is not None else []
        return 1 if in_doubt[:2] == [False, True] else 0

    def before_update(self) -> None:
        """The optimizer is about to write: make the device finish the last copy first."""
        self.writes.before_update(self._state.parameters())
        if self._kept and self._place == "pinned":
            self._kept[-1].staged.hold_updates()
            if self._kept[-1].moment is not None:
                self._kept[-1].moment.rest.hold_updates()

    def note_trouble(self, step: int, before: int) -> None:
        """The run is not healthy: if it was until now, record how far the weights have moved. Reads nothing.

        They are compared with the last state older than `before`, because a newer one may contain the damage, or with
        the oldest if none is that old.
        """
        old_enough = self._old_enough(before)
        if old_enough:
            self.movement.note_onset(step, old_enough[-1])

    def _old_enough(self, before: int) -> list[Snapshot]:
        """The states that are not newer than `before`; if all are newer, the oldest."""
        self._drop_if_changed(self._state.live())
        return [snapshot for snapshot in self._kept if snapshot.step <= before] or self._kept[:1]

    def return_to(self, before: int, tried: int, keep_present: bool) -> int | None:
        """Restore the newest state older than `before`, or an older one for each that was `tried`.

        Returns its step, or `None` if none is that old. With `keep_present`, the return can be undone.
        """
        old_enough = self._old_enough(before)
        if len(old_enough) <= tried:
            return None
        chosen = old_enough[-1 - tried]
        self.jumps.undo(chosen.step)
        # A newer state may already contain the damage.
        self._spare += [snapshot.staged for snapshot in self._kept if snapshot not in old_enough]
        self._kept = old_enough
        self.abandoned.forget()
        if keep_present:
            self.abandoned.keep()
        chosen.staged.hold_updates()
        self._state.put_back(chosen.staged.tree)
        return chosen.step

    def moments_before(self, step: int) -> list[Snapshot]:
        """The snapshots that are complete moments, not newer than `step`, newest first."""
        self._drop_if_changed(self._state.live())
        return [each for each in reversed(self._kept) if each.step <= step and each.moment is not None]

    def write_back(self, snapshot: Snapshot) -> None:
        """Restore a snapshot. Newer ones are dropped: they belong to undone steps."""
        self._spare += [each.staged for each in self._kept if each.step > snapshot.step]
        self._kept = [each for each in self._kept if each.step <= snapshot.step]
        self.settle()
        self.writes.forget()
        self.jumps.undo(snapshot.step)
        snapshot.staged.hold_updates()
        self._state.put_back(snapshot.staged.tree)

    def _drop_if_changed(self, live: LiveTensors) -> None:
        """Drop every state if the model has different parameters or buffers now."""
        if live.outline != self._outline:
            self.clear()
            self._outline = live.outline

    def clear(self) -> None:
        """Drop every state."""
        self._kept, self._spare = [], []
        self.settle()
        self.writes.forget()

    def settle(self) -> None:
        """The run is healthy: drop the state before the last return."""
        self.abandoned.forget()
        self.movement.forget()


def _choose_place(tree: StateTree, keep: int, limit: int | None) -> Place:
    """On the device if all copies fit into `limit` bytes there, by default `bytes_for_copies`."""
    devices = {tensor.device for tensor in tree["tensors"] if has_streams(tensor.device)}
    if not devices:
        return "device"
    if limit is None:
        limit = bytes_for_copies(devices)
    return "device" if keep * bytes_of(tree) <= limit else "pinned"


def bytes_for_copies(devices: Iterable[torch.device]) -> int:
    """The memory of each device that copies may use by default."""
    return int(
        min(min(SHARE_OF_DEVICE * total_bytes(each), SHARE_OF_UNRESERVED * unreserved_bytes(each)) for each in devices)
    )
