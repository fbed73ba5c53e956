"""Masks that do not produce NaN.

Everywhere here `keep` is a boolean tensor in which **True takes part**, as in `scaled_dot_product_attention`. The
`key_padding_mask` of `nn.MultiheadAttention` is the opposite: pass `~key_padding_mask`.

A common error is a row with nothing to attend to (an empty sequence in a padded batch): softmax over minus infinity
everywhere is 0 / 0, and its NaN reaches every weight through the gradient even if the row itself is dropped later,
because 0 × NaN is NaN.
"""

import torch
from torch import Tensor

from surefoot.core.settings import shown

_VERY_NEGATIVE = -9e3
"""An additive mask from here down leaves nothing of a score; the mildest in common use is -1e4."""


def mask_fill_value(dtype: torch.dtype) -> float:
    """Give a value for `masked_fill` or an additive mask that is far below any score and overflows nothing.

    Half the most negative number of the type: adding it to a score still fits, where the full one (or `-1e9` in
    float16) becomes minus infinity.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"Scores are floating point; got {dtype}. For an integer tensor, mask after the cast.")
    return float(torch.finfo(dtype).min) / 2.0


def _check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`{name}` must be a tensor; got {shown(tensor)}.")


def masked_softmax(scores: Tensor, keep: Tensor, dim: int = -1) -> Tensor:
    """Softmax over the entries where `keep` is True; the others are exactly 0, and so is a row with nothing to keep.

    The gradient is finite everywhere, and zero wherever `keep` is False, whatever was in the scores there. Half
    precision is computed in float32 and cast back.
    """
    _check_tensors(scores=scores, keep=keep)
    if keep.dtype != torch.bool:
        raise TypeError(
            f"`keep` must be boolean, True where an entry takes part; got {keep.dtype}. "
            "For an additive mask use `mask == 0`."
        )
    if not scores.is_floating_point():
        raise TypeError(f"`scores` must be floating point; got {scores.dtype}.")
    keep = keep & (scores != float("-inf"))  # already masked by hand, which is equivalent
    some = keep.any(dim=dim, keepdim=True)
    # Select, never multiply: a masked entry may be NaN. A row with nothing kept becomes zeros, not -inf.
    filled = scores.masked_fill(~keep, float("-inf")).masked_fill(~some, 0.0)
    wide = torch.float32 if scores.dtype.itemsize < 4 else scores.dtype
    return torch.softmax(filled, dim=dim, dtype=wide).masked_fill(~keep, 0.0).to(scores.dtype)


def find_fully_masked(mask: Tensor, dim: int = -1) -> Tensor:
    """Find the rows along `dim` with nothing to keep: the indices, one row of the result each.

    `mask` is boolean with True taking part, or additive (0 for what takes part, very negative for the rest).
    """
    _check_tensors(mask=mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"`mask` must be boolean (True takes part) or additive floating point; got {mask.dtype}.")
    keep = mask if mask.dtype == torch.bool else mask > _VERY_NEGATIVE
    return (~keep.any(dim=dim)).nonzero()
