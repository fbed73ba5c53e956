"""Three blocks that keep their scale: pre-norm MLP, convolution with GroupNorm, scaled residual.

Each is a plain `nn.Module` of torch parts, so it compiles, saves and loads like any other. Not included: attention,
which torch has (`nn.TransformerEncoderLayer(norm_first=True)` is its pre-norm block).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from surefoot.core.settings import is_number, is_whole, require_module, shown
from surefoot.errors import require


class ScaledResidual(nn.Module):
    """`x + scale · branch(x)`: a residual connection whose branch starts small.

    With `learnable_features=None` the scale is one constant. With a number of features it is a learnable vector, one
    entry per feature, that starts at `scale` (LayerScale, Touvron et al. 2021, arXiv:2103.17239).
    """

    def __init__(
        self, branch: nn.Module, scale: float, *, learnable_features: int | None = None, feature_axis: int = -1
    ) -> None:
        """Wrap `branch`; `feature_axis` is where the features are: -1 for sequences, 1 for images."""
        require_module(branch, "branch")
        require(is_number(scale), f"`scale` must be a number; got {shown(scale)}.")
        super().__init__()
        self.branch = branch
        self.scale = scale
        self.feature_axis = feature_axis
        self.gain: nn.Parameter | None = None
        if learnable_features is not None:
            self.gain = nn.Parameter(torch.full((learnable_features,), float(scale)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the scaled branch to the inputs."""
        change: Tensor = self.branch(inputs)
        if change.shape != inputs.shape:
            raise ValueError(
                f"A residual branch must keep the shape; got {tuple(change.shape)} from {tuple(inputs.shape)}. "
                "Project the shortcut too, or give the branch the same width in and out."
            )
        if self.gain is None:
            return inputs + self.scale * change
        shape = [1] * inputs.ndim
        shape[self.feature_axis] = -1
        return inputs + self.gain.view(shape) * change

    def extra_repr(self) -> str:
        """Show the scale and whether it learns."""
        return f"scale={self.scale}, learnable={self.gain is not None}"


class PreNormMLP(nn.Module):
    """`x + MLP(norm(x))`: the norm is inside the branch, so the residual stream itself is not normalised.

    The gradient passes through the sum unchanged, which is why deep stacks of these train without warm-up where the
    post-norm form `norm(x + MLP(x))` does not (Xiong et al. 2020, arXiv:2002.04745).
    """

    def __init__(
        self,
        features: int,
        *,
        expansion: float = 4.0,
        activation: Callable[[], nn.Module] = nn.GELU,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        """Make a block of `features` in and out, `expansion` times as wide inside."""
        _require_count("features", features)
        super().__init__()
        hidden = max(1, round(features * expansion))
        self.norm = norm(features)
        self.mlp = nn.Sequential(
            nn.Linear(features, hidden), activation(), nn.Linear(hidden, features), nn.Dropout(dropout)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the output of the MLP for the normalised inputs."""
        change: Tensor = self.mlp(self.norm(inputs))
        return inputs + change


class ConvGroupNorm(nn.Module):
    """Convolution, GroupNorm, activation: the same at any batch size, one image included.

    The number of groups adapts to the channels (`groups_for`), so widths that 8 does not divide work.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel_size: int = 3,
        *,
        stride: int = 1,
        most_groups: int = 8,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        """Make the block; an odd kernel keeps the image's size at stride 1."""
        _require_count("channels_in", channels_in)
        _require_count("channels_out", channels_out)
        super().__init__()
        padding = kernel_size // 2
        # The norm subtracts each group's mean and has its own shift: a bias before it would have no effect.
        self.conv = nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding, bias=False)
        self.norm = nn.GroupNorm(groups_for(channels_out, most_groups), channels_out)
        self.activation = activation()

    def forward(self, images: Tensor) -> Tensor:
        """Convolve, normalise, activate."""
        output: Tensor = self.activation(self.norm(self.conv(images)))
        return output


def _require_count(name: str, value: object) -> None:
    require(is_whole(value) and value >= 1, f"`{name}` must be a whole number, at least 1; got {shown(value)}.")  # type: ignore[operator]


def groups_for(channels: int, most: int = 8) -> int:
    """Find the largest number of groups up to `most` that divides `channels` and leaves at least two in each.

    One channel per group would be InstanceNorm, which zeroes a 1×1 map. A prime number of channels gets one group.
    """
    if channels < 1 or most < 1:
        raise ValueError(f"`channels` and `most` must be at least 1; got {channels} and {most}.")
    return max(count for count in range(1, most + 1) if count == 1 or (channels % count == 0 and channels > count))
