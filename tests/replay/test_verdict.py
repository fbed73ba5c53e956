"""What equal prints prove, and what they do not."""

import math

import pytest
import torch

from surefoot.record.incidents.contents import print_of
from surefoot.replay.processes import ReplayPass
from surefoot.replay.verdict import Replayed, as_text, judge

SAID = {"versions": {}, "hardware": {}, "switches": {}}
NAN = torch.full((3,), math.nan)
NO_BATCH = ["no batch was seen"]


def prints(gradient, inputs=None):
    loss = gradient.sum()
    return {
        "losses": [[{**print_of(loss), "value": float(loss)}]],
        "inputs": [[] if inputs is None else [[print_of(inputs)]]],
        "gradients": {"weight": print_of(gradient)},
    }


def judged(gradient, inexact, then=None, now=None):
    facts = {"step": 0, "inexact": inexact, "fingerprints": prints(gradient, then), **SAID}
    here = ReplayPass(prints(gradient, now), {}, **SAID)
    return judge(facts, here, here)


def test_one_nan_is_like_another_and_does_not_show_that_the_batch_is_the_same():
    found = judged(NAN, NO_BATCH)
    assert (found.kind, found.exit_code, found.fails_again) == ("inconclusive", 5, True)
    assert "fails again in the same way" in found.summary
    assert "It is not known whether it is the same batch" in found.summary
    assert "no batch was seen" in found.summary


def test_other_inputs_are_another_step_though_both_are_nan():
    found = judged(NAN, [], then=torch.ones(2), now=torch.zeros(2))
    assert found.kind == "inconclusive"
    assert "inputs differ from the recorded ones" in found.summary


@pytest.mark.parametrize(
    ("gradient", "inexact", "inputs"),
    [
        (torch.tensor([1.0, math.nan, 2.0]), NO_BATCH, None),
        (NAN, NO_BATCH, torch.ones(2)),
        (NAN, [], None),
    ],
    ids=["some values are finite", "the inputs are the same", "the state is exact"],
)
def test_equal_prints_that_tell_something_reproduce_the_step(gradient, inexact, inputs):
    found = judged(gradient, inexact, inputs, inputs)
    assert (found.kind, found.exit_code) == ("reproduced", 0)


def differing(device, deterministic, inputs):
    """Two passes that agree, and a record of the same state that differs."""
    said = {"versions": {}, "hardware": {"device": device}, "switches": {"deterministic": deterministic}}
    facts = {"step": 0, "inexact": [], "fingerprints": prints(torch.tensor([1.0, 2.0]), inputs), **said}
    here = ReplayPass(prints(torch.tensor([1.0, 3.0]), inputs), {}, **said)
    return judge(facts, here, here)


def test_corruption_needs_a_step_that_is_known_to_be_the_same_and_deterministic():
    same = torch.ones(2)
    for device, deterministic in (("cpu", False), ("cuda", True)):
        found = differing(device, deterministic, same)
        assert (found.kind, found.cause) == ("silent-corruption", "hw.silent-corruption")
    found = differing("cuda", False, same)
    assert (found.kind, found.cause) == ("inconclusive", None)
    assert "deterministic algorithms were off" in found.summary
    found = differing("cpu", False, None)
    assert (found.kind, found.cause) == ("inconclusive", None)
    assert "has no inputs of the model" in found.summary


DIFFERENT = {"weight": {"norms": [1.0, 2.0]}}


@pytest.mark.parametrize(("kind", "operation_first"), [("inconclusive", True), ("silent-corruption", False)])
def test_what_says_more_comes_first(kind, operation_first):
    found = Replayed(3, kind, "The summary.", True, different=DIFFERENT, origin={"text": "aten.div made 1 NaN"})
    text = as_text(found)
    assert text.index("The summary.") < text.index("aten.div made 1 NaN")
    assert (text.index("aten.div made 1 NaN") < text.index("weight: 1.0, 2.0")) == operation_first
