"""Captured calls as lines of Python that make the same again."""

import torch

from recorded_calls import captured
from surefoot.replay.export.program import build
from surefoot.replay.export.trial import attempt


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
