"""Ranks that run different numbers of forward passes, and synchronize at the end.

A rank that runs out of memory needs more, smaller pieces than the others. So nothing in between may be a collective:
DDP's averaging is off for all pieces, its broadcast of buffers is done once before, and the gradients are averaged once
afterwards. The same exchange shows whether any rank failed, so that no rank waits for it, and which parameters have a
gradient on any rank, because ranks may use different ones.

Models whose forward is itself a collective (FSDP, SyncBatchNorm) cannot do this, and are refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from surefoot.decide.agreement import agree, average_gradients, rank_and_world_size
from surefoot.errors import RankFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn


def check_separable(models: Sequence[nn.Module]) -> None:
    """Raise `UsageError` for models that need every rank to run the same number of forwards."""
    for model in models:
        reason = _why_inseparable(model)
        if reason:
            raise UsageError(
                f"`run_microbatches` divides the batch of each rank separately, but {reason}. Use smaller batches with "
                "`accumulate`, or activation checkpointing."
            )


def _why_inseparable(model: nn.Module) -> str:
    """What would make ranks wait for each other, or average differently; empty if there is nothing."""
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return "the forward of a sharded model (FSDP2, DTensor) is a collective that all ranks must enter equally often"
    alone = rank_and_world_size()[1] == 1
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            return "the forward of a sharded model (FSDP) is a collective that all ranks must enter equally often"
        if isinstance(module, torch.nn.SyncBatchNorm) and not alone:
            return "`SyncBatchNorm` is a collective within the forward"
        if isinstance(module, DistributedDataParallel):
            if module is not model and not alone:
                return "DDP is inside another module, such as that of torch.compile: compile first, then wrap in DDP"
            if module.static_graph:
                return "DDP was built with `static_graph=True`"
            if getattr(module, "_comm_hooks", None) or hasattr(module, "buffer_hook"):
                return "DDP has a communication hook, which would not be called"
            if getattr(module, "mixed_precision", None) is not None or getattr(
                module, "_delay_all_reduce_params", None
            ):
                return "DDP was built with `mixed_precision` or `delay_all_reduce_named_params`"
    return ""


@contextmanager
def without_collectives(models: Sequence[nn.Module], group: dist.ProcessGroup | None, average: bool) -> Iterator[None]:
    """Run the body without a collective; then agree that no rank failed, and average gradients if `average`."""
    together = [model for model in models if isinstance(model, DistributedDataParallel)]
    synced = [model.require_backward_grad_sync for model in together]
    for model in together:
        _broadcast_buffers(model)
        model.require_backward_grad_sync = False
    failed = False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        for model, sync in zip(together, synced, strict=True):
            model.require_backward_grad_sync = sync
            model.require_forward_param_sync = average  # as after DDP's own forward
        if group is not None and failed:
            _report_failure(together)
    if group is not None:
        _agree_and_average(together, average)


def _broadcast_buffers(model: DistributedDataParallel) -> None:
    """Synchronize the buffers once, as the next forward would, for any number of forwards on a rank."""
    if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        model._sync_buffers()  # type: ignore[no-untyped-call]
    model.require_forward_param_sync = False


def _parameters(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters whose gradients DDP averages."""
    ignored = model.parameters_to_ignore
    return [p for name, p in model.module.named_parameters() if name not in ignored and p.requires_grad]


def _exchange(model: DistributedDataParallel, failed: bool) -> list[bool]:
    """Whether any rank failed, and for each parameter, whether any rank has a gradient. Waits for the device."""
    parameters = _parameters(model)
    flags = torch.tensor([failed, *(p.grad is not None for p in parameters)], device=parameters[0].device)
    return [bool(flag) for flag in agree(flags, model.process_group).tolist()]


def _report_failure(models: Sequence[DistributedDataParallel]) -> None:
    try:
        _exchange(models[0], failed=True)
    except RuntimeError:
        return  # the ranks cannot communicate any more: the error that is being raised gives the reason


def _agree_and_average(models: Sequence[DistributedDataParallel], average: bool) -> None:
    for model in models:
        anyone_failed, *present = _exchange(model, failed=False)
        if anyone_failed:
            raise RankFailed(
                "another rank failed in `run_microbatches`; see its output. The gradients of this window are discarded "
                "on every rank, and no step was taken."
            )
        if average:
            used = [parameter for parameter, used in zip(_parameters(model), present, strict=True) if used]
            average_gradients([_gradient(parameter) for parameter in used], model.process_group)


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient; zeros on a rank that did not use the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()  # ranks have entries at different positions
    return parameter.grad
