"""A run whose loss ends up non-finite is never called healthy, whatever was seen of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from surefoot.diagnose.engine import diagnose
from surefoot.diagnose.terminal import as_full_text
from surefoot.record.facts import GuardFacts, NonFiniteLossEvent

if TYPE_CHECKING:
    from watched import Nursery

TRAIN = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 10); y = x[:, :1]
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(100):
    rows = torch.randint(256, (32,))
    out = model(x[rows])
    loss = F.mse_loss(out, y[rows])
    BEFORE
    optimizer.zero_grad(); loss.backward()
    BETWEEN
    optimizer.step()
    AFTER
"""
NAN = 'float("nan")'


def script(before="pass", between="pass", after="pass"):
    return TRAIN.replace("BEFORE", before).replace("BETWEEN", between).replace("AFTER", after)


AT = 77
"""A step without a look."""
ROOT = f"loss = loss + ((out * 0).sqrt().sum() if step == {AT} else 0)"
CASES = {
    "a derivative": ({"before": ROOT}, "loss.undefined-op", AT, "finite derivative"),
    "a gradient": (
        {"between": f"if step == {AT}: model[0].weight.grad[0, 0] = {NAN}"},
        "loss.undefined-op",
        AT,
        "(those of 0.bias",
    ),
    "a weight": (
        {"after": f"if step == {AT}: model[2].weight.data[0, 3] = {NAN}"},
        "loss.undefined-op",
        AT + 1,
        "wrote to them",
    ),
    "a factor": (
        {"before": f"loss = loss * float('inf') * 0 if step == {AT} else loss"},
        "loss.undefined-op",
        AT,
        "a factor of inf",
    ),
}


HALF = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 10).half(); y = x[:, :1]
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(60):
    rows = torch.randint(256, (32,))
    optimizer.zero_grad(); F.mse_loss(model(x[rows]), y[rows]).backward(); optimizer.step()
"""


def test_an_update_that_breaks_fp16_weights_is_no_fault_of_the_machine(watch: Nursery) -> None:
    run = watch(HALF)
    assert (run.first.cause, run.first.step) == ("precision.fp16-overflow", 1)
    assert "eps of 1e-08 is 0 in fp16" in run.first.summary
    assert "hw.silent-corruption" not in run.causes
    facts, description = run.loaded
    left_out = GuardFacts(checked=60, skipped=59, first=1, last=59, parameters=[], not_guarded={})
    guarded = diagnose(replace(facts, guard=left_out), description, strict=True)
    assert guarded.findings[0].cause == "precision.fp16-overflow"  # and not the steps that follow from it


def test_a_gradient_of_which_only_the_norm_is_known_is_still_what_broke_the_weights(watch: Nursery) -> None:
    """On a device the gradients of a step are not looked at: their norm is read some steps later."""
    facts, description = watch(script(before=ROOT)).loaded
    (loss,) = [event for event in facts.events if isinstance(event, NonFiniteLossEvent)]
    assert loss.kind == "parameter"
    found = diagnose(replace(facts, events=[loss]), description, strict=True).findings[0]
    assert (found.cause, found.step) == ("loss.undefined-op", AT)
    assert "no finite derivative" in found.summary


@pytest.mark.parametrize("case", CASES)
def test_what_broke_is_told_with_its_step(watch: Nursery, case) -> None:
    parts, cause, step, words = CASES[case]
    run = watch(script(**parts))
    assert run.diagnosis.verdict == "broken"
    assert (run.first.cause, run.first.step) == (cause, step)
    assert words in run.first.summary


def test_a_run_that_leaves_bad_steps_out_and_goes_on_is_healthy(watch: Nursery) -> None:
    guarded = script(
        before=ROOT,
        between="if not all(p.grad.isfinite().all() for p in model.parameters()): continue",
    )
    assert watch(guarded).diagnosis.verdict == "healthy"


def test_steps_that_the_guard_left_out_are_no_updates_that_failed(watch: Nursery) -> None:
    run = watch.guarded(script(before="if step > 0: loss = loss + (out * 0).sqrt().sum()", between="pass"))
    assert run.facts["guarded"]["skipped"] == 99
    assert "optim.no-update" not in [finding.cause for finding in run.diagnosis.findings]
    run = watch.guarded(script(before="loss = loss + (out * 0).sqrt().sum()"))
    assert run.facts["guarded"]["skipped"] == 100
    assert "optim.no-update" not in [finding.cause for finding in run.diagnosis.findings]
    assert run.first.cause == "loss.undefined-op"


def test_updates_that_fail_are_named_although_the_guard_left_a_step_out(watch: Nursery) -> None:
    still = "optimizer.param_groups[0]['lr'] = 0.0"
    run = watch.guarded(script(before=f"loss = loss + (out * 0).sqrt().sum() if step == 3 else loss; {still}"))
    assert run.facts["guarded"]["skipped"] == 1
    assert "lr.too-low" in [finding.cause for finding in run.diagnosis.findings]


def test_a_diagnosis_says_that_steps_were_left_out_whatever_else_was_found(watch: Nursery) -> None:
    run = watch.guarded(script(before=f"optimizer.param_groups[0]['lr'] = 0.0; {ROOT}"))
    told = f"`--guard` skipped 1 of 100 steps, at step {AT}."
    assert run.first.cause == "lr.too-low"
    assert run.diagnosis.as_json()["summary"].endswith(f" {told}")
    assert told in as_full_text(run.diagnosis, "run")
    alone = watch.guarded(script(before=ROOT)).diagnosis
    assert alone.verdict != "healthy"
    assert as_full_text(alone, "run").count("skipped 1 of 100 steps") == 1
    assert alone.summary.count("skipped 1 of 100 steps") == 1


@pytest.mark.parametrize("before", [ROOT, f"loss = loss * {NAN} if step == {AT} else loss"])
def test_an_incident_says_whether_its_step_was_left_out(watch: Nursery, before: str) -> None:
    for run, action, words in (
        (watch.guarded(script(before=before)), "skip", "What was done: the step was left out by `--guard`."),
        (watch(script(before=before)), "none", "What was done: nothing."),
    ):
        (folder,) = (run.folder / "run" / "incidents").iterdir()
        assert words in (folder / "summary.md").read_text()
        assert json.loads((folder / "incident.json").read_text())["action"] == action


BAD_ROW = "bad = x[rows].abs() + 0.1; bad[0] = 0 if WHEN else bad[0]; loss = F.mse_loss(model(torch.log(bad)), y[rows])"
"""The logarithm of a row of zeros in some steps."""


def test_a_run_is_not_broken_by_a_single_step_that_the_guard_skipped(watch: Nursery) -> None:
    one = BAD_ROW.replace("WHEN", f"step == {AT}")
    run = watch.guarded(script(before=one))
    assert run.facts["guarded"]["skipped"] == 1
    assert (run.diagnosis.verdict, run.first.cause, run.first.step) == ("unstable", "loss.undefined-op", AT)
    assert watch(script(before=one)).diagnosis.verdict == "broken"  # applied, it breaks the weights
    most = watch.guarded(script(before=BAD_ROW.replace("WHEN", "step >= 20")))
    assert most.facts["guarded"]["skipped"] == 80
    assert most.diagnosis.verdict == "broken"
