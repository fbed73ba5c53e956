"""Norms of the parameters before a step, and of the change of each parameter.

There are two methods:

- After the step of a fused Adam, AdamW or SGD on CUDA in fp32: from the state after the step, in one pass
  (`triton_updates.py`). The parameters are not copied.
- Any other step: the parameters are copied before it and compared after it.

The tables of the pass are kept while the tensors keep their addresses.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from surefoot.core.block_tables import BlockTables, is_dense
from surefoot.core.device import runs_triton
from surefoot.core.device_copies import upload
from surefoot.core.without_hooks import without_gradients
from surefoot.observe.tensors import LayerMetrics, TensorMeter, dense_views, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from surefoot.types import NamedParameter

    ColumnsAfterStep: TypeAlias = Callable[[Any, bool], dict[str, Tensor]]


class UpdateSettings(NamedTuple):
    """The settings that determine the updates of a parameter group, together with the state of its parameters."""

    rate: float
    decay: float
    """The share of a weight to add to undo the weight decay."""
    eps: float = 0.0
    log_beta1: float = 0.0
    log_beta2: float = 0.0


def group_settings(optimizer: Any) -> list[UpdateSettings] | None:
    """The settings of each group; `None` if the updates do not follow from state and settings alone."""
    found = [_settings(optimizer, group) for group in optimizer.param_groups]
    return None if any(each is None for each in found) else [each for each in found if each is not None]


def _settings(optimizer: Any, group: Mapping[str, Any]) -> UpdateSettings | None:
    lr, weight_decay = group["lr"], group["weight_decay"]
    if type(lr) is not float or type(weight_decay) not in (float, int) or not 0 <= lr * weight_decay < 0.5:
        return None  # a tensor on the device, or a decay that leaves nothing to restore from
    shrinks = lr * weight_decay / (1 - lr * weight_decay)
    if isinstance(optimizer, torch.optim.SGD):
        if group["nesterov"] or group["maximize"]:
            return None
        return UpdateSettings(lr, 0.0 if group["momentum"] else shrinks)
    betas, decoupled = group["betas"], group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    if not all(type(beta) is float and 0 <= beta < 1 for beta in betas):
        return None
    logarithms = (math.log(beta) if beta else -math.inf for beta in betas)
    return UpdateSettings(lr, shrinks if decoupled else 0.0, group["eps"], *logarithms)


class UpdateMeter:
    """Measures one optimizer's parameters before its steps, and how far the steps move them."""

    def __init__(self, watch: LayerMetrics) -> None:
        self._updates = watch.updates
        self._before_step, self._after_step = TensorMeter(), TensorMeter()
        self._derived = DerivedUpdates()

    @without_gradients
    def before(self, optimizer: Any, parameters: Sequence[NamedParameter], *, derive: bool) -> ColumnsAfterStep:
        """A step is about to be taken. With `derive`, it is the optimizer's own fused step and nothing else.

        Returns a function that computes the norms. Call it after the step, before anything that was changed for the
        step is restored, with the optimizer and whether the host has refused the step.
        """
        if self._updates and derive and self._derived.prepare(optimizer, [parameter for _, parameter in parameters]):
            return self._derived.columns
        tensors = [parameter.detach() for _, parameter in parameters]
        param_norm = self._before_step.measure(tensors).norm
        copies = [tensor.clone() for tensor in tensors] if self._updates else None

        def columns(optimizer: Any, refused: bool) -> dict[str, Tensor]:
            if copies is None:
                return {"param_norm": param_norm}
            now, then = dense_views(tensors), dense_views(copies)
            moved = self._after_step.measure(torch._foreach_sub(now, then)).norm
            return {"param_norm": param_norm, "update_norm": moved}

        return columns


class DerivedUpdates:
    """Updates that are derived from the state of a fused optimizer."""

    def __init__(self) -> None:
        self._tables: BlockTables | None = None
        self._addresses: list[list[int]] = []
        self._groups: list[int] = []
        self._group_of: Tensor | None = None
        self._settings: list[UpdateSettings] = []
        self._settings_table: Tensor | None = None
        self._no: Tensor | None = None

    def prepare(self, optimizer: Any, parameters: list[Tensor]) -> bool:
        """Whether the next step can be measured this way; builds the tables if necessary."""
        if _load_measure(parameters[0].device) is None or group_settings(optimizer) is None:
            return False
        place = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        groups = [place[id(parameter)] for parameter in parameters]
        momenta = [bool(group.get("momentum")) for group in optimizer.param_groups]
        rows = [_state_of(optimizer, p, momenta[group]) for p, group in zip(parameters, groups, strict=True)]
        if any(row is None for row in rows):
            return False
        columns = [list(column) for column in zip(*(row for row in rows if row is not None), strict=True)]
        addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
        sizes = [parameter.numel() for parameter in parameters]
        if self._tables is None or self._tables.sizes != sizes or addresses != self._addresses:
            if not _fit(columns, adam=not isinstance(optimizer, torch.optim.SGD)):
                return False
            self._lay(parameters[0].device, sizes, addresses)
        if self._group_of is None or groups != self._groups:
            self._groups, self._group_of = groups, upload(groups, parameters[0].device)
        return True

    def _lay(self, device: torch.device, sizes: list[int], addresses: list[list[int]]) -> None:
        if self._tables is None or self._tables.sizes != sizes or self._tables.device != device:
            self._tables = BlockTables(sizes, device, columns=4)
            self._no = torch.zeros((), dtype=torch.float32, device=device)
            self._settings, self._group_of = [], None
        self._tables.place(*addresses)
        self._addresses = addresses

    def columns(self, optimizer: Any, refused: bool) -> dict[str, Tensor]:
        """The norms, after the step and with the settings it was taken with. Under `torch.no_grad`."""
        assert self._tables is not None
        assert self._group_of is not None
        assert self._no is not None
        settings = group_settings(optimizer)
        if settings is None:  # they were changed to device tensors during the step
            return {}
        if settings != self._settings or self._settings_table is None:
            flat = [number for each in settings for number in each]
            self._settings, self._settings_table = settings, upload(flat, self._tables.device, torch.float64)
        found = getattr(optimizer, "found_inf", None)
        skipped = torch.ones_like(self._no) if refused else self._no if found is None else found.to(self._no)
        adam = not isinstance(optimizer, torch.optim.SGD)
        measure = _load_measure(self._tables.device)
        norms = measure(self._tables, self._group_of, self._settings_table, skipped, adam=adam)
        return dict(zip(("param_norm", "update_norm"), norms, strict=True))


def _load_measure(device: torch.device) -> Any:
    """The function that launches the pass; `None` if Triton is not available."""
    if not runs_triton(device):
        return None
    try:
        from surefoot.observe.triton_updates import measure_updates
    except ImportError:  # a torch build without Triton
        return None
    return measure_updates


def _state_of(optimizer: Any, parameter: Tensor, has_momentum: bool) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The parameter and the state that determines its update; `None` if there is none yet."""
    state = optimizer.state.get(parameter)
    if isinstance(optimizer, torch.optim.SGD):
        momentum = None if state is None else state.get("momentum_buffer")
        applied = momentum if has_momentum else parameter.grad
        return None if applied is None else (parameter, applied, applied, applied)
    if not state:
        return None
    second = state.get("max_exp_avg_sq")  # only with `amsgrad`
    return parameter, state["exp_avg"], state["exp_avg_sq"] if second is None else second, state["step"]


def _fit(columns: list[list[Tensor]], *, adam: bool) -> bool:
    """Whether the kernel can read these: fp32, on one device, with the state in the memory layout of its parameter."""
    parameters, states, steps = columns[0], columns[1:3], columns[3]
    device = parameters[0].device
    if not all(is_plain(p) and p.dtype is torch.float32 and p.device == device and is_dense(p) for p in parameters):
        return False
    if adam and not all(step.dtype is torch.float32 and step.device == device for step in steps):
        return False
    return all(
        is_plain(state)
        and state.dtype is torch.float32
        and state.device == device
        and state.shape == parameter.shape
        and state.stride() == parameter.stride()
        for column in states
        for state, parameter in zip(column, parameters, strict=True)
    )
