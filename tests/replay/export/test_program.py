"""Captured calls as lines of Python that make the same again."""

import torch

from recorded_calls import captured
from surefoot.replay.export.program import Patience, TrialResult, attempt, build
from surefoot.replay.locate.describe import Counts


def test_the_lines_run_and_use_the_names_of_the_program():
    hidden = torch.tensor([0.0, 1.0])
    found = captured(lambda: (hidden * 1).log(), hidden=hidden)
    calls = [ran for ran in found.calls if ran.outputs]
    program = build(found, calls, backward=False)
    assert "hidden" in program.leaves
    assert program.operations == 2
    assert program.text.splitlines()[-1].startswith("made = [")
    assert program.bytes == 8
    seen = attempt(program.text, program.leaves)
    assert (seen.counts.negative_inf, seen.numel) == (1, 2)


def test_backward_makes_the_gradients_of_the_inputs():
    x = torch.zeros(1, requires_grad=True)
    found = captured(x.sqrt, x=x)
    found.upstream[""] = torch.ones(1)
    program = build(found, [found.bad], backward=True)
    seen = attempt(program.text, program.leaves)
    assert seen.counts.inf == 1


def test_what_is_not_finite_is_counted_by_kind():
    seen = attempt("made = [x.log(), -x]", {"x": torch.tensor([0.0, -1.0, 1.0])})
    assert seen == TrialResult(Counts(nan=1, negative_inf=1), 6)
    assert seen.kinds == (True, False, True)


def test_lines_that_raise_are_no_reproduction():
    assert attempt("made = [x @ x]", {"x": torch.ones(2, 3)}) is None
    assert attempt("pass", {}) is None


def test_the_surroundings_do_not_reach_in_nor_the_lines_out():
    leaf = torch.ones(2)
    with torch.no_grad():
        seen = attempt(
            "y = x.requires_grad_() * 0; y.sum().backward(); made = [x.grad / 0]; x.data.add_(5)", {"x": leaf}
        )
    assert seen.counts.nan == 2
    assert leaf.tolist() == [1, 1]
    state = torch.get_rng_state()
    attempt("torch.manual_seed(3); made = [torch.rand(2)]", {})
    assert torch.equal(torch.get_rng_state(), state)


def test_patience_ends_with_the_trials():
    patience = Patience(trials=1)
    assert not patience.is_over
    patience.trials -= 1
    assert patience.is_over
