"""Norm, largest value and non-finite count of many tensors, measured together.

Only this module reads gradients. Everything stays on the device; nothing here waits for it.

- CUDA: one Triton pass over the memory (`observe/triton_pass.py`).
- CPU: `torch._foreach_norm` and, if it is wanted, `torch.aminmax`, a few tensors at a time, so that the second one
  finds them in the cache; entries are counted only in a tensor whose norm is not finite, because reading a CPU scalar
  costs nothing.
- Elsewhere: plain torch operations, three passes.

Norms of bf16 and fp16 tensors are computed in fp32. A tensor with a NaN or an Inf gets the norm NaN; a finite tensor
whose squares overflow fp32 is measured again in float64, so its norm is right as long as fp32 can hold it, and Inf
beyond. On a CPU the same is done if all squares underflow: only a tensor of zeros has the norm 0.

`combine_shards` makes statistics of whole gradients from those of shards (DTensor, FSDP2). `LayerMetrics` adds to
gradients: `updates.py` measures parameter norms, and how far a step moved them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.core.device import runs_triton
from surefoot.core.settings import check_types
from surefoot.core.without_hooks import without_gradients
from surefoot.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from surefoot.observe.triton_pass import PlacedTensors, TritonPass


_layout, _dtype, _is_cpu = map(attrgetter, ("layout", "dtype", "is_cpu"))
_IN_CACHE = 1 << 18
"""The number of elements that the CPU measures in one go: 1 MiB of float32."""
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class TensorStatistics(NamedTuple):
    """One entry per tensor, all on one device."""

    norm: Tensor
    largest: Tensor | None
    """`None` if it was not measured."""
    nonfinite: Tensor

    def rescaled(self, factor: Tensor) -> TensorStatistics:
        """The statistics of the same tensors multiplied by `factor`."""
        largest = None if self.largest is None else self.largest * factor
        return TensorStatistics(self.norm * factor, largest, self.nonfinite)

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """All three, where the largest value was measured."""
        assert self.largest is not None
        return self.norm, self.largest, self.nonfinite


def dense_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The strided memory of each tensor on this rank, to be scaled in place.

    These are the values of a sparse tensor, the local shard of a DTensor, real and imaginary parts of a complex tensor.
    """
    return [tensor if is_plain(tensor) else _dense_view(tensor) for tensor in tensors]


def measurable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same, to be measured: duplicate entries of a sparse tensor are summed first, in a copy."""
    return dense_views([t.coalesce() if t.layout is torch.sparse_coo else t for t in tensors])


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is plain strided memory: not sparse, not sharded, not complex."""
    known = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    return known and tensor.layout is torch.strided and not tensor.dtype.is_complex


def all_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor is plain; faster than asking one by one, because a step asks for hundreds."""
    if not set(map(type, tensors)) <= {Tensor, torch.nn.Parameter} or not set(map(_layout, tensors)) <= {torch.strided}:
        return False
    return not any(dtype.is_complex for dtype in set(map(_dtype, tensors)))


def _dense_view(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    elif hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def total_norm(norms: Tensor) -> Tensor:
    """The global norm from the norms of the parts, exactly as `torch.nn.utils.clip_grad_norm_` combines them.

    If that overflows although every part is finite, they are combined in float64.
    """
    total: Tensor = torch.linalg.vector_norm(norms)
    if norms.dtype != torch.float32 or norms.device.type == "mps" or (norms.is_cpu and math.isfinite(total)):
        return total
    wide = torch.linalg.vector_norm(norms, dtype=torch.float64).to(torch.float32)
    return torch.where(torch.isinf(total), wide, total)


def finite_norm(tensors: list[Tensor]) -> float | None:
    """The global norm of tensors on the CPU, the same number as `total_norm` of what `TensorMeter` measures.

    Takes a fraction of the time. `None` if they must be measured one by one: a value is not finite, squares overflow,
    or a tensor is sparse, sharded, complex or on a device.
    """
    if not all_plain(tensors) or not all(map(_is_cpu, tensors)):
        return None
    total = float(torch.linalg.vector_norm(torch.stack(_norms(tensors, _measure_dtype(tensors)))))
    return total if math.isfinite(total) else None


class TensorMeter:
    """Measures a list of tensors. Keeps the launch tables of the CUDA pass between steps."""

    def __init__(self) -> None:
        self._triton: TritonPass | None = None

    def place(self, views: list[Tensor]) -> PlacedTensors | None:
        """Prepare plain tensors to be measured later by one launch; `None` if they must be measured at once.

        A second call makes the tensors of the first one unavailable.
        """
        if not _on_one_device(views) or views[0].device.type == "cpu":
            return None
        triton_pass = self._triton_on(views[0].device)
        return None if triton_pass is None else triton_pass.place(views)

    @without_gradients
    def measure(self, tensors: Sequence[Tensor]) -> TensorStatistics:
        """Measure every tensor; the result is on the device of the first."""
        return self.measure_views(list(tensors) if all_plain(tensors) else measurable(tensors))

    @without_gradients
    def measure_views(self, views: list[Tensor], needs_largest: bool = True) -> TensorStatistics:
        """Measure tensors that are all plain. On a CPU, the largest value takes another pass, if it is needed."""
        home = views[0].device
        if _on_one_device(views):
            return self._measure_on(home, views, needs_largest)
        return self._measure_across(home, views)

    def _measure_on(self, device: torch.device, views: list[Tensor], needs_largest: bool = True) -> TensorStatistics:
        if device.type == "cpu":
            return _measure_cpu(views, needs_largest)
        triton_pass = self._triton_on(device)
        measured = None if triton_pass is None else triton_pass.measure(views)
        return _measure_anywhere(views) if measured is None else measured

    def _triton_on(self, device: torch.device) -> TritonPass | None:
        """The pass for tensors of a device; `None` if it does not run there."""
        if not runs_triton(device):
            return None
        if self._triton is None:
            self._triton = _load_triton_pass()
        return self._triton

    def _measure_across(self, home: torch.device, views: list[Tensor]) -> TensorStatistics:
        """Tensors on several devices: each device measures its own, and the small results are gathered on `home`."""
        by_device: dict[torch.device, list[int]] = {}
        for i, view in enumerate(views):
            by_device.setdefault(view.device, []).append(i)
        order = torch.tensor([i for members in by_device.values() for i in members])
        parts = [TensorMeter()._measure_on(device, [views[i] for i in m]) for device, m in by_device.items()]
        # Plain copies: one that does not wait could be read on the host before it has arrived.
        back = torch.argsort(order).to(home)
        columns = zip(*(part.columns() for part in parts), strict=True)
        return TensorStatistics(*(torch.cat([part.to(home) for part in column])[back] for column in columns))


def _on_one_device(tensors: list[Tensor]) -> bool:
    """Whether all tensors are on one device, by the devices' numbers: asking for the devices takes longer."""
    return len(set(map(Tensor.get_device, tensors))) == 1


def _load_triton_pass() -> TritonPass | None:
    try:
        from surefoot.observe.triton_pass import TritonPass
    except ImportError:  # a torch build without Triton: use plain operations
        return None
    return TritonPass()


def _measure_dtype(views: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if torch.float64 in {view.dtype for view in views} else torch.float32


def _norms(views: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """L2 norms in at least fp32. For fp32 tensors, the same call as in `clip_grad_norm_`, for equal bits."""
    if set(map(_dtype, views)) == {dtype}:
        return torch._foreach_norm(views, 2)
    return torch._foreach_norm(views, 2, dtype=dtype)


def _ends(view: Tensor) -> tuple[Tensor, ...]:
    """The smallest and the largest value; both are NaN if there is a NaN."""
    return torch.aminmax(view) if view.numel() else (view.new_zeros(()),) * 2


def _largest(ends: Sequence[tuple[Tensor, ...]], dtype: torch.dtype) -> Tensor:
    """The largest absolute value of each tensor from its smallest and largest one; NaN if there is a NaN."""
    same = all(low.dtype == dtype for low, _ in ends)
    low, high = (torch.stack([end if same else end.to(dtype) for end in side]) for side in zip(*ends, strict=True))
    return torch.maximum(-low, high)


def _few_at_a_time(views: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, in lists that end with the tensor that reaches `_IN_CACHE` elements."""
    start = count = 0
    for end, view in enumerate(views, 1):
        count += view.numel()
        if count >= _IN_CACHE or end == len(views):
            yield views[start:end]
            start, count = end, 0


def _measure_cpu(views: list[Tensor], needs_largest: bool = True) -> TensorStatistics:
    dtype = _measure_dtype(views)
    norms: list[Tensor] = []
    ends: list[tuple[Tensor, ...]] = []
    for few in _few_at_a_time(views) if needs_largest else [views]:
        norms.extend(_norms(few, dtype))
        ends.extend(map(_ends, few) if needs_largest else ())
    norm = torch.stack(norms)
    measured = TensorStatistics(norm, _largest(ends, dtype) if needs_largest else None, torch.zeros_like(norm))
    for i, value in enumerate(norm.tolist()):
        if not 0 < value < math.inf:
            _look_closer(views[i], i, measured)
    return measured


def _look_closer(view: Tensor, i: int, measured: TensorStatistics) -> None:
    """For a norm that is 0 or not finite: count the non-finite entries, or compute the norm without its range limit."""
    norm, largest, nonfinite = measured
    if norm[i] == 0:
        unit = torch.linalg.vector_norm(view, math.inf, dtype=norm.dtype) if view.numel() else 0.0
        if unit > 0:
            norm[i] = torch.linalg.vector_norm(view / unit) * unit
        return
    finite = torch.isfinite(view)
    nonfinite[i] = (~finite).sum()
    if largest is not None:
        largest[i] = torch.where(finite, view, 0).abs().amax()
    norm[i] = torch.where(nonfinite[i] > 0, math.nan, torch.linalg.vector_norm(view, dtype=torch.float64))


def _measure_anywhere(views: list[Tensor]) -> TensorStatistics:
    """Plain operations for any device, without reading a value."""
    dtype = _measure_dtype(views)
    finite = [torch.isfinite(view) for view in views]
    nonfinite = torch.stack([(~mask).sum() for mask in finite]).to(dtype)
    kept = [torch.where(mask, view, 0) for mask, view in zip(finite, views, strict=True)]
    largest = _largest([_ends(view) for view in kept], dtype)
    # Relative to the largest entry, so that squares cannot overflow.
    unit = torch.where(largest > 0, largest, 1)
    relative = torch.stack([torch.linalg.vector_norm(view.to(dtype) / unit[i]) for i, view in enumerate(kept)])
    return TensorStatistics(torch.where(nonfinite > 0, math.nan, relative * unit), largest, nonfinite)


@dataclass(frozen=True)
class LayerMetrics:
    """What to measure per layer beyond gradients, and how often."""

    parameters: bool = False
    """Norm of each parameter, and so the gradient-to-parameter ratio: one more pass over the parameters."""
    updates: bool = False
    """Norm of each applied update, and so the update-to-weight ratio.

    With a fused Adam, AdamW or SGD in fp32 on CUDA it follows from the optimizer's state, in one pass over parameters
    and state; otherwise the parameters of a watched step are copied.
    """
    every_steps: int = 1
    """The number of steps between two measurements of parameters and updates."""
    activations: bool = True
    """Mean, deviation, largest value, dead and saturated share of each layer's outputs, with a histogram.

    They are measured at the sampled steps of a run with a log. The layers have forward hooks during those steps only.
    """
    sample_every_steps: int = 4_999
    """The maximum distance between two sampled steps, for which the log has activations and histograms. The first ones
    are steps 0, 1, 2, 3, 5, 8, 12, 18 and so on, each 1.5 times the one before."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.every_steps >= 1, f"`every_steps` must be at least 1; got {self.every_steps}.")
        got = self.sample_every_steps
        require(got >= 1, f"`sample_every_steps` must be at least 1; got {got}.")

    def due(self, step: int) -> bool:
        """Whether this step is measured."""
        return (self.parameters or self.updates) and step % self.every_steps == 0


def combine_shards(local: TensorStatistics, gradients: Sequence[Tensor]) -> TensorStatistics:
    """The statistics of whole gradients from those of this rank's shards.

    Uses two small collectives per mesh dimension with shards; plain tensors are unchanged.
    """
    if all(type(gradient) is torch.Tensor for gradient in gradients):
        return local
    sharded: dict[tuple[Any, int], list[int]] = {}
    for i, gradient in enumerate(gradients):
        for dim, placement in enumerate(getattr(gradient, "placements", ())):
            if not placement.is_replicate():
                sharded.setdefault((gradient.device_mesh, dim), []).append(i)  # type: ignore[attr-defined]
    for (mesh, dim), members in sharded.items():
        local = _combine(local, mesh.get_group(dim), torch.tensor(members, device=local.norm.device))
    return local


def _combine(local: TensorStatistics, group: dist.ProcessGroup, members: Tensor) -> TensorStatistics:
    norm, largest, nonfinite = local.columns()
    sums = torch.stack([norm[members].double() ** 2, nonfinite[members].double()])
    dist.all_reduce(sums, group=group)
    highest = largest[members]
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return TensorStatistics(
        norm.index_copy(0, members, sums[0].sqrt().to(norm.dtype)),
        largest.index_copy(0, members, highest),
        nonfinite.index_copy(0, members, sums[1].to(nonfinite.dtype)),
    )
