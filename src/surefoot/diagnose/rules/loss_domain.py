"""Operations on values outside their domain, which make a loss or a gradient non-finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place, count_of
from surefoot.diagnose.nonfinite import details
from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import (
        NonFiniteGradientEvent,
        NonFiniteLoss,
    )


def undefined_op(run: RecordedRun) -> Claim | None:
    """The first non-finite value was made by an operation outside its domain, forward or backward."""
    bad = run.nonfinite.loss
    step = run.nonfinite.loss_step
    if bad is not None and bad.without_graph:
        return _before_the_graph(bad, step)
    if bad is not None and bad.kind == "operation" and bad.dtype not in ("float16",):
        op = str(bad.op)
        special = bad.masked_rows or bad.all_ignored or bad.all_weightless or bad.empty_count
        if not special and (bad.undefined_at or op.lower() in _DOMAIN) and not _blown_up(run, bad):
            at = bad.undefined_at or "values it is not defined for"
            ranges = "; ".join(f"{k} from {v[0]:.3g} to {v[1]:.3g}" for k, v in (bad.inputs or {}).items())
            ranges = ranges.removeprefix("self ")  # the name of the first argument in the graph says nothing
            place, count = bad.site or "the loss", (bad.nan or 0) if bad.bad is None else bad.bad
            return Claim(
                0.93,
                f"{bad.call or op.lower()} at {place} made the first non-finite value, at step {step}: its "
                f"input contains {at} ({count_of(count, 'value')}{'; ' + ranges if ranges else ''}).",
                step=step,
                where=(bad.site, bad.module or "") if bad.site else tuple(bad.sites or ()),
                evidence=details(bad),
                fixes=(_domain_fix(str(bad.call or op.lower()), str(at)),),
            )
    events = run.nonfinite.gradients
    if events and events[0].loss_finite:
        event = events[0]
        exact = event.node
        if exact and _blown_up(run, None):
            return None  # an overflow: the first occurrence does not indicate the cause
        if exact:
            return Claim(
                0.95,
                f"The backward pass of {exact.call or exact.op.lower()} at {exact.site or 'the loss'} turned finite "
                f"gradients into non-finite ones in {count_of(len(event.parameters), 'parameter')}; the loss at step "
                f"{event.step} was finite.",
                step=event.step,
                where=(exact.site or "", *event.parameters[:3]),
                evidence=event.to_json(),
                fixes=(_domain_fix(exact.call or exact.op.lower(), ""),),
            )
        return _likely_backward(run, event)
    return None


def _before_the_graph(bad: NonFiniteLoss, step: int | None) -> Claim:
    """The data was finite, and an operation before the model made it non-finite."""
    made, taken = bad.made_by, f"`{bad.call or str(bad.op).lower()}`"
    nan, inf, rows = bad.nan or 0, bad.inf or 0, bad.rows or []
    count = f"{nan} NaN" if not inf else f"{inf} Inf" if not nan else f"{nan} NaN and {inf} Inf"
    count += f" in row {rows[0]}" if len(rows) == 1 else ""
    place = at_place(bad.site)
    named = f"{made.call}{at_place(made.site)}" if made is not None else ""
    others = [words for words in bad.passed or [] if words != named]
    if bad.exact and made is not None:
        low = f" (lowest {made.lowest:.3g})" if made.lowest is not None else ""
        words = (
            f"{named} made the first non-finite value, at step {step}: {count} from finite "
            f"values{low}. It runs outside of autograd, before {taken}{place} takes its result."
        )
    else:
        names = named or "which one was not observed"
        more = f"; or {', or '.join(others[:3])}" if others else ""
        words = (
            f"The input of {taken}{place} at step {step} contains {count}, and the data it was made from is finite: an "
            f"operation outside of autograd produced {'it' if nan + inf == 1 else 'them'} ({names}{more})."
        )
    call = (made.call if made is not None else "the operation").rstrip("_")
    return Claim(
        0.95 if bad.exact else 0.85 if made is not None else 0.7,
        words,
        step=step,
        where=(made.site if made is not None else "", bad.site or ""),
        evidence=details(bad),
        fixes=(_domain_fix(call, "") if made is not None else _search_fix(taken, place),),
    )


def _search_fix(taken: str, place: str) -> str:
    return (
        f"Check with `torch.isfinite` what the script does to the batch before {taken}{place}: assignments to entries, "
        "normalisation, augmentation."
    )


def _domain_fix(call: str, at: str) -> str:
    if at.startswith("a factor"):
        return f"Find out why the input of {call} is not finite."
    if call in ("exp", "expm1"):
        return f"Limit the input of {call}, or compute with logarithms: `log_input=True`, `log_softmax`, `logsumexp`."
    for calls, fix in _FIXES:
        if call in calls:
            return fix.format(call=call)
    return f"Keep the input of {call} inside its domain: add an eps or clamp."


_FIXES = (
    (
        ("log", "log2", "log10"),
        "Use `log_softmax` or `logsigmoid` for the logarithm of a softmax or a sigmoid: a clamp there stops the "
        "gradient. Clamp any other input of {call} away from 0, for example with `.clamp_min(1e-8)`.",
    ),
    (
        ("sqrt", "rsqrt"),
        "Add an eps under the root, for example `(x + 1e-8).{call}()`: its derivative at 0 is infinite.",
    ),
    (("div", "reciprocal"), "Keep the divisor away from 0: clamp it, or add an eps of its sign."),
    (
        ("norm", "linalgvectornorm", "vector_norm", "cdist", "dist", "std", "pairwise_distance"),
        "Replace {call} with the root of the sum of squares plus an eps: its derivative at 0 is undefined.",
    ),
    (("acos", "asin", "atanh"), "Clamp the input of {call} to -1 + 1e-6 and 1 - 1e-6."),
    (("acosh",), "Clamp the input of acosh to at least 1 + 1e-6."),
)
_DOMAIN = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "div", "pow", "acos", "asin", "linalgvectornorm", "norm",
           "reciprocal", "std", "var", "exp", "expm1", "prod", "cumprod", "logsumexp", "atanh", "acosh", "tan",
           "linalginvex", "linalgcholeskyex", "digamma", "lgamma", "binarycrossentropy"}  # fmt: skip
_EDGES = {"sqrt", "norm", "pow", "div", "log", "acos", "asin", "where", "std", "cdist", "normalize", "rsqrt", "var",
          "cosine_similarity", "pairwise_distance", "atan2", "logit", "reciprocal", "dist", "log2",
          "log10"}  # fmt: skip


def _likely_backward(run: RecordedRun, event: NonFiniteGradientEvent) -> Claim | None:
    """That step was not sampled: name the operations whose derivative is undefined somewhere, the closest first."""
    risky = [n for n in run.sampled.calls.risky if n.op in _EDGES and n.nearest_zero is not None]
    if not risky:
        return None
    distances: dict[tuple[str, str], float] = {}
    for note in risky:
        near = 1 - (note.highest or 0) if note.op in ("acos", "asin") else note.nearest_zero or 0.0
        call = (note.op, note.site)
        distances[call] = min(distances.get(call, math.inf), abs(near))
    (op, site), nearest = min(distances.items(), key=lambda item: item[1])
    by_site = {place: min(d for (_, at), d in distances.items() if at == place) for _, place in distances}
    if run.curve.rose and run.curve.peak > 1e6:
        return None
    return Claim(
        0.8,
        f"The loss at step {event.step} was finite but its gradient was not. In the sampled steps, the input of {op}"
        f"{at_place(site)} came closest to a point without a finite derivative (distance {nearest:.2g}).",
        step=event.step,
        where=(site, *event.parameters[:3]),
        evidence={"edges": dict(sorted(by_site.items(), key=lambda item: item[1])[:5]), **event.to_json()},
        fixes=(_domain_fix(op, ""),),
    )


def _blown_up(run: RecordedRun, bad: NonFiniteLoss | None) -> bool:
    """Whether values had grown extremely, or a step had replaced the weights: the operation is only where it ended."""
    at = run.nonfinite.first_step or 0
    if at > 0 and max(run.update_ratios(before=at), default=0.0) > _REPLACED:
        return True
    inputs = bad.inputs if bad is not None else None
    ranges = [abs(v) for pair in (inputs or {}).values() for v in pair]
    huge = bool(ranges) and max(ranges) > 1e10
    late = [abs(v) for v in run.curve.finite[-6:]]
    return huge or (bool(late) and max(late) > 1e3 * max(1.0, abs(run.curve.start)))


_REPLACED = 3.0
"""An update of so many times the norm of the weights leaves nothing of them."""

RULES: tuple[Rule, ...] = (
    Rule("loss.undefined-op", "value", undefined_op, explains=("lr.*", "model.*", "init.*")),
)  # fmt: skip
