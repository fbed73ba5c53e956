"""Bring images to the scale a network expects: bytes to [0, 1], then mean 0 and deviation 1 per channel.

For statistics of your own data fit `Standardizer.fit(images, feature_axis=1)` on the training images and pass its
`mean` and `scale`. Not included: resizing and augmentation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.core.settings import shown
from surefoot.errors import require

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Red, green, blue, of ImageNet's training images in [0, 1]: what torchvision's pretrained models were trained with."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Their standard deviation."""


def normalize_images(
    images: Tensor, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
) -> Tensor:
    """Normalise `(…, channels, height, width)`: uint8 from 0 to 255, or floats already in [0, 1]."""
    is_tensor = isinstance(images, Tensor)
    require(is_tensor, f"`images` must be a tensor; got {shown(images)}. For an array, use `torch.from_numpy`.")
    if images.ndim < 3 or images.shape[-3] != len(mean):
        hint = " It looks channels-last: use `images.movedim(-1, -3)`." if images.shape[-1:] == (len(mean),) else ""
        raise ValueError(f"Expected {len(mean)} channels third from last; got shape {tuple(images.shape)}.{hint}")
    if len(std) != len(mean) or min(std) <= 0.0:
        raise ValueError(f"`std` needs {len(mean)} positive values, one per channel; got {tuple(std)}.")
    if images.dtype == torch.uint8:
        scaled = images.float() / 255.0
    elif images.is_floating_point():
        scaled = images
        low, high = images.aminmax()
        if not (float(low) >= 0.0 and float(high) <= 1.0):
            raise ValueError(
                f"Float images must be in [0, 1]; got {float(low):.4g} to {float(high):.4g}. Divide bytes by 255; "
                "negative values mean that the images were normalised already."
            )
    else:
        raise TypeError(f"Expected uint8 or floating point images; got {images.dtype}.")
    centre, width = (
        torch.tensor(list(v), dtype=scaled.dtype, device=images.device).view(-1, 1, 1) for v in (mean, std)
    )
    return (scaled - centre) / width
