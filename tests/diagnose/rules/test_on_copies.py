"""The rules judge what the doctor measured on copies, and ask for more before training than of a run that fails."""

from dataclasses import replace

import pytest

from surefoot.diagnose.engine import claims_of
from surefoot.doctor.probe_facts import REHEARSED
from surefoot.record.facts import (
    AlikeRows,
    BatchScale,
    CrashFacts,
    LabelControl,
    MomentScale,
    OutputRange,
    PreflightFacts,
    RateProbe,
    RetainedGraphs,
    RunFacts,
    SplitComparison,
)


def rate(factor, end, ratio=1e-3, peak=2.0, gradually=False):
    return RateProbe(factor=factor, gradually=gradually, start=2.0, end=end, peak=peak, steps=60, update_ratio=ratio)


CONTROL = LabelControl(rows=400, steps=99, true_fall=0.7, shuffled_fall=0.7, true_held_out=1.4, shuffled_held_out=1.4)
SPLITS = SplitComparison(trained=500, different=500, evaluated=64, shared=32, shift=0.1, stretch=1.0)
RANGE = OutputRange(loss="mse_loss", low=0.0, high=1.0, target_low=-3.0, target_high=3.0, below=0.5, above=0.4)
LEARNS = [rate(0.1, 1.0), rate(1.0, 0.5), rate(10.0, 0.4)]


@pytest.mark.parametrize(
    ("cause", "severity", "measured"),
    [
        ("lr.too-high", "error", {"rates": [rate(0.1, 1.0), rate(1.0, 2.5), rate(10.0, 9.0)]}),
        ("lr.too-high", "warning", {"rates": [rate(0.1, 1.0), rate(1.0, 1.0, 2.0, 90.0), rate(10.0, 9.0)]}),
        (
            "lr.too-high",
            "error",
            {"rates": [rate(0.1, 9.0), rate(1.0, float("nan")), rate(10.0, 9.0), rate(0.01, 1.0)]},
        ),
        (
            "lr.no-warmup",
            "error",
            {"rates": [rate(0.1, 1.6), rate(1.0, 2.5), rate(10.0, 9.0), rate(1.0, 0.5, gradually=True)]},
        ),
        ("lr.too-low", "warning", {"rates": [rate(0.1, 2.0), rate(1.0, 1.999, 1e-7), rate(10.0, 1.99)]}),
        ("init.symmetric", "error", {"alike_rows": [AlikeRows(parameter="w", updates=3, apart=1e-9, moved=1e-3)]}),
        ("optim.stale-state", "error", {"moments": [MomentScale(moment="exp_avg", shape=[3], parameter_shape=[4])]}),
        (
            "optim.stale-state",
            "warning",
            {"moments": [MomentScale(moment="exp_avg_sq", shape=[4], parameter_shape=[4], gradient_ratio=1e5)]},
        ),
        ("data.labels-uninformative", "warning", {"label_control": CONTROL}),
        ("data.leakage", "error", {"splits": SPLITS}),
        ("data.split-mismatch", "warning", {"splits": replace(SPLITS, shared=0, shift=3.0)}),
        ("data.bad-batch", "warning", {"largest_batches": [BatchScale(path="batch[0]", batch=7, ratio=400.0)]}),
        ("loss.bounded-output", "error", {"output_range": RANGE}),
    ],
)
def test_a_measurement_is_claimed(cause, severity, measured):
    found = claims_of(RunFacts(preflight=PreflightFacts(**measured)), REHEARSED)
    assert {code: finding.severity for code, finding in found.items()} == {cause: severity}


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {"rates": LEARNS},
        {"rates": [rate(0.1, 1.99), rate(1.0, 1.99), rate(10.0, 1.99)]},  # nothing learns: the rate is not to blame
        {"rates": [rate(0.1, 2.0), rate(1.0, 1.999, 1e-4), rate(10.0, 1.0)]},  # slow, and of a usual size
        {"alike_rows": [AlikeRows(parameter="w", updates=3, apart=1e-3, moved=1e-3)]},
        {"moments": [MomentScale(moment="exp_avg_sq", shape=[4], parameter_shape=[4], gradient_ratio=30.0)]},
        {"label_control": replace(CONTROL, true_held_out=1.2)},
        {"label_control": replace(CONTROL, true_fall=0.1)},  # not learned by heart: nothing follows
        {"splits": replace(SPLITS, different=100)},  # equal rows prove nothing where most are
        {"splits": replace(SPLITS, shared=0)},
        {"largest_batches": [BatchScale(path="batch[0]", batch=7, ratio=20.0)]},
        {"output_range": replace(RANGE, low=-9.0, high=9.0, below=0.0, above=0.0)},
    ],
)
def test_what_is_in_order_is_not(measured):
    assert claims_of(RunFacts(preflight=PreflightFacts(**measured)), REHEARSED) == {}


def test_graphs_that_only_a_copy_can_hold_are_few():
    counts = [RetainedGraphs(step, step - 8, step) for step in (12, 13, 14)]
    held = RunFacts(retained_graphs=counts)
    assert "memory.graph-retained" not in claims_of(held, REHEARSED)
    assert "memory.graph-retained" in claims_of(replace(held, preflight=PreflightFacts()), REHEARSED)


def test_a_graph_of_an_earlier_step_is_named_and_a_second_backward_of_the_same_step_is_not():
    crash = CrashFacts(type="RuntimeError", message="Trying to backward through the graph a second time", site="a.py:3")
    assert "memory.graph-retained" in claims_of(RunFacts(steps=1, crash=crash), REHEARSED)
    assert claims_of(RunFacts(steps=0, crash=crash), REHEARSED) == {}
