"""All that a watcher knows, as plain data: the facts that a diagnosis is made from.

Weak references and names that begin with an underscore stay behind. Nothing is judged here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.core.formats import FACTS

if TYPE_CHECKING:
    from surefoot.watch.watcher import Watcher


def assemble(watcher: Watcher) -> dict[str, Any]:
    """The facts so far."""
    labels = [watcher.book.label(record) for record in watcher.book.parameters]
    parameters = [record.as_facts() for record in watcher.book.parameters]
    for facts, label in zip(parameters, labels, strict=True):
        facts["label"] = label
    return {
        "schema": FACTS.version,
        "steps": watcher.steps,
        "backwards": watcher.backwards,
        "models": watcher.book.models,
        "parameters": parameters,
        "optimizers": [held.as_facts() for held in watcher.optimizers],
        "manual": [watcher.book.id_of(tensor) for tensor in watcher.manual.tensors()],
        "backward_series": watcher.backward_series.as_facts(),
        "schedulers": [{k: v for k, v in s.items() if k != "ref"} for s in watcher.schedulers],
        "looks": watcher.looks,
        "events": watcher.events,
        "evaluations": watcher.evaluations.passes,
        "evaluation_blocks": watcher.evaluations.blocks,
        "seeds": watcher.seeds,
        "reseeds": watcher.reseeds,
        "stream": watcher.stream.as_facts(),
        "permutations": _permutations(watcher.looks),
        "clips": watcher.clips,
        "loaders": [{k: v for k, v in loader.items() if k != "ref"} for loader in watcher.loaders],
        "batches": watcher.batches,
        "scaler": {k: v for k, v in watcher.scaler.items() if not k.startswith("_")},
        "policy": watcher.policy,
        "divergences": watcher.divergences,
        "retained": watcher.kept.retained,
        "compiled": watcher.compiled,
        "problems": watcher.problems,
        **({"guarded": watcher.guard.as_facts()} if watcher.guard is not None else {}),
    } | ({"experiment": watcher.experiment.as_facts()} if watcher.experiment is not None else {})


def _permutations(looks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every permutation that rows were seen to be picked by, at the first look that saw it."""
    found: dict[int, dict[str, Any]] = {}
    for look in looks:
        for order in look["notes"].get("orders", []):
            found.setdefault(order["number"], {"step": look["step"], **order})
    return list(found.values())[:200]
