"""Scale each layer to the variance that its recipe aims at, on a batch of real data.

A recipe is right on average over draws. In a deep plain network with few channels one draw can be far from the average,
since deviations multiply from layer to layer, and zero padding takes a little at every border. So one forward
measures the second moment of each layer's output and rescales its weight on the way (layer-sequential unit-variance,
Mishkin and Matas 2016, arXiv:1511.06422, with each recipe's own aim in place of one). Only weights change.

Not covered: layers whose weight is used several times or has a parametrization, and the backward pass, where the
deviation of a narrow network stays.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.build.init.trace import call
from surefoot.core.save_restore import untouched


def rescale(model: nn.Module, example: Any, aims: Mapping[Tensor, float]) -> None:
    """Multiply each weight in `aims` so that its layer's output on `example` has that second moment."""
    factors: dict[Tensor, float] = {}

    def adjust(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if weight is None or weight in factors:
            return output
        shift = torch.zeros(()) if bias is None else _beside_channels(bias, weight)
        signal = (output - shift.to(output)).double()
        moment, spent = float(signal.square().mean()), float(shift.double().square().mean())
        if not math.isfinite(moment) or moment <= 0.0 or spent >= aims[weight]:
            return output
        factors[weight] = math.sqrt((aims[weight] - spent) / moment)
        return (signal * factors[weight]).to(output) + shift.to(output)

    handles = [
        module.register_forward_hook(adjust)
        for module in model.modules()
        if module._parameters.get("weight") is not None and module._parameters["weight"] in aims
    ]
    try:
        with untouched(model), torch.no_grad():
            model.eval()
            call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        for weight, factor in factors.items():
            weight.mul_(factor)


def _beside_channels(bias: Tensor, weight: Tensor) -> Tensor:
    """Shape a bias to add to the output of its layer; a convolution's channels come before its positions."""
    return bias.detach().view(-1, *[1] * (weight.ndim - 2))
