"""Which parameters get weight decay: matrices and kernels, not norms, biases and embeddings.

Decay pulls a value to zero whether or not it has a gradient. A norm's gain should stay near one, a bias is a shift, and
the rows of an embedding that no batch uses would decay. Each parameter is in exactly one group: a tied weight is one
parameter (tied to an embedding, it is not decayed), and frozen ones are included, because an optimizer skips parameters
without a gradient, and leaving them out would lose them when they are unfrozen.

A module's own parameter is classified by its name if that indicates embedding or position (`pos_embed`, `pos`, `emb`),
else by its shape.

Not included: per-layer rates. The groups are plain dicts: add keys as needed.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from surefoot.core.settings import is_number, require_module, shown
from surefoot.errors import require

_MATRICES = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_POSITIONS = frozenset({"pos", "position", "positions", "positional", "pe", "emb", "embs"})
"""Words of a name that make a parameter of a module's own an embedding; `embed` does so anywhere in it."""
_UNDECAYED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


def decay_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    no_decay: str | Iterable[str] = (),
    include_frozen: bool = True,
) -> list[dict[str, Any]]:
    """Split the parameters into a group that decays and one that does not, ready for any torch optimizer.

    Args:
        model: Every parameter of it ends up in exactly one group.
        weight_decay: The decay of the first group; the second has 0.
        no_decay: Names or patterns of further parameters without decay, such as `"places"` or `"*.temperature"`.
        include_frozen: Whether parameters that require no gradient are in the groups.
    """
    require_module(model)
    require(
        is_number(weight_decay) and weight_decay >= 0.0,
        f"`weight_decay` must be a number, and must not be negative; got {shown(weight_decay)}.",
    )
    require(isinstance(no_decay, Iterable), f"`no_decay` must be a name or a list of names; got {shown(no_decay)}.")
    spared = _without_decay(model, [no_decay] if isinstance(no_decay, str) else list(no_decay))
    found: dict[Tensor, None] = {}
    owners = {
        parts: (module, name)
        for module in model.modules()
        if is_parametrized(module)
        for name, parts in cast("nn.ModuleDict", module.parametrizations).items()
    }
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                raise ValueError(f"`{attribute}` of {type(module).__name__} has no shape yet: run one forward first.")
            # With spectral_norm and similar functions the value is called `original`, in a separate module.
            owner, name = owners.get(module, (module, attribute))
            split = attribute not in (name, "original") and not isinstance(owner, _UNDECAYED)
            if not (_decays(module, attribute, parameter) if split else _decays(owner, name, parameter)):
                spared.add(parameter)
            found.setdefault(parameter)
    kept = [parameter for parameter in found if include_frozen or parameter.requires_grad]
    groups = [
        {
            "name": "decay",
            "params": [parameter for parameter in kept if parameter not in spared],
            "weight_decay": weight_decay,
        },
        {"name": "no_decay", "params": [parameter for parameter in kept if parameter in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _decays(module: nn.Module, attribute: str, parameter: Tensor) -> bool:
    if isinstance(module, _UNDECAYED) or "bias" in attribute or "embed" in attribute:
        return False
    if isinstance(module, _MATRICES) and attribute != "weight_g":
        return parameter.ndim > 1
    if not _POSITIONS.isdisjoint(attribute.lower().split("_")):
        return False
    # A vector with extra dimensions is a gain: LayerScale as (C, 1, 1), the length under weight_norm as (out, 1).
    return parameter.ndim > 1 and parameter.numel() > max(parameter.shape)


def _without_decay(model: nn.Module, patterns: list[str]) -> set[Tensor]:
    spared = set[Tensor]()
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        hits = [p for name, p in named if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not hits:
            raise ValueError(
                f"`no_decay` has {pattern!r}, which matches no parameter; the first names are "
                f"{[name for name, _ in named[:5]]}."
            )
        spared.update(hits)
    return spared
