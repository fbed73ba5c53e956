"""Explains in one sentence why a step was refused, with the numbers that show it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

from surefoot.detect.step_rules import Limit
from surefoot.guard.step_decision import BROKEN_SEARCH, BROKEN_SETTING
from surefoot.types import format_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from surefoot.detect.checker import StabilityChecker
    from surefoot.types import Signals, StepRecord

    Evidence: TypeAlias = dict[str, object]


class RefusalExplainer:
    """Explains refused steps of one run."""

    def __init__(
        self, checker: StabilityChecker, first_of: Callable[[Any], str], weights_broken: Callable[[], bool]
    ) -> None:
        """Explain the refusals of this checker's rules.

        Args:
            checker: has the limits that a step can exceed.
            first_of: returns the parameter, among several, whose gradient was computed first.
            weights_broken: whether a parameter is not finite on this rank.
        """
        self._limits = {rule.name: rule for rule in checker.step_rules if isinstance(rule, Limit)}
        self._first_of, self._weights_broken = first_of, weights_broken

    def explain(
        self, record: StepRecord, recent_norms: Sequence[float], *, is_stuck: bool, is_first: bool
    ) -> tuple[str, Evidence]:
        """One sentence and the numbers: what is non-finite or too large, and where it occurred first.

        Args:
            record: the step.
            recent_norms: the gradient norms of the last applied steps before it.
            is_stuck: whether its gradients overflow at the lowest loss scale.
            is_first: whether no earlier step was refused for non-finite numbers.
        """
        signals = record.signals
        counts = signals.layers.nonfinite_counts() if signals.layers else {}
        evidence: Evidence = {"loss": signals.loss, "grad_norm": signals.grad_norm, "reasons": record.reasons}
        loss = "" if signals.loss is None else f"the loss is {format_number(signals.loss)}"
        and_loss = f"; {loss}" if loss else ""
        if record.reasons == (BROKEN_SETTING,):
            return _explain_settings(record, evidence), evidence
        if is_stuck:
            evidence["loss_scale"] = signals.loss_scale
            return f"gradients overflow at loss scale {signals.loss_scale:g}, the minimum", evidence
        if counts:
            first = self._first_of(counts)
            evidence |= {"first": first, "nonfinite": counts}
            more = f" and {len(counts) - 1} more" if len(counts) > 1 else ""
            values = "value" if counts[first] == 1 else "values"
            where = f"{counts[first]:,} non-finite {values} in the gradient of {first}{more}"
            if is_first and self._weights_broken():
                evidence["weights_broken"] = True
                return f"the weights are not finite, so all further steps are not finite either: {where}", evidence
            return f"{where}{and_loss}", evidence
        if BROKEN_SEARCH in record.reasons:
            return f"the optimizer's own evaluations of the loss led to non-finite parameters{and_loss}", evidence
        if "nonfinite" in record.reasons:
            if signals.nonfinite:
                return f"a gradient was not finite before it was clipped by value{and_loss}", evidence
            if signals.loss is None or math.isfinite(signals.loss):
                here = f"; here {loss}" if loss else ""
                return f"another rank's loss or gradient is not finite{here}", evidence
            return f"{loss}, though every gradient is finite", evidence
        typical = sorted(recent_norms)[len(recent_norms) // 2] if recent_norms else None
        evidence["typical_grad_norm"] = typical
        beyond = [self._limits[reason] for reason in record.reasons if reason in self._limits]
        if beyond:
            evidence |= {f"limit_{limit.signal}": limit.highest for limit in beyond}
            return "; ".join(_explain_limit(limit, signals) for limit in beyond), evidence
        compared = "" if typical is None else f", {_times(signals.grad_norm / typical)} its recent median"  # type: ignore[arg-type,operator]
        return f"gradient norm {format_number(signals.grad_norm)}{compared}{and_loss}", evidence


def _explain_limit(limit: Limit, signals: Signals) -> str:
    if limit.signal == "loss":
        return f"the loss is {format_number(signals.loss)}, above the limit of {limit.highest:g}"
    unit = " times the norm of the parameters" if limit.signal == "grad_ratio" else ""
    return f"gradient norm {format_number(signals.grad_norm)}, above the limit of {limit.highest:g}{unit}"


def _explain_settings(record: StepRecord, evidence: Evidence) -> str:
    if not record.settings:
        return "a setting of another rank's optimizer is not finite"
    evidence["settings"] = {f"param_groups[{each.group}].{each.key}": each.value for each in record.settings}
    shown, more = record.settings[:3], len(record.settings) - 3
    words = ", ".join(map(str, shown)) + (f", and {more} more" if more > 0 else "")
    return f"{words}: a step with it would damage the weights. Check the schedule, or the code that sets it"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio < 1e6 else f"{ratio:.0e} times"
