"""Which mutants count as faulty, and what is counted of them."""

from dataclasses import replace

import pytest

from surefoot.zoo.mutation import Operator
from surefoot.zoo.mutation.figures import figures, judge, wilson
from surefoot.zoo.mutation.runs import MutantRun, NamedFinding, RunLosses


def operator(name, proof="if harmful", **settings):
    return Operator(name, "", "", ("lr.too-high",), lambda script, strength: [], proof, **settings)


BITING, CERTAIN, HARMLESS = operator("harmful"), operator("certain", "by construction"), operator("calm", "harmless")
CRASHING = operator("crashing", "by construction", crashes=True)
OPERATORS = (BITING, CERTAIN, HARMLESS, CRASHING)


def runs(name, ends, cause="", confidence=0.9, **losses):
    """Runs of one mutant, or of the parent, with these losses at the end."""
    findings = (NamedFinding(cause, "warning", confidence),) if cause else ()
    return [
        MutantRun(
            "tuning",
            "net",
            name,
            None,
            100 + place,
            "text",
            verdict="unstable" if cause else "healthy",
            findings=findings,
            exit_code=0,
            losses=RunLosses(comparable=True, start=2.0, end=end, **losses),
        )
        for place, end in enumerate(ends)
    ]


PARENTS = runs("", [0.95, 1.0, 1.05])


def counted_as(mutants, parents=PARENTS):
    (held,) = [each for each in judge([*parents, *mutants], OPERATORS) if each.operator is not None]
    return held.counts_as, held.reason


@pytest.mark.parametrize(
    ("ends", "answer"),
    [
        ([1.3, 1.4, 1.5], "faulty"),
        ([None, None, None], "faulty"),
        ([1.0, 1.4, 1.5], "quiet"),  # one run is no worse than the parent's worst
        ([1.06, 1.07, 1.08], "quiet"),  # worse, but by less than a tenth of what the parent learned
        ([0.5, 0.5, 0.5], "quiet"),
    ],
)
def test_a_mutant_does_harm_if_every_run_is_clearly_worse_than_every_run_of_the_parent(ends, answer):
    assert counted_as(runs("harmful", ends)) == (answer, "")


def test_the_loss_of_the_evaluations_decides_where_all_runs_have_one():
    parents = [replace(run, losses=replace(run.losses, held_out=1.0)) for run in PARENTS]
    assert counted_as(runs("harmful", [1.0] * 3, held_out=1.9), parents) == ("faulty", "")
    assert counted_as(runs("harmful", [1.0] * 3, held_out=1.9)) == ("quiet", "")


def test_evaluations_of_other_rows_per_seed_are_compared_seed_by_seed_where_training_losses_are_apart():
    def evaluated(held, levels):
        return [
            replace(run, losses=replace(run.losses, held_out=level)) for run, level in zip(held, levels, strict=True)
        ]

    parents = evaluated(PARENTS, [0.9, 1.4, 0.9])
    assert counted_as(evaluated(runs("harmful", [1.5] * 3), [1.3, 1.9, 1.3]), parents) == ("faulty", "")
    assert counted_as(evaluated(runs("harmful", [1.5] * 3), [1.3, 1.3, 1.9]), parents) == ("quiet", "")
    assert counted_as(evaluated(runs("harmful", [1.0] * 3), [1.3, 1.9, 1.3]), parents) == ("quiet", "")


def test_a_loss_that_begins_far_lower_is_compared_with_its_own_start():
    lower = [replace(run, losses=replace(run.losses, start=0.9)) for run in runs("harmful", [0.85] * 3)]
    assert counted_as(lower) == ("faulty", "")
    assert counted_as([replace(run, losses=replace(run.losses, end=0.4)) for run in lower]) == ("quiet", "")


def test_what_cannot_be_compared_is_left_out_unless_it_is_wrong_by_construction():
    blind = [replace(run, losses=RunLosses()) for run in PARENTS]
    assert counted_as(runs("harmful", [9.0] * 3), blind) == ("left out", "the loss does not measure progress")
    assert counted_as(runs("harmful", [9.0] * 2)) == ("left out", "fewer than 3 seeds")
    assert counted_as(runs("certain", [9.0] * 2), blind) == ("faulty", "")
    assert counted_as(runs("calm", [9.0] * 3)) == ("left out", "harmful although it is meant not to be")


def test_an_error_counts_only_where_it_is_meant():
    def ended(code, name):
        return [replace(run, exit_code=code) for run in runs(name, [1.0] * 3)]

    assert counted_as(ended(1, "certain")) == ("left out", "ended with an error")
    assert counted_as(ended(1, "crashing")) == ("faulty", "")
    assert counted_as(ended(0, "crashing")) == ("left out", "no error although one is meant")


def test_every_finding_on_a_mutant_that_does_no_harm_or_on_a_parent_is_false():
    parents = runs("", [0.9, 1.0, 1.1], cause="data.leakage")
    held = figures(judge([*parents, *runs("harmful", [1.0] * 3, "lr.too-high"), *runs("calm", [1.0] * 3)], OPERATORS))
    assert (held.false_parents.hits, held.false_parents.runs) == (3, 3)
    assert (held.false_quiet.hits, held.false_quiet.runs, held.planted) == (3, 6, 3)
    assert [(each.findings, each.accuracy) for each in held.reliability] == [(6, 0.0)]


def test_top_one_confusions_and_reliability_are_of_the_faulty_runs():
    right = runs("harmful", [2.0] * 3, "lr.too-high", 0.9)
    wrong = runs("certain", [2.0] * 3, "data.leakage", 0.6)
    held = figures(judge([*PARENTS, *right, *wrong], OPERATORS))
    assert (held.top1.hits, held.top1.runs, held.top1.mutants) == (3, 6, 2)
    assert held.confusions == (("lr.too-high", "data.leakage", 3),)
    assert [(each.low, each.confidence, each.accuracy) for each in held.reliability] == [
        (0.6, pytest.approx(0.6), 0.0),
        (0.9, pytest.approx(0.9), 1.0),
    ]


def test_a_true_cause_that_is_only_mentioned_counts_separately_from_findings():
    mention = NamedFinding("lr.too-high", "info", 0.9)
    mentioned = [replace(run, findings=(mention,)) for run in runs("harmful", [2.0] * 3)]
    found = [replace(run, findings=(*run.findings, mention)) for run in runs("certain", [2.0] * 3, "data.leakage")]
    held = figures(judge([*PARENTS, *mentioned, *found], OPERATORS))
    assert (held.top1.hits, held.top3.hits, held.mentioned.hits, held.mentioned.runs) == (0, 0, 3, 6)
    assert held.confusions[0] == ("lr.too-high", "(healthy, mentions lr.too-high)", 3)


def test_the_interval_is_wilsons():
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Brown, Cai and DasGupta 2001's formula
    assert wilson(1.0, 20)[1] == 1.0
    assert wilson(0.0, 0) == (0.0, 1.0)
