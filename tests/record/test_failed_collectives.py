"""A collective that failed is an event of the run log."""

import surefoot as sf
from surefoot.record.failed_collectives import COLLECTIVE_FAILED
from surefoot.record.messages import StepRow


def test_a_program_that_ends_with_a_failed_collective_has_an_event_of_it(tmp_path):
    for name, first in (("a", "NCCL error in: NCCLUtils.cpp, ncclRemoteError: a rank is gone"), ("b", "another error")):
        log = sf.RunLog(tmp_path / name, device_seconds=None)
        log.take(StepRow(step=4, time=0.0, loss=1.0))
        try:
            with log:
                raise RuntimeError("the loop ended") from RuntimeError(first)
        except RuntimeError:
            pass
        events = [(event.event, event.cause, event.step) for event in sf.load_run(tmp_path / name).events]
        assert events == [*([("alarm", COLLECTIVE_FAILED, 4)] if name == "a" else []), ("end", "", 4)]
