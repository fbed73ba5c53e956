"""How much of what came before goes into the script."""

import torch

from recorded_calls import captured
from surefoot.replay.export.choose import MOST_CALLS, drafts


def test_cheap_calls_before_the_failure_are_shown_and_the_weights_are_not():
    weight, x = torch.ones(200, 200), -torch.ones(200)

    def step():
        return torch.relu(weight @ x).mul(0).log()

    found = captured(step, weight=weight, x=x)
    grown, small, alone = drafts(found, backward=False, fixed=set())
    assert small.program.operations == alone.program.operations == 1
    assert small.program.bytes < alone.program.bytes
    assert 1 < grown.program.operations <= MOST_CALLS
    assert "@" not in grown.program.text
    assert grown.seen.kinds == alone.seen.kinds


def test_a_call_that_does_not_fail_alone_gives_no_draft():
    x = torch.ones(2)
    assert list(drafts(captured(lambda: x * 2), backward=False, fixed=set())) == []
