"""Policies and rewards: the inputs of a policy gradient, and the course of the policy."""

from __future__ import annotations

import functools
import math
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING, Any

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import where_of
from surefoot.diagnose.policy_signals import (
    logged_entropy_collapse,
    logged_kl_blowup,
    logged_ratio_explosion,
    logged_zero_advantage,
)
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.pace import ADAPTIVE
from surefoot.watch.operation_names import DISTANCE_LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import DifferenceCall, LossCall, ProductCall

_LOGS = {"log_prob", "log_softmax", "gather", "logsumexp"}


def advantages(run: RecordedRun) -> list[ProductCall]:
    """The factors of log-probabilities, or of importance ratios."""
    return [n for n in run.sampled.calls.products if n.other.std is not None and set(n.history) & (_LOGS | {"exp"})]


def is_policy(run: RecordedRun) -> bool:
    """Whether the script trains a policy: log-probabilities of drawn actions, weighted by their results."""
    if run.facts.policy_entropies or run.sampled.calls.ratios:
        return True
    return any(not n.other_binary or n.other.max == 0 for n in advantages(run)) and not any(
        n.op in ("cross_entropy", "nll_loss") for n in run.sampled.training_losses()
    )


def returns(run: RecordedRun) -> list[tuple[int, float, float]]:
    """Step, mean and spread of the returns: targets of the value function, or weights, before they were centred."""
    found = [
        (n.step, n.target.mean, n.target.std)
        for n in _fitted_values(run)
        if n.target.mean is not None and n.target.std is not None
    ]
    if len(found) >= 4:
        return sorted(found)
    raw = [(n.step, n.other.mean or 0.0, n.other.std or 0.0) for n in advantages(run)]
    centred = mean(abs(m) < 0.05 * s + 1e-6 for _, m, s in raw) > 0.5 if raw else True
    before = [(n.step, n.uncentred) for n in advantages(run) if n.uncentred is not None]
    return sorted((step, u.mean or 0.0, u.std or 0.0) for step, u in before) if centred else sorted(raw)


def _fitted_values(run: RecordedRun) -> list[LossCall | DifferenceCall]:
    """Predictions that are fitted to numbers, by a loss function or by hand."""
    return [*run.sampled.training_losses(*DISTANCE_LOSSES), *_value_errors(run)]


def _value_errors(run: RecordedRun) -> list[DifferenceCall]:
    """Predictions minus returns, by hand: differences that are not between log-probabilities."""
    densities = {n.site for n in run.sampled.calls.ratios}  # an action minus its mean, inside a log-probability
    errors = [n for n in run.sampled.calls.differences if n.site not in densities]
    return [n for n in errors if not set(n.target_history) & _LOGS]


def gain(run: RecordedRun) -> float | None:
    """The rise of the returns, in units of their early spread; `None` if those of the second half are not known."""
    known = returns(run)
    third = max(2, len(known) // 3)
    early, late = known[:third], [each for each in known[third:] if each[0] >= run.steps / 2]
    if len(known) < 6 or not late:
        return None
    # Single returns have no spread of their own.
    within = mean(s for _, _, s in early) or pstdev(m for _, m, _ in early)
    spread = within + abs(mean(m for _, m, _ in early)) * 0.1
    return (mean(m for _, m, _ in late) - mean(m for _, m, _ in early)) / spread if spread > 0 else None


def entropies(run: RecordedRun) -> list[tuple[int, float]]:
    """Step and entropy of the policy, as a share of the maximum."""
    own = [(p.step, p.entropy / math.log(p.actions)) for p in run.facts.policy_entropies if p.actions > 1]
    if own or not is_policy(run):
        return own
    notes = [n for n in run.sampled.calls.softmaxes if n.entropy is not None and n.trained_on and n.op == "log_softmax"]
    wide = [(n.step, n.entropy, n.shape[-1]) for n in notes if n.shape and n.shape[-1] > 1]
    return [(step, value / math.log(kinds)) for step, value, kinds in wide if value is not None]


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


def zero_advantage(run: RecordedRun) -> Claim | None:
    """The weights of all log-probabilities are 0: no action is better than another."""
    notes = advantages(run)
    if run.facts.policy_entropies and (claim := _no_gradient(run)) is not None:
        return claim
    if not notes or not is_policy(run):
        return None
    by_step: dict[int, float] = {}
    for note in notes:
        largest = max(abs(note.other.min or 0.0), abs(note.other.max or 0.0))
        by_step[note.step] = max(by_step.get(note.step, 0.0), largest)
    empty = [step for step, largest in by_step.items() if largest < 1e-6]
    if len(by_step) < 3 or len(empty) < 0.7 * len(by_step):
        return None
    first = next(note for note in notes if note.step == empty[0])
    return Claim(
        0.94,
        f"In {len(empty)} of {len(by_step)} observed steps, every advantage is 0 (largest "
        f"{max(by_step[s] for s in empty):.1g}) where it meets the log-probabilities{at_place(first.site)}: the "
        f"rewards do not distinguish the samples, and the policy gets no gradient.",
        step=empty[0],
        where=where_of(first.site),
        evidence={"steps_without": len(empty), "steps": len(by_step), "values": first.other.shape},
    )


def _no_gradient(run: RecordedRun) -> Claim | None:
    """The same where advantages are single numbers, which are not recorded: the gradient of the policy is exactly 0."""
    norms, certainty = run.grad_norms, entropies(run)
    zero = sum(norm == 0.0 for norm in norms)
    if len(norms) < 5 or zero < 0.7 * len(norms) or not certainty or median(v for _, v in certainty) < 0.05:
        return None  # the log-probability of an action that is certain has no gradient either
    site = next((root.site for root in run.sampled.backward_calls), "")
    return Claim(
        0.85,
        f"At {zero} of {len(norms)} steps the gradient that backward{at_place(site)} computes for the policy is "
        f"exactly 0: the log-probabilities are multiplied by 0, and the policy cannot change.",
        step=0,
        where=where_of(site),
        evidence={"steps_without": zero, "steps": len(norms)},
    )


def ratio_explosion(run: RecordedRun) -> Claim | None:
    """A few importance ratios that are orders of magnitude above the rest."""
    notes = [n for n in run.sampled.calls.ratios if n.count > 1]
    wild = [n for n in notes if not n.largest < 10]
    if len(wild) < 2 or all(n.largest < 20 for n in wild):
        return None
    worst = max(wild, key=lambda n: n.largest if math.isfinite(n.largest) else math.inf)
    return Claim(
        0.92,
        f"The importance ratio{at_place(worst.site)} reaches {worst.largest:.3g} at step {worst.step} "
        f"where its mean is {worst.mean:.3g}; it is above 10 in {len(wild)} of {len(notes)} batches, "
        f"first at step {wild[0].step}: a few samples dominate all others.",
        step=wild[0].step,
        where=where_of(worst.site),
        evidence={"largest": worst.largest, "mean": worst.mean, "batches_above_10": len(wild), "of": len(notes)},
    )


def divergences(run: RecordedRun) -> tuple[list[tuple[int, float]], str]:
    """Step and KL divergence from the old or reference policy, and the line that computed it."""
    ratios = [(n.step, n.kl, n.site) for n in run.sampled.calls.ratios]
    apart = [
        (n.step, n.input.mean - n.target.mean, n.site)
        for n in run.sampled.calls.differences
        if set(n.target_history) & _LOGS
        and (n.input.max or 0) < 1e-3
        and (n.target.max or 0) < 1e-3
        and n.input.mean is not None
        and n.target.mean is not None
        and n.input.mean < 0
    ]
    stated = [(n.step, n.kl, n.site) for n in run.facts.policy_divergences]
    divided = [(n.step, n.value, n.site) for n in run.sampled.calls.losses if n.op == "kl_div" and n.value]
    chosen = max(
        (stated, ratios, apart, divided), key=lambda found: (len(found) > 5, max((v for _, v, _ in found), default=0))
    )
    chosen = [item for item in chosen if math.isfinite(item[1])]
    return [(step, value) for step, value, _ in chosen], chosen[0][2] if chosen else ""


def kl_blowup(run: RecordedRun) -> Claim | None:
    """The policy moves further and further from its reference."""
    if not is_policy(run) and not run.facts.policy_divergences:
        return None
    found, site = divergences(run)
    own = any(note.site == site for note in run.sampled.calls.ratios)  # from the policy that drew the samples
    if len(found) < 6:
        return None
    third = len(found) // 3
    early = median(v for _, v in found[: max(2, len(found) // 20)])  # it may climb at once
    late = median(v for _, v in found[-third:])
    usual, top = median(v for _, v in found), max(v for _, v in found)
    climbs = late > 0.5 and late > 5 * max(early, 0.01)
    if not climbs and not (own and usual > 0.3 and late > 0.3):
        return None
    rise = gain(run)
    better = own and rise is not None and rise > 1
    since = next(step for step, value in found if value > 0.5 * late)
    return Claim(
        0.5 if better else 0.85,
        f"The KL divergence from the old or reference policy, taken{at_place(site)}, goes from {early:.2g} in the "
        f"first sampled steps to {late:.2g} in the last (highest {top:.2g}): a policy that keeps close to it stays "
        f"under about 0.05.",
        step=since,
        where=where_of(site),
        evidence={"early": early, "late": late, "highest": top, "gain_of_returns": rise},
        severity="info" if better else "error",
    )


def entropy_collapse(run: RecordedRun) -> Claim | None:
    """The policy became certain early in the run."""
    found = entropies(run)
    if len(found) < 8 or not is_policy(run):
        return None
    values = [value for _, value in found]
    start, end = max(values[: max(2, len(values) // 10)]), median(values[-max(3, len(values) // 5) :])
    if max(values) < 0.05:
        return _starts_certain(run, values)
    if start < 0.3 or end > 0.05:
        return None
    last_high = max((step for step, value in found if value > 0.1), default=0)
    share = last_high / max(1, run.steps)
    rise = gain(run)
    solved = rise is not None and rise > 1.0
    slow = share > 0.5
    known = returns(run)
    is_harmless = solved or slow or (bool(known) and known[-1][0] < last_high)  # what it led to was not seen
    return Claim(
        0.88 if not is_harmless else 0.5,
        f"The entropy of the policy falls from {start:.0%} of its largest value to {end:.1%} and stays under 10% "
        f"after step {last_high} of {run.steps}"
        + (
            f"; the returns rose by {rise:.1f} of their early spreads."
            if rise is not None
            else ": the policy no longer explores."
        ),
        step=last_high,
        evidence={"start": start, "end": end, "collapsed_at": last_high, "gain_of_returns": rise},
        severity="info" if is_harmless else "error",
    )


def rate_of_policy(run: RecordedRun) -> Claim | None:
    """A policy that fails while the first steps change its weights by a large part of their norm.

    Steps of an adaptive optimizer do not depend on the scale of rewards: steps that large are those of the rate.
    """
    ratios, held = run.sampled.update_ratios(), run.main
    if held is None or held.type not in ADAPTIVE or not ratios or max(ratios[:8]) < 0.3 or not run.lr:
        return None
    early, rate = max(ratios[:8]), max(run.lr)
    claims = [claim for rule in (entropy_collapse, reward_scale) if (claim := rule(run)) is not None]
    failures = [claim for claim in claims if claim.severity == "error" and (claim.step or 0) <= 0.1 * run.steps]
    if not failures:
        return None
    moved = f"{early:.0%} of" if early < 10 else f"{early:.2g} times"
    return Claim(
        0.85,
        f"At a learning rate of {rate:.3g} one step of {held.type} changes the weights by up to {moved} their norm in "
        f"the first sampled steps (1% is large). {failures[0].summary}",
        step=0,
        where=(held.site,),
        evidence={"update_to_weight": early, "lr": rate},
        fixes=(f"Divide the rate by 30 to 100: {rate / 100:.1g} to {rate / 30:.1g}.",),
    )


def _starts_certain(run: RecordedRun, values: list[float]) -> Claim | None:
    """A policy that never explored at all."""
    rise = gain(run)
    if rise is not None and rise > 1.5:
        return None
    return Claim(
        0.85,
        f"The policy is certain from the first step on: its entropy is {values[0]:.2g} of the largest it could be, and "
        f"never over {max(values):.2g}; it does not try other actions.",
        step=0,
        evidence={"start": values[0], "highest": max(values), "end": values[-1], "gain_of_returns": rise},
        fixes=("Start with small logits: scale the last layer of the policy down.",),
    )


def reward_scale(run: RecordedRun) -> Claim | None:
    """Returns far from unit scale, a value loss that dominates the policy's, and a policy that does not improve."""
    if not is_policy(run):
        return None
    known = [n for n in _fitted_values(run) if n.target.std is not None]
    sizes = [math.hypot(n.target.mean or 0.0, n.target.std or 0.0) for n in known]
    raw = [math.hypot(n.other.mean or 0.0, n.other.std or 0.0) for n in advantages(run)]
    scale, weights = (median(sizes) if sizes else 0.0), (median(raw) if raw else 0.0)
    if max(scale, weights) < 30:
        return None
    share = _value_share(run)
    losses = [abs(value) for root in run.sampled.backward_calls if (value := root.value) is not None]
    dominated = share > 0.95 if share is not None else median(losses or [0.0]) > 30
    if weights < 30 and not dominated:
        return None
    rise = gain(run)
    moved = entropies(run)
    learning = rise is not None and rise > 0.3
    site = known[0].site if known else advantages(run)[0].site
    told = f"; {share:.1%} of the gradient comes from the value loss" if share is not None else ""
    size = (
        f"The returns have a typical size of {scale:.3g}"
        if scale >= 30
        else f"The weights of the log-probabilities have a typical size of {weights:.3g}"
    )
    return Claim(
        0.85 if not learning else 0.5,
        f"{size}{at_place(site)}{told}; over the run the returns rose by {rise or 0.0:.2f} of their spread.",
        step=known[0].step if known else 0,
        where=where_of(site),
        evidence={"returns": scale, "advantages": weights, "value_share": share, "gain_of_returns": rise}
        | {"entropy": [moved[0][1], moved[-1][1]] if moved else None},
        severity="info" if learning else "error",
    )


def bootstrapped_scale(run: RecordedRun) -> Claim | None:
    """Targets that a value network computes itself, far from unit scale, which the values do not reach."""
    if is_policy(run) or run.adversarial or run.nonfinite.seen or run.steps < 100:
        return None
    losses = [call for call in run.sampled.training_losses(*DISTANCE_LOSSES) if call.target_from_model]
    by_hand = [call for call in _value_errors(run) if _VALUES & set(call.target_history)]
    known = [call for call in (losses or by_hand) if call.target.std is not None and call.input.std is not None]
    late = known[-4:]
    models = {look.step: len(look.model_calls) for look in run.sampled.steps}
    if any(models[call.step] < 2 for call in known):
        return None  # one pass makes the predictions: the targets are no values of a second one
    if len(known) < 6 or any(max(call.target.shape or [0]) != math.prod(call.target.shape) for call in late):
        return None  # several targets per row: features of a teacher, not values
    sizes = [math.hypot(call.target.mean or 0.0, call.target.std or 0.0) for call in late]
    # The mean square error is at least the sum of the squared differences of means and of spreads.
    errors = [math.hypot(*(_gap(call, name) for name in ("mean", "std"))) for call in late]
    size, error = median(sizes), median(errors)
    if size < 30 or error < 0.5 * size:
        return None
    site = known[0].site
    return Claim(
        0.8,
        f"The value targets{at_place(site)} have a typical size of {size:.3g}, and the values are still off by at "
        f"least {error:.3g} at step {late[-1].step}: rewards of this scale need updates that are too large for the "
        f"learning rate, or never reach them.",
        step=known[0].step,
        where=where_of(site),
        evidence={"targets": size, "error": error, "calls": len(known)},
        severity="warning",
    )


_VALUES = {"linear", "conv2d", "matmul", "lstm", "gru", "addmm"}


def _gap(call: LossCall | DifferenceCall, name: str) -> float:
    return float(getattr(call.target, name) or 0.0) - float(getattr(call.input, name) or 0.0)


def surrogate_flipped(run: RecordedRun) -> Claim | None:
    """PPO takes the smaller of two gains, or the larger of two losses; here it minimises the smaller of two.

    The smaller one is the cautious estimate only of what is maximised.
    """
    wrong, right = [], 0
    for look in run.sampled.steps:
        products = {n.index: n for n in look.calls.products if n.bounded_by}
        for root in look.backward_calls:
            for each in root.product_gradients or []:
                product = products.get(each.index)
                if product is None or not each.total:
                    continue
                if (each.total > 0) == (product.bounded_by == "minimum"):
                    wrong.append((root, product))
                else:
                    right += 1
    if len({root.step for root, _ in wrong}) < 3 or right > 0.1 * len(wrong):
        return None
    root, product = wrong[0]
    other = "maximises" if product.bounded_by == "maximum" else "minimises"
    return Claim(
        0.93,
        f"The loss {other} the {product.bounded_by} of two products of importance ratios and advantages (at "
        f"{product.site}): the clipped objective of PPO is a lower bound of the gain, so the minimum must be "
        "maximised. Actions with a high advantage become less likely.",
        step=root.step,
        where=(product.site, root.site),
        evidence={"bounded_by": product.bounded_by, "calls": len(wrong)},
        fixes=("Negate it: `loss = -torch.min(ratio * advantage, clipped * advantage).mean()`.",),
    )


def raises_unlikely(run: RecordedRun) -> bool:
    """Whether the loss makes actions with a low weight more likely: right for costs, and wrong for rewards."""
    signs = []
    for look in run.sampled.steps:
        products = {n.index: n for n in (*look.calls.products, *look.calls.single_products)}
        for root in look.backward_calls:
            for each in root.product_gradients or []:
                product = products.get(each.index)
                if product is None or product.other_binary or product.negated is None or not each.total:
                    continue
                signs.append((each.total > 0) != product.negated)
    plain = _plain_weights(run)
    signs += [weight > 0 for weight in plain]
    is_weighted = is_policy(run) or _weighs_logarithms(run) or bool(plain)
    return is_weighted and len(signs) >= 5 and mean(signs) > 0.9


def _plain_weights(run: RecordedRun) -> list[float]:
    """The numbers that single log-probabilities are multiplied by right before backward, if they vary as returns do."""
    roots = [root for root in run.sampled.backward_calls if "Log" in root.operations[:4]]
    weights = [root.factor for root in roots if root.factor is not None and "Softmax" in root.operations]
    return weights if len({abs(weight) for weight in weights}) >= 5 else []


def _weighs_logarithms(run: RecordedRun) -> bool:
    """Whether logarithms are weighted by numbers of both signs, as those of probabilities are by advantages."""
    found = [n for n in run.sampled.calls.products if "log" in n.history and not n.other_binary]
    both = [n for n in found if (n.other.min or 0.0) < 0 < (n.other.max or 0.0)]
    return len(both) > 0.5 * len(found) and not run.sampled.training_losses("cross_entropy", "nll_loss")


def _value_share(run: RecordedRun) -> float | None:
    """The share of the gradient that comes from terms that fit values."""
    shares = []
    for root in run.sampled.backward_calls:
        terms = root.terms or []
        total = sum(term.norm for term in terms)
        value = sum(term.norm for term in terms if term.loss in DISTANCE_LOSSES)
        if len(terms) > 1 and total > 0:
            shares.append((value or max(term.norm for term in terms)) / total)
    return median(shares) if shares else None


def _seen_or_logged(seen: Callable[[RecordedRun], Claim | None], logged: Callable[[RecordedRun], Claim | None]) -> Any:
    """A rule that reads the operations of the loss, or else what the trainer has logged."""

    @functools.wraps(seen)
    def find(run: RecordedRun) -> Claim | None:
        return seen(run) or (logged(run) if run.facts.policy_signals else None)

    return find


RULES: tuple[Rule, ...] = (
    Rule("loss.sign-flipped", "wiring", surrogate_flipped, explains=("rl.*", "lr.*", "optim.not-learning")),
    Rule("lr.too-high", "dynamics", rate_of_policy, explains=("rl.*", "model.*")),
    Rule(
        "rl.zero-advantage",
        "value",
        _seen_or_logged(zero_advantage, logged_zero_advantage),
        explains=("optim.no-update", "lr.too-low", "rl.reward-scale"),
        from_steps=True,
    ),
    Rule(
        "rl.ratio-explosion",
        "value",
        _seen_or_logged(ratio_explosion, logged_ratio_explosion),
        explains=("rl.kl-blowup", "lr.too-high", "data.bad-batch"),
        from_steps=True,
    ),
    Rule(
        "rl.reward-scale",
        "value",
        bootstrapped_scale,
        explains=("loss.term-dominates", "clip.saturated", "lr.*", "data.labels-uninformative"),
    ),
    Rule("rl.reward-scale", "value", reward_scale, explains=("loss.term-dominates", "clip.saturated", "lr.*")),
    Rule(
        "rl.kl-blowup",
        "dynamics",
        _seen_or_logged(kl_blowup, logged_kl_blowup),
        explains=("lr.too-high", "rl.entropy-collapse"),
        from_steps=True,
    ),
    Rule(
        "rl.entropy-collapse",
        "dynamics",
        _seen_or_logged(entropy_collapse, logged_entropy_collapse),
        explains=("lr.too-high", "model.vanishing-gradient"),
        from_steps=True,
    ),
)
