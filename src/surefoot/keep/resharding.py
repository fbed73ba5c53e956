"""Gives each process the part of a saved state that it needs, for any number of processes and any mesh.

A loaded state has `SavedShards` for sharded tensors (`checkpoint/parts.py`). Each is read for the tensor that it is
loaded into: the current shard of a DTensor, or everything for a plain tensor. A tensor that was saved by a run without
shards is divided for a DTensor. So DDP, FSDP2, HSDP, tensor parallelism and a single process can read each other's
checkpoints.

A value without a counterpart in the run (the state of a user's object) gets the shard of the same rank if the number of
processes is the same, and otherwise the whole tensor.

Each process continues with the random streams of the same rank. If there was none, it uses those of the others if they
are all equal (same seed, as tensor parallelism needs), and otherwise keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from surefoot.core import nested
from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.shards import SavedShards, cut, is_spread, layout_of
from surefoot.keep.restore import renamed
from surefoot.keep.staging import map_leaves

if TYPE_CHECKING:
    from surefoot.core.random_state import RandomStreams
    from surefoot.keep.checkpoint.parts import SavedParts


def placed_model(model: nn.Module, saved: Any) -> Any:
    """The part of a model's state that this process needs."""
    now = model.state_dict()
    return placed_like(renamed(saved, now) if isinstance(saved, Mapping) else saved, now)


def placed_optimizer(optimizer: Any, saved: Any) -> Any:
    """The part of an optimizer's state that this process needs: values of a parameter are divided like it."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        return placed_like(saved, None)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, (p for group in optimizer.param_groups for p in group["params"]), strict=False))
    state = {
        number: {key: _placed_moment(key, value, parameters.get(number)) for key, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**placed_like({**saved, "state": {}}, None), "state": state}


def _placed_moment(key: Any, saved: Any, parameter: Tensor | None) -> Any:
    """One value that an optimizer keeps for a parameter. Raises `CheckpointError` for one with its own shards."""
    without_own = isinstance(saved, SavedShards) and saved.own is None
    if without_own and parameter is not None and saved.shape != tuple(parameter.shape):
        raise CheckpointError(
            f"the optimizer keeps {key!r} of shape {saved.shape} for a parameter of shape {tuple(parameter.shape)}, "
            "divided over processes in a way that only its own processes know. Start the number of processes that "
            "saved it."
        )
    return _placed(saved, parameter)


def placed_like(saved: Any, now: Any) -> Any:
    """A saved value as this process needs it; `now` is the live value that it is loaded into, if that is known."""
    if isinstance(saved, (Tensor, SavedShards)):
        return _placed(saved, now)
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        found: Any = {key: placed_like(value, now.get(key)) for key, value in saved.items()}
        if type(saved) is not dict:
            kind: Any = type(saved)
            found = kind(found)
            vars(found).update(getattr(saved, "__dict__", {}))  # the versions in the state of a module
        return found
    if isinstance(saved, list) and isinstance(now, (list, tuple)) and len(saved) == len(now):
        return [placed_like(value, other) for value, other in zip(saved, now, strict=True)]
    return map_leaves(saved, SavedShards, _unplaced)


def _placed(saved: Any, now: Any) -> Any:
    """One value, divided like the tensor that it belongs to."""
    spread = isinstance(now, Tensor) and is_spread(now)
    if isinstance(saved, SavedShards):
        if not isinstance(now, Tensor) or saved.shape != tuple(now.shape):
            return _unplaced(saved)  # the comparison of shapes reports what does not fit
        return saved.part(layout_of(now)) if spread else saved.whole()
    if spread and isinstance(saved, Tensor) and saved.shape == now.shape and now.to_local().shape != now.shape:
        return cut(saved, layout_of(now))
    return saved if isinstance(saved, Tensor) else map_leaves(saved, SavedShards, _unplaced)


def _unplaced(saved: SavedShards) -> Tensor:
    return saved.whole() if saved.own is None else saved.own_part()


def streams_for_new_rank(parts: SavedParts) -> RandomStreams | None:
    """The random streams of all processes that saved, if they are equal; `None` if they differ."""
    streams = parts.entries("streams")
    alike = all(nested.equal(streams[0], other) for other in streams[1:])
    return streams[0] if alike and len(streams) > 1 else None
