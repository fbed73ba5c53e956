"""Tensors in a script: a few values as a literal, constants as a constant, the rest in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.keep.checkpoint.tree import STORED_AS_IS

MOST_VALUES = 32
"""A tensor with at most this many values is written into the script."""
_PLAIN = (torch.float32, torch.int64, torch.bool)


def literal(tensor: Tensor) -> str | None:
    """The tensor as an expression that recreates it bitwise; `None` if it belongs in a file."""
    eight_bits = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    if tensor.is_complex() or eight_bits or tensor.dtype not in STORED_AS_IS:
        return None
    extras = "" if tensor.dtype in _PLAIN else f", dtype={tensor.dtype}"
    extras += "" if tensor.device.type == "cpu" else f', device="{tensor.device.type}"'
    for text in _candidates(tensor.cpu()):
        words = f"torch.{text.removesuffix(')')}{extras})"
        if _makes(words, tensor):
            return words
    return None


def _candidates(tensor: Tensor) -> list[str]:
    shape = ", ".join(map(str, tensor.shape)) or "()"
    if tensor.numel() == 0:
        return [f"zeros({shape})", f"zeros(({shape},), dtype={tensor.dtype})"]
    found = []
    values = tensor.flatten()
    first = values[0].item()
    if tensor.numel() > 2 and bool((values == first).all()):
        if tensor.dtype != torch.bool:
            found += [f"zeros({shape})"] if first == 0 else [f"ones({shape})"] if first == 1 else []
        found.append(f"full({tuple(tensor.shape)}, {_number(first, tensor.dtype)})")
    if tensor.numel() <= MOST_VALUES:
        found.append(f"tensor({_nested(tensor.tolist(), tensor.dtype)})")
    return found


def _nested(values: Any, dtype: torch.dtype) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(_nested(each, dtype) for each in values) + "]"
    return _number(values, dtype)


def _number(number: Any, dtype: torch.dtype) -> str:
    """The shortest decimal that is this number in its own precision."""
    if not isinstance(number, float):
        return repr(number)
    if not math.isfinite(number):
        return f'float("{number}")'
    if dtype == torch.float64:
        return repr(number)
    short = repr(float(str(np.float16(number) if dtype == torch.float16 else np.float32(number))))
    again = torch.tensor(float(short), dtype=dtype)
    return short if again.item() == number else repr(number)


def _makes(words: str, tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # as without `torch.set_default_device`
        again = eval(words, {"torch": torch})
    same_kind = again.dtype == tensor.dtype and again.shape == tensor.shape and again.device == tensor.device
    return bool(same_kind and _bits(again).equal(_bits(tensor)))


def _bits(tensor: Tensor) -> Tensor:
    """The bits that must agree; all NaN values count as equal."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def stored(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors for the file, and how the script gets each from there."""
    kept, words = {}, {}
    for name, tensor in tensors.items():
        text = f'tensors["{name}"]'
        plain = tensor.detach().cpu().contiguous()
        if plain.is_complex():
            plain, text = torch.view_as_real(plain).contiguous(), f"torch.view_as_complex({text})"
        kept[name] = plain
        words[name] = text if tensor.device.type == "cpu" else f'{text}.to("{tensor.device.type}")'
    return kept, words
