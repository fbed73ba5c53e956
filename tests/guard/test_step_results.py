"""Looking at a run never changes it: the same bits with and without reads after every step, whatever is read."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import surefoot as sf
from loops import differences, everything

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAN = float("nan")
STEPS = 90


def _property_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_") and isinstance(getattr(kind, name), property)]


READS: dict[str, Callable[[sf.TrainingStabilizer, sf.Outcome], object]] = {
    **{name: lambda s, o, name=name: getattr(s, name) for name in _property_names(sf.TrainingStabilizer)},
    "the outcome": lambda s, o: [getattr(o, name) for name in _property_names(sf.Outcome)],
    "summary": lambda s, o: s.summary(),
    "state_dict": lambda s, o: s.state_dict(),
    "repr": lambda s, o: [repr(s), str(s), repr(o)],
    "every attribute": lambda s, o: [getattr(s, name) for name in dir(s) if not name.startswith("_")],
}


def faults(stream_step: int, model: nn.Module) -> float:
    """What the loss of a step is multiplied by. At step 50 the weights themselves are damaged."""
    if stream_step == 50:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.add_(30.0)
    return NAN if stream_step in (10, 11, 12, 30, 31, 70) else 1.0


def train(
    read: Callable[[sf.TrainingStabilizer, sf.Outcome], object] | None = None,
    first: Any = "roll_back",
    **settings: Any,
) -> tuple[dict[str, torch.Tensor], sf.TrainingStabilizer]:
    """A run with cuts and returns; BatchNorm's statistics are part of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    stabilizer = sf.TrainingStabilizer(
        model,
        optimizer,
        scheduler=sf.warmup_cosine(optimizer, 5, STEPS),
        escalation=sf.Escalation(skips=1, cuts=8, calm_steps=15),
        recovery=sf.TrainingRecovery(every_steps=5, patience_steps=4, patience_refused=3, first=first),
        decide_on="device",
        **settings,
    )
    for step in range(STEPS):
        x = torch.randn(16, 4)
        factor = faults(step, model)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        stabilizer.observe(level=loss.detach())
        stabilizer.backward(loss * factor)
        outcome = stabilizer.step()
        if read is not None:
            read(stabilizer, outcome)
    return everything(model, optimizer), stabilizer


@pytest.fixture(scope="module")
def unread() -> tuple[dict[str, torch.Tensor], sf.TrainingStabilizer]:
    return train()


def test_the_run_that_is_looked_at_has_cuts_and_returns(unread: Any) -> None:
    actions = {incident.action for incident in unread[1].incidents}
    assert {"skip", "back_off", "roll_back"} <= actions


@pytest.mark.parametrize("name", READS)
def test_reading_after_every_step_leaves_every_bit_as_it_is(name: str, unread: Any) -> None:
    state, stabilizer = train(READS[name])
    assert differences(state, unread[0]) == []
    assert stabilizer.counts == unread[1].counts
    assert list(map(str, stabilizer.incidents)) == list(map(str, unread[1].incidents))


def test_whether_somebody_looks_only_once_makes_no_difference_either(unread: Any) -> None:
    looks = iter(step == 12 for step in range(STEPS))
    state, _ = train(lambda stabilizer, outcome: stabilizer.counts if next(looks) else None)
    assert differences(state, unread[0]) == []


def test_a_sink_that_looks_at_the_counts_changes_nothing(tmp_path: Path, unread: Any) -> None:
    """Sinks run in threads of their own."""

    class Curious:
        def __init__(self) -> None:
            self.stabilizer: sf.TrainingStabilizer | None = None
            self.seen: list[int] = []
            self.threads: set[int] = set()

        def write(self, batch: Any) -> None:
            self.threads.add(threading.get_ident())
            if self.stabilizer is not None:
                self.seen.append(self.stabilizer.counts["steps"])

        def close(self) -> None:
            pass

    sink = Curious()

    def flush(stabilizer: sf.TrainingStabilizer, outcome: sf.Outcome) -> None:
        sink.stabilizer = stabilizer
        if outcome.step % 10 == 0:
            assert stabilizer.log.flush(60)

    with sf.RunLog(tmp_path, sinks=[sink], device_seconds=None) as log:
        state, _ = train(flush, log=log)
    assert differences(state, unread[0]) == []
    assert sink.seen == sorted(sink.seen)
    assert threading.get_ident() not in sink.threads


def test_of_two_stabilizers_each_may_be_looked_at() -> None:
    def pair(look: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        models = [nn.Linear(4, 4), nn.Linear(4, 1)]
        generator, discriminator = sf.presets.for_gan(
            *(part for m in models for part in (m, torch.optim.AdamW(m.parameters(), lr=0.01, fused=True))),
            decide_on="device",
            escalation=sf.Escalation(skips=0, cuts=9, calm_steps=8),
        )
        for step in range(30):
            factor = NAN if step in (5, 14) else 1.0
            for stabilizer in (discriminator, generator):
                loss = models[1](models[0](torch.randn(8, 4))).square().mean()
                stabilizer.backward(loss * factor)
                stabilizer.step()
                if look:
                    _ = generator.counts, discriminator.incidents, generator.summary()
        return [parameter.detach().clone() for m in models for parameter in m.parameters()]

    assert all(map(torch.equal, pair(False), pair(True)))


# ---- and yet everything is seen -----------------------------------------------------------------------------------


def test_steps_whose_turn_has_not_come_are_shown_all_the_same() -> None:
    seen: list[Any] = []

    def look(stabilizer: sf.TrainingStabilizer, outcome: sf.Outcome) -> None:
        seen.append((stabilizer.counts["steps"], stabilizer.history[-1].signals.step, stabilizer.counts["skipped"]))
        if outcome.step == 10:
            incident = stabilizer.incidents[-1]
            assert (incident.step, incident.kind, incident.action) == (10, "nonfinite", "skip")
            assert "step 10: nonfinite" in stabilizer.summary()

    train(look)
    assert [steps for steps, _, _ in seen] == list(range(1, STEPS + 1))
    assert [step for _, step, _ in seen] == list(range(STEPS))
    assert seen[10][2] == 1


def test_an_incident_is_logged_once_however_often_it_is_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    train(lambda stabilizer, outcome: stabilizer.incidents)
    assert caplog.text.count("step 10: nonfinite") == 1


def test_the_steps_that_end_a_run_are_in_its_log(tmp_path: Path) -> None:
    """Their numbers are still on their way when the loop is over."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with sf.RunLog(tmp_path, device_seconds=None) as log:
        stabilizer = sf.TrainingStabilizer(model, optimizer, decide_on="device", log=log)
        for step in range(10):
            stabilizer.backward(model(torch.randn(8, 4)).square().mean() * (NAN if step == 8 else 1.0))
            stabilizer.step()
            stabilizer.summary()
    run = sf.load_run(tmp_path)
    assert run.scalars["step"].to_pylist() == list(range(10))
    assert [event.step for event in run.events if event.event == "skip"] == [8]


def test_looking_keeps_the_states_of_detectors_as_they_are() -> None:
    """One that changes its state in place, which it should not, is not shown a step twice."""

    class Counting:
        def init(self) -> list[int]:
            return []

        def update(self, state: list[int], signals: sf.Signals) -> tuple[list[int], sf.Verdict]:
            state.append(signals.step)
            return state, sf.Verdict("counting", False)

    _, stabilizer = train(
        lambda stabilizer, outcome: stabilizer.counts, checker=sf.StabilityChecker(plateau=Counting())
    )
    state = copy.deepcopy(stabilizer.state_dict()["results"]["history"]["look_back"])
    counted = next(part for part in state if isinstance(part, list) and part and isinstance(part[0], int))
    assert counted == sorted(set(counted))


def new_level(folder: Path, level_steps: int, **settings: Any) -> sf.TrainingStabilizer:
    """A run whose loss is 50 times as large in its last steps: the first of these is refused."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    stabilizer = sf.TrainingStabilizer(
        model, optimizer, recovery=sf.TrainingRecovery(), log=folder / "log",
        checkpoints=sf.CheckpointManager(folder / "saves", every_steps=1_000), **settings,
    )  # fmt: skip
    for step in range(60 + level_steps):
        x = torch.randn(32, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        stabilizer.backward(loss * (50.0 if step >= 60 else 1.0))
        stabilizer.step()
        if step == 60 and "decide_on" not in settings:
            stabilizer.save()
    return stabilizer


def skips(folder: Path) -> list[tuple[int | None, str]]:
    events = sf.load_run(folder / "log").events
    return [(event.step, event.severity) for event in events if event.event == "skip"]


def test_a_save_after_a_refused_step_does_not_make_it_an_alarm(tmp_path, caplog):
    stabilizer = new_level(tmp_path, 3)
    assert stabilizer.log is not None
    stabilizer.log.close()
    assert skips(tmp_path) == [(60, "info")]
    assert not [message for message in caplog.messages if "step 60" in message]


def test_a_refused_step_that_is_the_last_is_an_alarm_when_the_log_ends(tmp_path, caplog):
    stabilizer = new_level(tmp_path, 1)
    assert stabilizer.log is not None
    stabilizer.log.close()
    assert skips(tmp_path) == [(60, "error")]
    assert len([message for message in caplog.messages if "step 60" in message]) == 1


def test_when_the_log_ends_a_refused_step_is_judged_by_one_that_was_not_read_yet(tmp_path):
    stabilizer = new_level(tmp_path, 4, decide_on="device", lag_steps=3)
    assert stabilizer.log is not None
    stabilizer.log.close()
    assert skips(tmp_path) == [(60, "info")]
