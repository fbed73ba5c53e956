"""All that a watcher knows, as plain data: the facts that a diagnosis is made from.

Weak references and names that begin with an underscore stay behind. Nothing is judged here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.watch.watcher import Watcher


def assemble(watcher: Watcher) -> dict[str, Any]:
    """The facts so far."""
    labels = [watcher.registry.label(record) for record in watcher.registry.parameters]
    parameters = [record.as_facts() for record in watcher.registry.parameters]
    for facts, label in zip(parameters, labels, strict=True):
        facts["label"] = label
    return {
        "schema": 1,
        "steps": watcher.state.steps,
        "backwards": watcher.state.backwards,
        "models": watcher.registry.models,
        "parameters": parameters,
        "optimizers": [held.as_facts() for held in watcher.optimizers.all],
        "manual": [watcher.registry.id_of(tensor) for tensor in watcher.backward.manual.tensors()],
        "backward_series": watcher.backward.series.as_facts(),
        "schedulers": [{k: v for k, v in s.items() if k != "ref"} for s in watcher.calls.schedulers],
        "looks": watcher.sampler.sampled_steps,
        "events": watcher.events.events,
        "evaluations": watcher.evaluations.passes,
        "evaluation_blocks": watcher.evaluations.blocks,
        "seeds": watcher.calls.seeds,
        "reseeds": watcher.calls.reseeds,
        "stream": watcher.context.data.as_facts(),
        "permutations": _permutations(watcher.sampler.sampled_steps),
        "clips": watcher.calls.clips,
        "loaders": [{k: v for k, v in loader.items() if k != "ref"} for loader in watcher.calls.loaders],
        "batches": watcher.calls.batches,
        "scaler": {k: v for k, v in watcher.state.scaler.items() if not k.startswith("_")},
        "policy": watcher.calls.policy,
        "divergences": watcher.calls.divergences,
        "retained": watcher.backward.retained_graphs.retained,
        "compiled": watcher.state.compiled,
        "problems": watcher.probes.problems,
        **({"guarded": watcher.guard.as_facts()} if watcher.guard is not None else {}),
    }


def _permutations(looks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every permutation that rows were seen to be picked by, at the first look that saw it."""
    found: dict[int, dict[str, Any]] = {}
    for look in looks:
        for order in look["notes"].get("orders", []):
            found.setdefault(order["number"], {"step": look["step"], **order})
    return list(found.values())[:200]
