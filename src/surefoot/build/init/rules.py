"""Which recipe for which parameter: the table of decisions behind `init_for`.

One rule per kind of module. A rule says what to write, why, and what PyTorch's own default looks like (so that a value
which is not the default is recognised as set, and kept). Parameters of modules without a rule are left alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from surefoot.build.init import recipes
from surefoot.build.init.fresh import Default
from surefoot.build.init.gains import gain_for
from surefoot.build.init.guess import Conv, Norm, weight_of
from surefoot.build.init.trace import Role, Trace

Fill = Callable[[Tensor, torch.Generator | None], object]
Recurrent = nn.RNNBase | nn.RNNCellBase

_ZERO: Default = ("constant", 0.0)
_ONE: Default = ("constant", 1.0)


@dataclass(frozen=True)
class InitRule:
    """What to do with one parameter."""

    recipe: str
    """The recipe's name, or `left` when nothing is written."""

    why: str
    """What was seen that led to it."""

    fill: Fill | None = None
    """Writes the value; `None` leaves the parameter alone."""

    std: float | None = None
    """The standard deviation asked for, where the recipe has one."""

    aim: float | None = None
    """The variance the layer's output should have, where a calibration may hold it to that."""

    defaults: tuple[Default, ...] = ()
    """What the parameter looks like as PyTorch initialised it."""


def left(why: str) -> InitRule:
    """Make the rule that leaves a parameter alone."""
    return InitRule("left", why)


def rule_for(module: nn.Module, attribute: str, parameter: Tensor, *, found: Trace, tied: bool) -> InitRule:
    """Choose the rule for `module.attribute`."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _embedding(module, tied=tied)
    if isinstance(module, nn.Linear | Conv):
        return _layer(module, attribute, parameter, found)
    if isinstance(module, Norm):
        return _norm(attribute)
    if isinstance(module, Recurrent):
        return _recurrent(module, attribute, parameter, found.sequence_steps)
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, attribute, parameter)
    return left(f"no rule for the parameters of {type(module).__name__}")


def weight_norm_rule(parent: nn.Module, attribute: str, found: Trace) -> InitRule:
    """Give the rule for a weight behind `torch.nn.utils.parametrizations.weight_norm`, on the product it computes."""
    if not isinstance(parent, nn.Linear | Conv):
        return left(f"no rule for a parametrized {type(parent).__name__}")
    rule = _layer(parent, attribute, getattr(parent, attribute), found)
    return replace(rule, why=f"{rule.why}; written through weight_norm")


def is_weight_norm(module: nn.Module) -> bool:
    """Whether this is the parametrization list of one `weight_norm` and nothing else."""
    return (
        isinstance(module, parametrize.ParametrizationList)
        and len(module) == 1
        and type(module[0]).__name__ == "_WeightNorm"
    )


def _normal(recipe: str, why: str, std: float, *defaults: Default) -> InitRule:
    return InitRule(
        recipe, why, lambda tensor, generator: recipes.normal_(tensor, std, generator), std, defaults=defaults
    )


def with_orthogonal_directions(rule: InitRule) -> InitRule:
    """Keep the rule's scale, and draw orthogonal directions, which do not vary in length."""
    std = rule.std
    if std is None:
        return rule
    return replace(rule, fill=lambda tensor, generator: recipes.orthogonal_(tensor, std, generator))


def _constant(recipe: str, why: str, value: float, *defaults: Default) -> InitRule:
    return InitRule(recipe, why, lambda tensor, _: recipes.constant_(tensor, value), defaults=defaults)


def _norm(attribute: str) -> InitRule:
    if attribute == "weight":
        return _constant("ones", "gain of a norm layer", 1.0, _ONE)
    return _constant("zeros", "shift of a norm layer", 0.0, _ZERO)


def _embedding(module: nn.Embedding | nn.EmbeddingBag, *, tied: bool) -> InitRule:
    if tied:
        std, why = 1.0 / math.sqrt(module.embedding_dim), "embedding tied to an output layer: logits of unit scale"
    else:
        std, why = 1.0, "embedding: a stream of unit scale, large beside what each block adds (arXiv:2312.16903)"
    padding = module.padding_idx

    def fill(tensor: Tensor, generator: torch.Generator | None) -> None:
        recipes.normal_(tensor, std, generator)
        if padding is not None:
            with torch.no_grad():
                tensor[padding].zero_()

    return InitRule("normal", why, fill, std, defaults=(("normal", 1.0),))


def _fans(module: nn.Module, weight: Tensor) -> recipes.Fans:
    """Give the true fans, counting the groups and strides of a convolution."""
    fan_in, fan_out = recipes.fans_of(weight)
    if not isinstance(module, Conv):
        return fan_in, fan_out
    if module.transposed:  # stored as (in, out / groups, *kernel); a stride spreads the inputs over more outputs
        return fan_out / module.groups / math.prod(module.stride), fan_in
    return fan_in, fan_out / module.groups


def _layer(module: nn.Module, attribute: str, parameter: Tensor, found: Trace) -> InitRule:
    weight, owner = module.weight, weight_of(module)
    if not isinstance(weight, Tensor) or attribute not in ("weight", "bias"):
        return left(f"no rule for `{attribute}` of {type(module).__name__}")
    unseen = Role("unknown")
    role = unseen if owner is None else found.roles.get(owner, unseen)
    small = isinstance(module, nn.Linear) and found.attention
    gain = gain_for(role.activation, role.slope).for_layer(
        has_bias=module.bias is not None, fed_by_activation=role.fed_by == "activation"
    )
    if attribute == "bias":
        fresh: tuple[Default, ...] = (("uniform", 1.0 / math.sqrt(recipes.fans_of(weight)[0])), _ZERO)
        if small or role.ends_branch or not gain.bias:
            return _constant("zeros", "bias", 0.0, *fresh)
        return _normal(gain.recipe, _describe(role), math.sqrt(gain.bias), *fresh)
    fan_in, fan_out = _fans(module, weight)
    if small:
        recipe, why, std = "small normal", "linear layer of a transformer", recipes.small_std(fan_in)
    else:
        fan = fan_in if gain.fan == "in" else (fan_in + fan_out) / 2.0
        recipe, why, std = gain.recipe, _describe(role), math.sqrt(gain.weight / fan)
    if role.ends_branch:
        recipe, why = f"{recipe} / √{found.branches}", f"ends one of {found.branches} residual branches"
        std /= math.sqrt(found.branches)
    rule = _normal(recipe, why, std, *_weight_defaults(parameter))
    rule = replace(rule, aim=gain.aim) if recipe in ("he", "critical") else rule
    return with_orthogonal_directions(rule) if recipe == "critical" else rule


def _weight_defaults(weight: Tensor) -> tuple[Default, ...]:
    """Give what the layer itself draws, and what `nn.Transformer` puts over it."""
    fan_in, fan_out = recipes.fans_of(weight)
    return ("uniform", 1.0 / math.sqrt(fan_in)), ("uniform", math.sqrt(6.0 / (fan_in + fan_out)))


def _describe(role: Role) -> str:
    if role.activation == "unknown":
        return "activation not seen, drawn as for ReLU (an `example` input would show it)"
    if role.activation == "none":
        return "no activation follows"
    entry = "" if role.fed_by == "activation" else ", fed by standardised input"
    return f"followed by {role.activation}{entry}"


def _gates(module: nn.Module) -> int:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return 4
    return 3 if isinstance(module, nn.GRU | nn.GRUCell) else 1


def _recurrent(module: nn.RNNBase | nn.RNNCellBase, attribute: str, parameter: Tensor, steps: int | None) -> InitRule:
    gates, hidden = _gates(module), int(module.hidden_size)
    fresh: Default = ("uniform", 1.0 / math.sqrt(hidden))
    if attribute.startswith("weight_hh"):
        return InitRule(
            "orthogonal",
            f"recurrent matrix, each of {gates} gate blocks on its own",
            lambda tensor, generator: recipes.orthogonal_gates_(tensor, gates, generator=generator),
            1.0 / math.sqrt(parameter.shape[1]),
            defaults=(fresh,),
        )
    if attribute.startswith(("weight_ih", "weight_hr")):
        blocks = gates if attribute.startswith("weight_ih") else 1
        return InitRule(
            "xavier",
            f"recurrent layer's {'input' if blocks == gates else 'projection'}, by gate block",
            lambda tensor, generator: recipes.xavier_gates_(tensor, blocks, generator=generator),
            math.sqrt(2.0 / (parameter.shape[1] + parameter.shape[0] / blocks)),
            defaults=(fresh,),
        )
    if gates > 1 and attribute.startswith("bias_ih"):
        reach = f"times spread for sequences of {steps} steps" if steps else "1"
        return InitRule(
            "remember",
            f"bias of the gate that keeps the state: {reach}",
            lambda tensor, _: recipes.remember_bias_(tensor, gates, sequence_steps=steps),
            defaults=(fresh,),
        )
    return _constant("zeros", "bias of a recurrent layer", 0.0, fresh)


def _attention(module: nn.MultiheadAttention, attribute: str, parameter: Tensor) -> InitRule:
    if attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        rows, fan_in = parameter.shape
        packed = "query, key and value packed in one; each" if attribute == "in_proj_weight" else "attention input,"
        why = f"{packed} drawn with its own fan-in"
        return _normal("small normal", why, recipes.small_std(fan_in), ("uniform", math.sqrt(6.0 / (rows + fan_in))))
    if attribute == "in_proj_bias":
        return _constant("zeros", "bias of the attention inputs", 0.0, _ZERO)
    return left(f"no rule for `{attribute}` of MultiheadAttention")
