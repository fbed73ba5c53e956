"""Whether, when and where a run met something that is not finite."""

from __future__ import annotations

import math

from recorded import falling, run
from surefoot.diagnose.nonfinite import details


def test_a_finite_run_has_none() -> None:
    held = run().nonfinite
    assert not held.seen
    assert held.loss is None
    assert held.first_step is None


def test_the_event_comes_before_a_loss_that_was_discarded() -> None:
    event = {"event": "nonfinite-loss", "step": 7, "value": "nan", "kind": "data"}
    discarded = {"name": "loss", "value": "inf", "kind": "parameter"}
    assert run(events=[event], bad_loss=discarded).nonfinite.loss.kind == "data"  # type: ignore[union-attr]
    held = run(bad_loss=discarded).nonfinite
    assert held.loss is not None
    assert (held.loss.name, held.loss.value, held.loss.step) == ("loss", math.inf, None)
    assert held.seen
    assert held.first_step is None


def test_the_first_step_is_that_of_the_loss_or_of_the_gradient() -> None:
    gradient = {"event": "nonfinite-gradient", "step": 3, "parameters": ["w"], "finite": [], "loss_finite": True}
    assert run([*falling(5), math.nan]).nonfinite.first_step == 5
    assert run([*falling(5), math.nan], events=[gradient]).nonfinite.first_step == 3


def test_a_call_that_refused_a_nan_counts() -> None:
    given = {"shape": [2], "dtype": "float32", "grad": True, "nonfinite": 1}
    crash = {"type": "RuntimeError", "message": "no", "arguments": {"input": given}}
    assert run(crash=crash).nonfinite.seen
    assert not run(crash={"type": "RuntimeError", "message": "no"}).nonfinite.seen


def test_details_are_what_the_facts_say_without_the_kind_of_event() -> None:
    event = {"event": "nonfinite-loss", "step": 7, "value": "nan", "kind": "data", "nan": 2}
    loss = run(events=[event]).nonfinite.loss
    assert loss is not None
    assert details(loss) == {"step": 7, "value": "nan", "kind": "data", "nan": 2}
