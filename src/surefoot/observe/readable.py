"""Decides what can be read of a tensor in this process. Every observation that reads values uses it.

The memory of a tensor may be freed while the tensor exists: FSDP frees the gathered parameters after the forward, and
the graph still refers to them. Reading one would end the process. A DTensor has values on other ranks too; computing on
it as a whole starts a collective, in which one rank alone would wait indefinitely: its local shard is read. Other
tensors that only wrap some (quantized ones, results of a collective in progress, classes of the script with a
`__torch_dispatch__`) are not read at all. Nor is anything on a device that has failed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.core.device import has_failed

_PLAIN = (Tensor, nn.Parameter)
_STRIDED = torch.strided
_dispatch = Tensor.__torch_dispatch__


def readable(tensor: Tensor) -> Tensor | None:
    """The local values of a tensor; `None` if there are none to read. Call it with gradients disabled.

    A plain tensor with allocated memory is returned unchanged.
    """
    if type(tensor) not in _PLAIN:
        to_local = getattr(tensor, "to_local", None)
        if to_local is not None:
            tensor = to_local()
        if type(tensor).__torch_dispatch__ is not _dispatch:
            return None
    return tensor if _is_there(tensor) else None


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor can be read and used in computations directly."""
    known = type(tensor) in _PLAIN or type(tensor).__torch_dispatch__ is _dispatch
    return known and _is_there(tensor)


def is_result(tensor: Tensor) -> bool:
    """Whether the result of a computation, such as a loss, is a plain number: then it has memory, and can be read."""
    is_number = type(tensor) is Tensor and not tensor.dim() and tensor.layout is _STRIDED and not tensor.is_meta
    return is_number and not has_failed()


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local")


def has_other_ranks() -> bool:
    """Whether other processes train together with this one. Then nothing is done here that they might not do."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _is_there(tensor: Tensor) -> bool:
    """Whether the memory that the shape and the strides describe is allocated."""
    if tensor.is_meta or tensor.is_nested or (type(tensor) not in _PLAIN and nn.parameter.is_lazy(tensor)):
        return False
    if has_failed() and not tensor.is_cpu:
        return False
    if tensor.layout is not _STRIDED or not tensor.numel():
        return True
    size = tensor.untyped_storage().nbytes()
    if not tensor.storage_offset() and tensor.is_contiguous():
        return size >= tensor.nbytes
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return size >= (tensor.storage_offset() + last + 1) * tensor.element_size()
