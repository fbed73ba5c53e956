"""Loads saved states into models and optimizers exactly, or changes nothing and reports what does not fit.

torch's own `load_state_dict` stops at the first tensor that does not fit, after loading others; it casts optimizer
state to the dtype of its parameter, and never compares moments with their parameters: fused kernels then write out of
bounds. Here everything is compared first, and the state is restored exactly. For a sharded parameter (DTensor), the
saved shard is loaded into the local shard.

Two things are compared for the optimizer. Its *description* (`describe_optimizer`: its class, and the name, shape and
dtype of the parameter at each position) is saved with it, so that a moment cannot reach another parameter. And the
*moments* of torch's own optimizers must have the shape that torch gives them, whatever the description says: a file can
be forged. Other optimizers may keep state of any shape (low-rank or 8-bit moments): there the description alone counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.tree import local_part
from surefoot.keep.staging import has_layout_of, map_tensors, sharded_like, with_layout_of
from surefoot.observe.parameters import plain_name

_LIKE_PARAMETER = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta"),
        *("grad_avg", "sum", "ax", "prev", "step_size", "variance"),
    )
)
"""State of torch's optimizers that has the shape of its parameter."""
_ONE_NUMBER = frozenset(("step", "mu_product", "eta", "mu"))


class OptimizerState(TypedDict):
    """What torch's optimizers return from `state_dict()`."""

    state: dict[int | str, dict[str, Any]]
    """Moments and step counts, by the number of the parameter."""
    param_groups: list[dict[str, Any]]


# ---- descriptions -------------------------------------------------------------------------------------------------


class ParameterDescription(TypedDict):
    """One parameter of an optimizer."""

    name: str | None
    shape: list[int]
    dtype: str


class OptimizerDescription(TypedDict):
    """The class of an optimizer, and its parameters by group."""

    kind: str
    groups: list[list[ParameterDescription]]


def describe_optimizer(optimizer: Any, modules: Sequence[nn.Module]) -> OptimizerDescription:
    """The class of an optimizer, and the name, shape and dtype of the parameter at each position of each group."""
    names: dict[int, str] = {}
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), prefix + plain_name(name))
    return {
        "kind": type(_unwrapped(optimizer)).__qualname__,
        "groups": [
            [
                {"name": names.get(id(p)), "shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch.")}
                for p in group["params"]
            ]
            for group in optimizer.param_groups
        ],
    }


def scheduler_kind(scheduler: Any) -> str | None:
    """The class of a scheduler, including those of the schedulers that it contains."""
    if scheduler is None:
        return None
    inner = getattr(scheduler, "_schedulers", None)
    of = f"({', '.join(str(scheduler_kind(each)) for each in inner)})" if isinstance(inner, (list, tuple)) else ""
    return type(scheduler).__qualname__ + of


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside wrappers such as Accelerate's."""
    while (
        isinstance(inner := getattr(optimizer, "__dict__", {}).get("optimizer"), torch.optim.Optimizer)
        and inner is not optimizer
    ):
        optimizer = inner
    return optimizer


# ---- comparison ---------------------------------------------------------------------------------------------------


def model_faults(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """The reasons why a saved state cannot be loaded into a model."""
    now = model.state_dict()
    saved = renamed(saved, now)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    faults = [f"it has no {name!r}" for name in now if name not in saved]
    faults += [f"the model has no {name!r}" for name in saved if name not in now]
    for name, value in now.items():
        if name not in saved or not isinstance(value, Tensor):
            continue
        other, here = saved[name], local_part(value)
        if not isinstance(other, Tensor):
            faults.append(f"its {name!r} is a {type(other).__name__}, not a tensor")
        elif here.shape != other.shape:
            faults.append(f"its {name!r} has shape {tuple(other.shape)}, and the model's {tuple(here.shape)}")
        elif name in parameters and here.dtype != other.dtype:
            faults.append(f"its {name!r} is {_word(other.dtype)}, and the model's is {_word(here.dtype)}")
    return faults


def optimizer_faults(
    optimizer: Any, saved: OptimizerState, then: OptimizerDescription | None, modules: Sequence[nn.Module]
) -> list[str]:
    """The reasons why a saved state cannot be loaded into an optimizer; `then` describes the saved one, if known."""
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    faults = []
    if then is None:
        # Entries that torch or schedules add to a group do not depend on the kind of optimizer.
        usual = {"params", "initial_lr", "max_lr", "min_lr", "param_names"}
        lacking = sorted({key for group in groups for key in group} - usual - {key for g in saved_groups for key in g})
        if groups and saved_groups and lacking:
            faults.append(f"its optimizer is of another kind: it has no {', '.join(map(repr, lacking[:4]))}")
    else:
        now = describe_optimizer(optimizer, modules)
        if then["kind"] != now["kind"]:
            return [f"its optimizer is {then['kind']}, and the run's is {now['kind']}"]
        faults += _moved(then["groups"], now["groups"])
        if [len(group) for group in then["groups"]] != saved_sizes:
            faults.append("its optimizer does not match its own list of parameters")
    if not faults and sizes[: len(saved_sizes)] != saved_sizes:
        faults.append(f"its optimizer has {saved_sizes} parameters per group, and the run's has {sizes}")
    return faults or moment_faults(optimizer, saved)


def _moved(then: Sequence[Any], now: Sequence[Any]) -> list[str]:
    """The differences between the parameters of the saved and current groups. Groups added at the end are allowed."""
    faults = []
    if len(now) < len(then):
        faults.append(f"its optimizer has {len(then)} parameter groups, and the run's has {len(now)}")
    for number, (old, new) in enumerate(zip(then, now, strict=False)):
        where = f" of group {number}" if len(then) > 1 else ""
        names, names_now = [each["name"] for each in old], [each["name"] for each in new]
        gone, added = _only_in(names, names_now), _only_in(names_now, names)
        if gone:
            faults.append(f"its optimizer has {_listed(gone)}{where}, and the run's does not")
        if added:
            faults.append(f"the run's optimizer has {_listed(added)}{where}, and the saved one does not")
        if gone or added:
            continue
        for position, (one, other) in enumerate(zip(old, new, strict=False)):
            if one["name"] != other["name"]:
                faults.append(
                    f"the parameters{where} are in another order: position {position} was {one['name']!r} and is "
                    f"{other['name']!r}"
                )
                break
            if one != other:
                faults.append(
                    f"{one['name']!r} was {one['dtype']} of shape {tuple(one['shape'])} and is {other['dtype']} of "
                    f"shape {tuple(other['shape'])}"
                )
    return faults


def _only_in(names: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    known = set(others)
    return [name for name in names if name not in known]


def moment_faults(optimizer: Any, saved: OptimizerState) -> list[str]:
    """The saved moments that do not have the shape that torch's kernels assume."""
    if not _steps_as_torch(_unwrapped(optimizer)):
        return []
    faults = []
    for position, (number, parameter) in enumerate(_pairs(optimizer, saved)):
        state = saved["state"].get(number)
        for key, value in (state or {}).items():
            expected = _expected_shape(key, parameter)
            if expected is None or value is None:
                continue
            found = tuple(value.shape) if isinstance(value, Tensor) else () if isinstance(value, (int, float)) else None
            if found is None or (found != expected and not (key in _ONE_NUMBER and found == (1,))):
                shape = f"a {type(value).__name__}" if found is None else f"of shape {found}"
                faults.append(f"its {key!r} of parameter {position} is {shape}, and must be of shape {expected}")
    return faults


def _steps_as_torch(optimizer: Any) -> bool:
    """Whether `step` is torch's own, possibly inherited."""
    owner = next((kind for kind in type(optimizer).__mro__ if "step" in vars(kind)), object)
    return owner.__module__.startswith("torch.optim")


def _expected_shape(key: Any, parameter: Tensor) -> tuple[int, ...] | None:
    shape = tuple(local_part(parameter).shape)
    if key in _ONE_NUMBER:
        return ()
    if key in _LIKE_PARAMETER:
        return shape
    if key in ("row_var", "col_var") and not hasattr(parameter, "to_local") and len(shape) > 1:  # Adafactor
        return (*shape[:-1], 1) if key == "row_var" else (*shape[:-2], 1, shape[-1])
    return None


def _pairs(optimizer: Any, saved: OptimizerState) -> list[tuple[Any, Tensor]]:
    """The parameters of the saved groups, each with the number of its saved state."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(zip(numbers, parameters[: len(numbers)], strict=True))


def refuse(faults: Iterable[str]) -> None:
    """Raise `CheckpointError` if there are faults."""
    found = list(dict.fromkeys(faults))
    if not found:
        return
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    raise CheckpointError(
        f"the checkpoint does not match this run: {'; '.join(found[:5])}{more}. Nothing was loaded. Create the model, "
        "the optimizer and the scheduler as they were when it was saved (frozen parameters stay in the optimizer), or "
        "use another folder."
    )


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- loading ------------------------------------------------------------------------------------------------------


def renamed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state with the current names, if wrappers (`torch.compile`, DDP) are the only difference."""
    if saved.keys() == now.keys():
        return saved
    by_plain = {plain_name(name): name for name in now}
    plain = {plain_name(name): value for name, value in saved.items()}
    if len(by_plain) != len(now) or len(plain) != len(saved) or by_plain.keys() != plain.keys():
        return saved
    renamed: Any = OrderedDict((name, plain[key]) for key, name in by_plain.items())
    versions, wanted = getattr(saved, "_metadata", None), getattr(now, "_metadata", None)
    if versions is not None and wanted is not None:
        known = {plain_name(name): value for name, value in versions.items()}
        renamed._metadata = type(versions)((n, known[plain_name(n)]) for n in wanted if plain_name(n) in known)
    return renamed  # type: ignore[no-any-return]


@torch.no_grad()
def load_models(models: Sequence[nn.Module], states: Sequence[Mapping[str, Any]]) -> None:
    """Load every model; shards are loaded into shards."""
    for model, saved in zip(models, states, strict=True):
        now = model.state_dict()
        state = renamed(saved, now)
        if not any(hasattr(value, "to_local") for value in now.values()):
            model.load_state_dict(state)
            continue
        for name, value in now.items():
            local_part(value).copy_(state[name])


def load_optimizer(optimizer: Any, state: OptimizerState) -> None:
    """Load hyper-parameters and moments. Raises `CheckpointError` if a moment does not fit its parameter."""
    refuse(moment_faults(optimizer, state))
    groups = state["param_groups"]
    sharded = any(hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"])
    if not sharded:
        added = optimizer.state_dict()["param_groups"][len(groups) :]
        optimizer.load_state_dict({**state, "param_groups": [*groups, *added]})
    else:
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            group.update({key: value for key, value in saved.items() if key != "params"})
    load_moments(optimizer, state)


@torch.no_grad()
def load_moments(optimizer: Any, state: OptimizerState) -> None:
    """Load the optimizer's state per parameter, in the saved dtype; learning rates are unchanged."""
    refuse(moment_faults(optimizer, state))
    for number, parameter in _pairs(optimizer, state):
        saved = state["state"].get(number)
        if saved is None:
            optimizer.state.pop(parameter, None)
            continue
        now = optimizer.state[parameter]
        for key in set(now) - set(saved):
            del now[key]
        for key, value in saved.items():
            now[key] = _placed(value, now.get(key), parameter)


def _placed(saved: Any, now: Any, parameter: Tensor) -> Any:
    """A saved value on the device where the optimizer expects it."""
    if not isinstance(saved, Tensor):
        return map_tensors(saved, lambda tensor: tensor.to(local_part(parameter).device, copy=True))
    if isinstance(now, Tensor) and local_part(now).shape == saved.shape and now.dtype == saved.dtype:
        here = local_part(now)
        if has_layout_of(parameter, here):
            here.copy_(saved)
            return now
    # Adam's step count is on the host unless its kernel is fused or capturable: it stays where torch put it.
    device = now.device if isinstance(now, Tensor) else local_part(parameter).device if saved.ndim else saved.device
    return sharded_like(parameter, with_layout_of(parameter, saved, device))


def as_gradient(saved: Tensor, parameter: Tensor) -> Tensor:
    """A saved gradient on the device of its parameter."""
    return sharded_like(parameter, with_layout_of(parameter, saved, local_part(parameter).device))
