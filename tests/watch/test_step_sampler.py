"""Which steps are sampled."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from surefoot.watch.sampling_budget import ALWAYS
from surefoot.watch.step_sampler import FEWEST_BETWEEN, LONGEST_WAIT
from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery

NO_TIME = """
from surefoot.watch import sampling_budget
sampling_budget.SHARE = sampling_budget.SECONDS_AT_FIRST = 0.0
"""


def test_without_any_time_to_spend_a_step_is_sampled_whenever_their_number_has_doubled(watch: Nursery) -> None:
    run = watch(CLASSES, "loss_of = F.cross_entropy\n", NO_TIME, NET, LOOP.replace("range(60)", "range(300)"))
    sampled = [each["step"] for each in run.facts["sampled_steps"]]
    assert sampled[:ALWAYS] == list(range(ALWAYS))
    assert sampled[-1] >= 300 / LONGEST_WAIT
    gaps = list(pairwise(sampled[ALWAYS - 1 :]))
    assert all(later <= max(LONGEST_WAIT * earlier, earlier + FEWEST_BETWEEN) + 1 for earlier, later in gaps)
    assert all(later - earlier >= FEWEST_BETWEEN for earlier, later in gaps)
