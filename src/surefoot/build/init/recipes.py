"""The named recipes, each usable alone on one tensor.

Every function fills its tensor in place, outside autograd, and returns it. Numbers are drawn in float32 and then cast,
so a bfloat16 or float16 parameter gets the same distribution (and QR, which has no half-precision form, works).
`generator` takes the place of the global random stream; it must live on the tensor's device.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from surefoot.build.init.gains import gain_for

Fans = tuple[float, float]
"""How many inputs feed one output, and how many outputs one input feeds."""


def fans_of(weight: Tensor) -> Fans:
    """Fan-in and fan-out of a weight laid out as `(out, in, *kernel)`, the layout of `Linear` and `Conv`."""
    if weight.ndim < 2:
        raise ValueError(
            f"A fan needs a weight of at least 2 dimensions; got shape {tuple(weight.shape)}. "
            "Biases and gains have no fan: fill them with a constant."
        )
    kernel = math.prod(weight.shape[2:])
    return float(weight.shape[1] * kernel), float(weight.shape[0] * kernel)


def _fill(tensor: Tensor, draw: Callable[[Tensor], object]) -> Tensor:
    with torch.no_grad():
        value = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        draw(value)
        return tensor.copy_(value)


def normal_(tensor: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw from a normal distribution around zero; `std=0` writes zeros and draws nothing."""
    if std == 0.0:
        return constant_(tensor, 0.0)
    return _fill(tensor, lambda value: value.normal_(0.0, std, generator=generator))


def constant_(tensor: Tensor, value: float) -> Tensor:
    """Write one value everywhere."""
    with torch.no_grad():
        return tensor.fill_(value)


def he_normal_(
    tensor: Tensor, slope: float = 0.0, *, fans: Fans | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """He et al. 2015, for layers followed by a ReLU (`slope` is the negative side of a leaky one)."""
    fan_in, _ = fans or fans_of(tensor)
    return normal_(tensor, math.sqrt(2.0 / (1.0 + slope * slope) / fan_in), generator)


def xavier_normal_(
    tensor: Tensor, gain: float = 1.0, *, fans: Fans | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Glorot and Bengio 2010, for tanh-like layers and for layers with no activation after them."""
    fan_in, fan_out = fans or fans_of(tensor)
    return normal_(tensor, gain * math.sqrt(2.0 / (fan_in + fan_out)), generator)


def lecun_normal_(tensor: Tensor, *, fans: Fans | None = None, generator: torch.Generator | None = None) -> Tensor:
    """LeCun et al. 1998: variance 1 / fan-in, what SELU asks for."""
    fan_in, _ = fans or fans_of(tensor)
    return normal_(tensor, math.sqrt(1.0 / fan_in), generator)


def small_std(width: float) -> float:
    """Give the standard deviation of SmallInit, `sqrt(2 / 5d)` (Nguyen and Salazar 2019, arXiv:1910.05895)."""
    return math.sqrt(2.0 / (5.0 * width))


def small_normal_(tensor: Tensor, width: float | None = None, *, generator: torch.Generator | None = None) -> Tensor:
    """Small normal, for the linear layers of a transformer; `width` is the fan-in unless given."""
    return normal_(tensor, small_std(width or fans_of(tensor)[0]), generator)


def residual_normal_(
    tensor: Tensor, branches: int, std: float | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    """Scale the last layer of a residual branch by `1 / sqrt(branches)` (GPT-2, Radford et al. 2019).

    `branches` independent additions then grow the variance of the stream by one branch's worth in all. `std` is what
    the layer would have had on its own; SmallInit unless given.
    """
    if branches < 1:
        raise ValueError(f"`branches` counts the residual additions, at least 1; got {branches}.")
    own = small_std(fans_of(tensor)[0]) if std is None else std
    return normal_(tensor, own / math.sqrt(branches), generator)


def orthogonal_gates_(
    tensor: Tensor, gates: int, gain: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    """Make each gate's block of a stacked recurrent matrix orthogonal on its own (Saxe et al. 2013, arXiv:1312.6120).

    An LSTM stores four matrices in one tensor. Orthogonalising the whole tensor would make none of the four so.
    """
    if tensor.shape[0] % gates:
        raise ValueError(f"{tensor.shape[0]} rows do not split into {gates} gates; an LSTM has 4, a GRU 3, an RNN 1.")

    def draw(value: Tensor) -> None:
        for block in value.chunk(gates):
            nn.init.orthogonal_(block, gain, generator=generator)

    return _fill(tensor, draw)


def xavier_gates_(tensor: Tensor, gates: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Xavier with the fans of one gate's block, not of the stack."""
    rows, columns = tensor.shape
    return xavier_normal_(tensor, fans=(float(columns), rows / gates), generator=generator)


def remember_bias_(tensor: Tensor, gates: int, *, sequence_steps: int | None = None) -> Tensor:
    """Open the gate that keeps the state: the forget gate of an LSTM (`gates=4`), the update gate of a GRU (`gates=3`).

    With no `sequence_steps` that bias is 1 (Jozefowicz et al. 2015). With it, the biases are `log u` for times `u`
    spread evenly from 1 to `3 · sequence_steps`, and their negatives go to the LSTM's input gate (chrono
    initialisation, Tallec and Ollivier 2018, arXiv:1804.11188). A unit with time `u` passes `exp(-T / u)` of its
    gradient back over `T` steps: spread up to `T`, the paper's choice, leaves 0.17 of it (root mean square), up to
    `3 T` about half. Evenly, not at random as in the paper: units start without random variation.
    """
    if gates not in (3, 4) or tensor.shape[0] % gates:
        raise ValueError(
            f"Expected the bias of an LSTM (gates=4) or GRU (gates=3); got {gates=} and shape {tuple(tensor.shape)}."
        )
    hidden = tensor.shape[0] // gates

    def draw(value: Tensor) -> None:
        value.zero_()
        blocks = value.chunk(gates)
        if sequence_steps is None:
            blocks[1].fill_(1.0)
            return
        blocks[1].copy_(torch.linspace(1.0, 3.0 * sequence_steps, hidden).log())
        if gates == 4:
            blocks[0].copy_(-blocks[1])

    return _fill(tensor, draw)


def critical_(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    entry: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Hold GELU or SiLU at the one variance where signal and gradient both keep their scale (see `gains`).

    `entry` is for the first layer, the one fed by standardised data. The directions are orthogonal, because a narrow
    layer of independent draws drifts off the fixed point by chance.
    """
    gain = gain_for(activation)
    if gain.fixed_point is None:
        raise ValueError(f"`activation` must be 'gelu' or 'silu'; got {activation!r}. For ReLU use `he_normal_`.")
    gain = gain.for_layer(has_bias=bias is not None, fed_by_activation=not entry)
    if bias is not None:
        normal_(bias, math.sqrt(gain.bias), generator)
    return orthogonal_(weight, math.sqrt(gain.weight / fans_of(weight)[0]), generator)


def orthogonal_(tensor: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw orthogonal rows (or columns) whose entries have this root mean square."""

    def draw(value: Tensor) -> None:
        nn.init.orthogonal_(value, generator=generator)
        value.mul_(std * math.sqrt(value.numel()) / value.norm())

    return _fill(tensor, draw)
