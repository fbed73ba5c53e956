"""What is odd about networks that estimate values, as critics do, but may be meant: a reason not to call a run healthy.

A critic is trained on targets that a network computed itself (`reward + gamma * value of the next state`). Whether its
values are rewards or costs, and how rarely its target network is updated, only the author knows.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.watch.operation_names import DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LossCall, ParameterFacts

_FEWEST_STEPS = 100
_FEWEST_SEEN = 5


def doubt_about_values(run: RecordedRun) -> str:
    """The reason in one sentence; empty if there is none."""
    return _lowers_values(run) or _stale_targets(run)


def _lowers_values(run: RecordedRun) -> str:
    """A loss of one network that lowers the outputs of another one, a critic: the sign is right for costs only."""
    critics = _critics(run)
    totals: list[float] = []
    site, lowered = "", ""
    for look in run.sampled.steps:
        models = {call.index: call.model for call in look.model_calls if call.model in critics}
        for root in look.backward_calls:
            pushed = [each for each in root.output_gradients or [] if each.index in models and each.total is not None]
            own = any(critics[models[each.index]] & set(root.optimizers) for each in pushed)
            if not root.optimizers or not pushed or own:
                continue
            totals.append(sum(each.total or 0.0 for each in pushed))
            site, lowered = root.site, models[pushed[0].index]
    if len(totals) < _FEWEST_SEEN or sum(total > 0 for total in totals) < 0.9 * len(totals):
        return ""
    return (
        f"No fault was found, but the loss{at_place(site)} lowers the values that `{lowered}` gives: that is right if "
        f"they are costs, and the wrong sign if they are sums of rewards."
    )


def _critics(run: RecordedRun) -> dict[str, set[int]]:
    """The models that are trained on targets from a network, with their optimizers."""
    modules = {call.producer.module for call in _value_losses(run) if call.producer is not None}
    found: dict[str, set[int]] = {}
    for p in run.parameters.values():
        if p.optimizers and any(module == p.model or module.startswith(f"{p.model}.") for module in modules):
            found.setdefault(p.model, set()).update(p.optimizers)
    return found


def _value_losses(run: RecordedRun) -> list[LossCall]:
    """Losses with one target per row that a network computed. Several are features of a teacher, not values."""
    calls = run.sampled.training_losses(*DISTANCE_LOSSES)
    return [n for n in calls if n.target_from_model and max(n.target.shape or [0]) == prod(n.target.shape)]


def _stale_targets(run: RecordedRun) -> str:
    """A copy of the trained network computes the targets of a loss, and never changes."""
    losses = _value_losses(run)
    if run.steps < _FEWEST_STEPS or len(losses) < _FEWEST_SEEN:
        return ""
    models: dict[str, list[ParameterFacts]] = {}
    for p in run.parameters.values():
        if p.model:
            models.setdefault(p.model, []).append(p)
    trained = [p for p in run.parameters.values() if p.optimizers and p.changed]
    sets = [trained, *([p for p in mine if p.optimizers and p.changed] for mine in models.values())]
    for name, mine in models.items():
        still = all(not p.optimizers and not p.moved_alone and len(p.moves) >= _FEWEST_SEEN for p in mine)
        if still and any(_is_copy(mine, others) for others in sets):
            return (
                f"No fault was found, but `{name}`, which computes the targets of the loss{at_place(losses[0].site)}, "
                f"has not changed in {run.steps:,} steps: copy the trained weights to it every few hundred steps, as "
                f"in `target.load_state_dict(model.state_dict())`."
            )
    return ""


def _is_copy(mine: list[ParameterFacts], trained: list[ParameterFacts]) -> bool:
    """Whether parameters have the shapes of the trained ones, and are their first values or new: no trained teacher."""
    if sorted(p.shape for p in mine) != sorted(p.shape for p in trained):
        return False
    norms = {p.first.norm for p in trained}
    return all(p.first.norm in norms for p in mine) or not any(p.loaded or p.rewritten for p in mine)
