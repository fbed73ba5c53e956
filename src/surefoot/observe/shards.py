"""Statistics of gradients that are sharded over ranks (DTensor, FSDP2): from the local shards to the whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from surefoot.observe.tensors import TensorStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


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
    sums = torch.stack([local.norm[members].double() ** 2, local.nonfinite[members].double()])
    dist.all_reduce(sums, group=group)
    largest = local.largest[members]
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return TensorStatistics(
        local.norm.index_copy(0, members, sums[0].sqrt().to(local.norm.dtype)),
        local.largest.index_copy(0, members, largest),
        local.nonfinite.index_copy(0, members, sums[1].to(local.nonfinite.dtype)),
    )
