"""Agreement between ranks: a step that one rank refuses is applied on no rank.

One small all-reduce per step contains every flag and the loss. It runs on the device's stream: no host sync under NCCL.
`Ranks` is for the rare cases in which the host needs the result: which checkpoint to load, whether any weights are
broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from surefoot.types import Scalar


def rank_and_world_size() -> tuple[int, int]:
    """The rank of this process among all that were started together, even if they do not train together."""
    several = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if several else (0, 1)


def find_group(models: Sequence[nn.Module]) -> dist.ProcessGroup | None:
    """The processes that train these models together; `None` if this process trains alone.

    A model wrapped in DDP, or one whose parameters are DTensors, is trained together. The existence of a process group
    is not enough: ranks may train different models. Raises `UsageError` for models that are trained by different
    processes: a refusal in one group would be unknown in the other.
    """
    if rank_and_world_size()[1] == 1:
        return None
    members = {frozenset(dist.get_process_group_ranks(group)): group for model in models for group in _groups_of(model)}
    # The replicas of a model that is itself sharded over a mesh: the mesh has the ranks of DDP and more.
    largest = [each for each in members if not any(each < other for other in members)]
    if len(largest) > 1:
        raise UsageError(
            f"the models are trained by different processes: {' and '.join(sorted(str(sorted(e)) for e in largest))}. "
            "Give each its own TrainingStabilizer and optimizer, on the ranks that train it."
        )
    return members[largest[0]] if largest else None


def _groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups that train a model: those of each DDP in it, and of its DTensors."""
    replicas = [  # DDP may be inside, as in torch.compile's wrapper
        module for module in model.modules() if isinstance(module, torch.nn.parallel.DistributedDataParallel)
    ]
    meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if hasattr(p, "to_local"))  # type: ignore[attr-defined]
    # DDP on one dimension of a mesh holds the shards of the others as plain tensors.
    meshes |= dict.fromkeys(mesh for each in replicas if (mesh := getattr(each, "device_mesh", None)) is not None)
    return [*(each.process_group for each in replicas), *(_group_of_mesh(mesh) for mesh in meshes)]


def _group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    """The processes of a mesh, including all dimensions that it is a part of."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    if root.size() == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    if root.ndim == 1:
        return root.get_group()  # type: ignore[no-any-return]
    raise UsageError(
        f"the model is on a mesh of {root.size()} of the {dist.get_world_size()} processes, in {root.ndim} "
        "dimensions, and there is no process group of exactly these processes. Use a mesh of all processes, or of one "
        "dimension."
    )


def copies_of_first(models: Sequence[nn.Module], optimizer: Any) -> bool:
    """Whether every rank holds the same parameters and optimizer state as the first one: plain DDP only."""
    trained: set[int] = set()
    for model in models:
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return False
        if model.parameters_to_ignore or getattr(model, "_comm_hooks", None):  # local hooks, or occasional averaging
            return False
        trained |= {id(parameter) for parameter in model.parameters() if not hasattr(parameter, "to_local")}
    plain = type(optimizer).__module__.startswith("torch.optim")  # others may hold a share per rank, as ZeRO does
    return plain and all(id(p) in trained for group in optimizer.param_groups for p in group["params"])


def agree(flags: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """True if any rank has True."""
    if group is None:
        return flags
    shared = flags.to(torch.float32)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return shared > 0


def agree_and_average(
    flags: Sequence[Scalar],
    value: Scalar | None,
    device: torch.device,
    group: dist.ProcessGroup,
    more: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """True if any rank has True, and the mean of a value over the ranks that have one; one collective for both.

    Neither waits for the device. The mean is NaN if no rank has the value. `more` is a vector of further numbers, as
    many on every rank, which are replaced by their sums over the ranks.
    """
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    numbers = [*flags, 0.0 if value is None else value, float(value is not None)]
    if device.type == "cpu" and not any(isinstance(number, torch.Tensor) for number in numbers):
        shared = torch.tensor(numbers, dtype=dtype)  # the host decides: one small tensor instead of ten
    else:
        shared = torch.stack([_placed(number, device, dtype) for number in numbers])
    count = len(numbers)
    if more is not None:
        shared = torch.cat([shared, more.to(dtype)])
    dist.all_reduce(shared, group=group)
    if more is not None:
        more.copy_(shared[count:])
    return shared[: count - 2] > 0, shared[count - 2] / shared[count - 1]


def _placed(number: Scalar, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)  # a fill: `torch.tensor` would sync


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, for use on the host. Every rank must make each call, which waits for all."""

    group: dist.ProcessGroup | None
    """`None` for a process that trains alone."""
    device: torch.device
    """The device of the group's collectives."""

    @property
    def place(self) -> int:
        """The rank of this process."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """The number of processes."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return self.group is not None

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self._highest(int(flag)) > 0

    def same(self, value: int) -> bool:
        """Whether the value is the same on every rank."""
        return self._highest(value) == -self._highest(-value)

    def of_first(self, value: int) -> int:
        """The value of the first rank, at least -1."""
        return self._highest(-2 if self.place else value)

    def _highest(self, value: int) -> int:
        if self.group is None:
            return value
        shared = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return int(shared)


def add_up(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over the ranks."""
    if group is None:
        return value
    shared = value.clone()
    dist.all_reduce(shared, group=group)
    return shared


def set_gradient_sync(models: Sequence[nn.Module], sync: bool) -> None:
    """Set whether the next backward averages gradients over ranks, as `no_sync()` does around a microbatch."""
    for model in models:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model.require_backward_grad_sync = sync
        elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2
            model.set_requires_gradient_sync(sync)  # type: ignore[operator]


@torch.no_grad()
def average_gradients(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Average gradients that an incomplete window left unaveraged."""
    if group is None:
        return
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
