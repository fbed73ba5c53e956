"""`StabilizerHandler` in the real Ignite: faults, accumulation, fp16, checkpoints, metrics."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import surefoot as sf
from trainers import killed
from trainers.small_training import CLASSES, LR, WIDTH, AfterSteps, Rows, same

pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn about is theirs


@pytest.fixture(scope="module", autouse=True)
def _framework() -> None:
    """The framework is imported when the first test of this file runs: every worker collects every file."""
    global Engine, Events, create_supervised_trainer
    global supervised_training_step_amp, Checkpoint, DiskSaver, StabilizerHandler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ignite")
        from ignite.engine import Engine, Events, create_supervised_trainer, supervised_training_step_amp
        from ignite.handlers import Checkpoint, DiskSaver

        from surefoot.trainers.ignite import StabilizerHandler


def pairs(faults: Any = None) -> DataLoader[Any]:
    rows = Rows(320, faults)
    return DataLoader(torch.utils.data.TensorDataset(rows.x, rows.labels), batch_size=8)


def bf16_update(model: Any, optimizer: Any, loss_fn: Any) -> Any:
    """An update function with bf16, which `create_supervised_trainer` has for a GPU only."""

    def update(engine: Any, batch: Any) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    return update


class Run:
    """A supervised trainer, guarded or bare."""

    def __init__(
        self, guarded: bool, *, accumulate: int = 1, fused: bool = False, scaler: Any = None, bf16: bool = False,
        **more: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        layers = (torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=fused or None)
        loss_fn: Any = (
            F.cross_entropy if scaler is None else lambda logits, labels: 100 * F.cross_entropy(logits, labels)
        )
        self.handler = StabilizerHandler(self.model, self.optimizer, scaler=scaler, **more) if guarded else None
        if self.handler is not None:
            loss_fn = self.handler.watched(loss_fn)
        settings = {"gradient_accumulation_steps": accumulate}
        if bf16:
            self.trainer = Engine(bf16_update(self.model, self.optimizer, loss_fn))
        elif scaler is None:
            self.trainer = create_supervised_trainer(self.model, self.optimizer, loss_fn, **settings)
        else:
            update = supervised_training_step_amp(
                self.model, self.optimizer, loss_fn, device="cpu", scaler=scaler, **settings
            )
            self.trainer = Engine(update)
        self.copies = AfterSteps(self.model)
        every = Events.ITERATION_COMPLETED(every=accumulate)
        self.trainer.add_event_handler(every, lambda engine: self.copies(self.optimizer))
        if self.handler is not None:
            self.handler.attach(self.trainer)

    @property
    def guard(self) -> Any:
        return self.handler.training.attachments[0]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_healthy_run_is_bitwise_the_bare_run(tmp_path, accumulate, fused):
    bare, guarded = (Run(each, accumulate=accumulate, fused=fused) for each in (False, True))
    for run in (bare, guarded):
        run.trainer.run(pairs(), max_epochs=1)
    assert len(bare.copies.states) == 40 // accumulate
    assert same(bare.copies.states, guarded.copies.states)
    assert guarded.guard.counts["steps"] == 40 // accumulate
    assert 0.5 < guarded.guard.history[0].signals.loss < 3


@pytest.mark.parametrize("faults", [None, {8 * 21: float("nan")}], ids=["healthy", "nan"])
def test_a_bf16_run_is_bitwise_the_bare_run_until_a_nan_batch_which_is_left_out(faults):
    bare, guarded = (Run(each, bf16=True) for each in (False, True))
    for run in (bare, guarded):
        run.trainer.run(pairs(faults), max_epochs=1)
    until = 40 if faults is None else 21
    assert len(guarded.copies.states) == 40
    assert same(bare.copies.states[:until], guarded.copies.states[:until])
    assert [i for i, record in enumerate(guarded.guard.history) if record.skipped] == ([] if faults is None else [21])
    assert faults is None or same(guarded.copies.states[20], guarded.copies.states[21])


def test_a_healthy_run_with_an_update_function_that_accumulates_and_clips_is_bitwise_the_bare_run():
    runs = []
    for guarded in (False, True):
        run, norms = Run(guarded), []

        def update(engine: Any, batch: Any, run: Any = run, norms: Any = norms) -> None:
            loss = F.cross_entropy(run.model(batch[0]), batch[1])
            if run.handler is not None:
                run.handler.observe(loss)
            (loss / 4).backward()
            if engine.state.iteration % 4 == 0:
                norms.append(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05).item())
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.copies(run.optimizer)

        trainer = Engine(update)
        if run.handler is not None:
            run.handler.attach(trainer)
        trainer.run(pairs(), max_epochs=1)
        runs.append((run.copies.states, norms))
    assert same(*runs)
    assert min(norms) > 0.05
    assert run.guard.counts.items() >= {"steps": 10, "skipped": 0, "alarms": 0}.items()


def test_a_nan_batch_is_left_out_bitwise():
    run = Run(True)
    run.trainer.run(pairs({8 * 21: float("nan")}), max_epochs=1)
    assert [i for i, record in enumerate(run.guard.history) if record.skipped] == [21]
    assert same(run.copies.states[20], run.copies.states[21])
    assert run.trainer.state.iteration == 40


@pytest.mark.parametrize("clip", [None, sf.ClipByNorm(1.0)], ids=["unclipped", "clipped"])
def test_an_exploding_gradient_is_refused(clip):
    run = Run(True, clip=clip)
    run.model[1] = torch.nn.Identity()
    run.trainer.run(pairs(dict.fromkeys(range(8 * 30, 8 * 31), 1e5)), max_epochs=1)
    assert run.guard.history[30].reasons == ("explosion",)
    assert same(run.copies.states[29], run.copies.states[30])


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_an_fp16_overflow_stays_the_scalers_decision_and_is_counted(fused):
    ended = []
    for guarded in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        run = Run(guarded, scaler=scaler, fused=fused)
        run.trainer.run(pairs(), max_epochs=1)
        ended.append((run.copies.states, scaler.get_scale()))
    assert same(*ended)
    counts = run.guard.counts
    assert counts["steps"] == 40
    assert counts["overflows"] == counts["skipped"] == 127 - math.log2(ended[1][1]) >= 1


def test_after_a_rate_that_was_100_times_too_high_the_weights_return_to_earlier_ones():
    losses = []
    for guarded in (False, True):
        run = Run(guarded)

        @run.trainer.on(Events.ITERATION_STARTED)
        def wrong_rate(engine: Any, run: Any = run) -> None:
            run.optimizer.param_groups[0]["lr"] = LR * (300 if 80 < engine.state.iteration <= 95 else 3)

        run.trainer.run(pairs(), max_epochs=5)
        rows = Rows(320)
        losses.append(F.cross_entropy(run.model(rows.x), rows.labels).item())
    assert [incident.action for incident in run.guard.incidents].count("roll_back") == 1
    assert losses[1] < losses[0]


def test_the_handler_is_saved_and_loaded_like_a_model(tmp_path):
    run = Run(True)
    things = {"model": run.model, "optimizer": run.optimizer, "trainer": run.trainer, "surefoot": run.handler}
    saving = Checkpoint(things, DiskSaver(tmp_path), n_saved=None)
    run.trainer.add_event_handler(Events.EPOCH_COMPLETED, saving)
    run.trainer.run(pairs({8 * 21: float("nan")}), max_epochs=3)
    again = Run(True)
    things = {"model": again.model, "optimizer": again.optimizer, "trainer": again.trainer, "surefoot": again.handler}
    Checkpoint.load_objects(things, torch.load(tmp_path / "checkpoint_40.pt"))
    again.trainer.run(pairs({8 * 21: float("nan")}), max_epochs=3)
    assert same(run.copies.states[40:], again.copies.states)
    assert again.guard.counts == run.guard.counts


def test_a_run_that_is_killed_8_times_ends_as_if_it_never_had_been(tmp_path):
    found = killed.report("ignite", tmp_path, kills=8)
    assert found == {"kills": 8, "steps": killed.STEPS, "skipped": 2, "equal": True, "logged": True}


def test_metrics_log_and_diagnosis(tmp_path):
    run = Run(True, log=tmp_path / "run")
    run.trainer.run(pairs({8 * 21: float("nan")}), max_epochs=1)
    assert run.trainer.state.metrics["surefoot/skipped"] == 1
    assert len(sf.load_run(tmp_path / "run").scalars) == 40
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["steps"] == 40
    assert not run.guard.attached


def test_a_run_that_raises_is_detached():
    run = Run(True)

    @run.trainer.on(Events.ITERATION_STARTED(once=4))
    def fail(engine: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run.trainer.run(pairs(), max_epochs=1)
    assert not run.guard.attached
    assert run.guard.counts["steps"] == 3


def test_an_exception_that_the_user_handles_does_not_end_the_program():
    run, seen = Run(True), []

    @run.trainer.on(Events.ITERATION_STARTED(once=4))
    def fail(engine: Any) -> None:
        raise ValueError("no")

    @run.trainer.on(Events.EXCEPTION_RAISED)
    def handle(engine: Any, error: BaseException) -> None:
        seen.append(str(error))
        engine.terminate()

    run.trainer.run(pairs(), max_epochs=1)
    assert seen == ["no"]
    assert not run.guard.attached
