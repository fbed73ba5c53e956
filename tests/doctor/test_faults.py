"""Each fault is named, as the first cause of all, and with a number or a sentence that shows it."""

import pytest
import torch

from doctor_faults import FAULTS
from surefoot.doctor.examine import examine

pytestmark = pytest.mark.slow

SECONDS = {"rate_too_high": 6, "rate_diverges": 6, "rate_too_low": 6, "summed_loss": 6, "unrelated_labels": 20}
"""What has to be tried out takes steps; all else is seen at once. With more seeds: benchmarks/doctor_sweep.py."""


@pytest.mark.parametrize(("setup", "cause"), FAULTS, ids=[setup.__name__ for setup, _ in FAULTS])
def test_the_cause_is_named_first(setup, cause):
    torch.manual_seed(0)
    examination = examine(*setup(), seconds=SECONDS.get(setup.__name__, 0.3))
    assert examination.causes[:1] == (cause,)
    for check in examination.checks:
        if check.cause is not None:
            assert check.status in ("warn", "fail")
            assert check.fix.endswith(".")
            assert check.summary
            assert check.expected
