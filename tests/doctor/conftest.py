"""Time that is counted in steps, and fewer objects to search.

The doctor's budget is in seconds, so what it has time to try out depends on the machine. Here each look at the clock
costs a millisecond, and every machine tries the same.

The search for kept graphs looks at every object there is; what was imported before needs no looking at.
"""

from __future__ import annotations

import gc

import pytest
import torch._dynamo  # the first optimizer would import it, and its objects are many

from patience import Clock
from surefoot.doctor import context as bench

LOOK_SECONDS = 1e-3


class CountedTime(Clock):
    """Time that passes when it is looked at."""

    def monotonic(self) -> float:
        self.now += LOOK_SECONDS
        return self.now


@pytest.fixture(autouse=True)
def _time_is_counted_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "time", CountedTime())


@pytest.fixture(scope="module", autouse=True)
def _old_objects_set_aside() -> None:
    assert torch._dynamo
    gc.collect()
    gc.freeze()
