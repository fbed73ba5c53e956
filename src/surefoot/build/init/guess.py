"""What surrounds each weight, from the modules alone, if there is no example to trace.

Only what the modules show is used. Inside an `nn.Sequential` the order is the order of the calls. torch's own
transformer layers have a known structure. Elsewhere, if the model holds one kind of activation, that is the one;
otherwise the activation is `unknown`, the report says so, and an example settles it.
"""

from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn
from torch.nn.utils import parametrize

from surefoot.build.init.trace import Role, Trace

_NAMES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu",
    nn.PReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Hardtanh: "hardtanh",
    nn.Sigmoid: "sigmoid",
    nn.Softsign: "softsign",
    nn.SELU: "selu",
    nn.ELU: "elu",
    nn.CELU: "elu",
    nn.Softplus: "softplus",
    nn.Mish: "mish",
    nn.Hardswish: "hardswish",
}

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Norm = nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.modules.batchnorm._NormBase


def guess(model: nn.Module) -> Trace:
    """Fill a `Trace` from the modules alone."""
    found = Trace(attention=any(isinstance(module, nn.MultiheadAttention) for module in model.modules()))
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            _read_sequence(list(_leaves(module)), found.roles, whole=module is model)
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            _read_transformer_layer(module, found)
    _guess_the_rest(model, found.roles)
    return found


def _leaves(sequence: nn.Sequential) -> Iterator[nn.Module]:
    for child in sequence:
        if isinstance(child, nn.Sequential):
            yield from _leaves(child)
        else:
            yield child


def weight_of(module: nn.Module) -> Tensor | None:
    """Give the parameter behind a layer's weight; under `weight_norm` that is the direction."""
    if not isinstance(module, nn.Linear | Conv):
        return None
    if parametrize.is_parametrized(module, "weight"):
        return dict(module.named_parameters()).get("parametrizations.weight.original1")
    return module._parameters.get("weight")


def _read_sequence(leaves: list[nn.Module], roles: dict[Tensor, Role], *, whole: bool) -> None:
    fed_by_activation = False
    for place, leaf in enumerate(leaves):
        weight = weight_of(leaf)
        if weight is not None and weight not in roles:
            role = _look_ahead(leaves[place + 1 :], ends=whole, fed_by_activation=fed_by_activation)
            if role is not None:
                roles[weight] = role
        if type(leaf) in _NAMES:
            fed_by_activation = True
        elif weight is not None or isinstance(leaf, Norm) or any(leaf.children()):
            fed_by_activation = False


def _look_ahead(leaves: list[nn.Module], *, ends: bool, fed_by_activation: bool) -> Role | None:
    """Find the next activation; `None` when a sequence inside a larger model ends before one is met."""
    fed_by: Literal["activation", "other"] = "activation" if fed_by_activation else "other"
    for leaf in leaves:
        if type(leaf) in _NAMES:
            return Role(_NAMES[type(leaf)], float(getattr(leaf, "negative_slope", 0.0)), fed_by=fed_by)
        if weight_of(leaf) is not None:
            return Role(fed_by=fed_by)
        if any(leaf.children()):  # something with a forward of its own
            return None
    return Role(fed_by=fed_by) if ends else None


def _read_transformer_layer(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, found: Trace) -> None:
    ends = [layer.self_attn.out_proj, layer.linear2]
    if isinstance(layer, nn.TransformerDecoderLayer):
        ends.append(layer.multihead_attn.out_proj)
    found.branches += len(ends)
    found.roles[layer.linear1.weight] = Role("relu" if layer.activation is nn.functional.relu else "gelu")
    for module in ends:
        found.roles[module.weight] = Role(ends_branch=True)


def _guess_the_rest(model: nn.Module, roles: dict[Tensor, Role]) -> None:
    kinds = {_NAMES[type(module)] for module in model.modules() if type(module) in _NAMES}
    slopes = [module.negative_slope for module in model.modules() if isinstance(module, nn.LeakyReLU)]
    weights = [weight for module in model.modules() if (weight := weight_of(module)) is not None]
    common = Role(kinds.pop(), slopes[0] if slopes else 0.0, "activation") if len(kinds) == 1 else Role("unknown")
    for weight in weights:
        roles.setdefault(weight, Role(fed_by="activation") if weight is weights[-1] else common)
