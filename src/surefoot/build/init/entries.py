"""The parameters of a model, each once, with every name it has; and which of them `only` and `skip` leave in."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Patterns = str | Iterable[str]


@dataclass(frozen=True)
class ParameterEntry:
    """One distinct parameter, where it sits, and every name it has."""

    parameter: Tensor
    names: tuple[str, ...]
    module_name: str
    module: nn.Module
    attribute: str
    tied_embedding: bool


def entries_of(model: nn.Module) -> list[ParameterEntry]:
    """List the distinct parameters; one that an embedding shares counts as the embedding's."""
    owners: dict[Tensor, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module_name, module, attribute))
    entries = []
    for parameter, places in owners.items():
        embeddings = [place for place in places if isinstance(place[1], nn.Embedding | nn.EmbeddingBag)]
        module_name, module, attribute = (embeddings or places)[0]
        names = tuple(f"{prefix}.{last}" if prefix else last for prefix, _, last in places)
        tied_embedding = bool(embeddings) and len(embeddings) < len(places)
        entries.append(ParameterEntry(parameter, names, module_name, module, attribute, tied_embedding))
    return entries


def refuse_lazy(model: nn.Module) -> None:
    """Raise when a parameter has no shape yet."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy)} have no shape yet (lazy modules). Run one forward on a real batch, then `init_for`."
        )


def selected(entries: list[ParameterEntry], only: Patterns | None, skip: Patterns) -> set[str]:
    """Give the first names of the parameters that may be written."""
    chosen = {entry.names[0] for entry in entries} if only is None else _matching(entries, only, "only")
    return chosen - _matching(entries, skip, "skip")


def _matching(entries: list[ParameterEntry], patterns: Patterns, argument: str) -> set[str]:
    chosen = set[str]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {entry.names[0] for entry in entries if any(_names(pattern, name) for name in entry.names)}
        if not hits:
            raise ValueError(
                f"`{argument}` has {pattern!r}, which matches no parameter. Expected a parameter, a module or a "
                f"pattern such as 'encoder' or 'blocks.*.mlp'; the first names are {[e.names[0] for e in entries[:5]]}."
            )
        chosen |= hits
    return chosen


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
