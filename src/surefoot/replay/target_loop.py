"""The script that experiments run if there is none: a plain loop around what a function of the user returns.

`python -m surefoot.replay.target_loop TARGET`, as a run of `surefoot replay --experiments`. The captured state and
batch come first, then the target's own batches; if it has none, the captured batch is repeated. Autocast and loss scale
are those of the record. Clipping by a stabilizer is not included.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.random_state import set_streams
from surefoot.doctor.model_copy import scalar
from surefoot.errors import UsageError
from surefoot.record.incidents.reading import number
from surefoot.replay import continued_run
from surefoot.replay.changed_data import seed_otherwise
from surefoot.replay.failing_rows import microbatch_to_search
from surefoot.replay.target import TargetStep

if TYPE_CHECKING:
    from surefoot.record.incidents.contents import MicrobatchState
    from surefoot.replay.continued_run import ContinuedRun


def main(target: str) -> None:
    """Train until the experiment ends."""
    held = continued_run.current
    if held is None:
        raise UsageError("this module is only run by `surefoot replay INCIDENT --experiments --target`")
    step = TargetStep(target, held.incident)
    if step.optimizer is None:
        raise UsageError(f"{target!r} returns no optimizer, which experiments need to continue after the step")
    used = held.incident.facts["configuration"].get("loss_scale")
    scale = 1.0 if used is None else number(used)
    scaler = torch.amp.GradScaler(step.home.type, init_scale=scale, enabled=used is not None)
    held.begin(step.optimizer)
    for batches in _steps(step, held):
        if held.data.search is not None:  # each part with the captured scale
            scaler = torch.amp.GradScaler(step.home.type, init_scale=scale, enabled=used is not None)
        for batch in batches:
            with step.autocast():
                loss = scalar(step.loss_of(batch))
            scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        scaler.step(step.optimizer)
        scaler.update()
        step.drop_gradients()


def _steps(step: TargetStep, held: ContinuedRun) -> Iterator[list[Any]]:
    """The batches of each step, the random streams where they have to be."""
    if held.data.search is not None:
        yield from _parts(step, held)
        return
    own = _own_batches(step, held)
    length = step.accumulate
    for turn in count():
        if turn == 0 and held.data.change != "other-batches":
            batches = [step.batch(each) for each in step.microbatches]
            streams = step.microbatches[0]["streams"]
            if held.data.change == "other-seed":
                seed_otherwise()
            elif streams is not None:
                set_streams(streams)
            yield batches
        else:
            yield [next(own) for _ in range(length)]


def _parts(step: TargetStep, held: ContinuedRun) -> Iterator[list[Any]]:
    """Parts of the captured batch, each from the captured state."""
    search = held.data.search
    assert search is not None
    microbatch = step.microbatches[microbatch_to_search(held.incident)]
    while search.take_turn():
        step.put_back()
        given = microbatch["given"]
        chosen: MicrobatchState = {
            **microbatch,
            "drawn": [search.chosen(each) for each in microbatch["drawn"]],
            "given": None if given is None else search.chosen(given),
        }
        batch = step.batch(chosen)
        if microbatch["streams"] is not None:
            held.data.place_streams(microbatch["streams"])
        yield [batch]
    held.experiment.end("rows")


def _own_batches(step: TargetStep, held: ContinuedRun) -> Iterator[Any]:
    while True:
        found = False
        for batch in step.loader:
            found = True
            yield step.placed(batch if held.data.others is None else held.data.others.of(batch))
        if not found:
            own = step.batch(step.microbatches[0])
            yield own if held.data.others is None else held.data.others.of(own)


if __name__ == "__main__":
    main(sys.argv[1])
