"""`prepare` with the real Accelerate, in a loop as its users write it: faults, accumulation, clipping, checkpoints."""

from __future__ import annotations

import gc
import json
import math
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import surefoot as sf
from surefoot.errors import SettingError, UsageError
from trainers import killed
from trainers.small_training import LR, AfterSteps, Classifier, Linear, Overflowing, Rows, same, use_fp16_on_cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from surefoot.trainers import accelerate as adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn about is theirs


class Loop:
    """A loop with Accelerate, guarded or bare."""

    def __init__(
        self, guarded: bool, *, model: Any = None, accumulate: int = 1, clip: float | None = None,
        fused: bool = False, faults: Any = None, precision: str = "no", clipper: Any = None, log: Any = None,
        fp16: bool = False,
    ) -> None:  # fmt: skip
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(1)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
        if fp16:
            use_fp16_on_cpu(self.accelerator)
        model = Classifier() if model is None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused or None)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
        things = (model, optimizer, DataLoader(Rows(320, faults), batch_size=8), schedule)
        if guarded:
            prepared = adapter.prepare(self.accelerator, *things, log=log, clip=clipper)
            self.training = adapter.training_of(self.accelerator)
            self.guard = self.training.attachments[0]
        else:
            prepared = self.accelerator.prepare(*things)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.clip, self.copies, self.rates, self.norms = clip, AfterSteps(model), [], []

    def train(self, epochs: int = 1, before: Any = None) -> Loop:
        self.model.train()
        for _ in range(epochs):
            for batch in self.loader:
                if before is not None:
                    before(self)
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(**batch)["loss"])
                    if self.accelerator.sync_gradients and self.clip is not None:
                        self.norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip).item())
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.copies(self.optimizer)
                    self.rates.append(self.schedule.get_last_lr()[0])
        return self


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 4}, {"accumulate": 3, "clip": 0.05}, {"precision": "bf16"}],
    ids=["default", "accumulated", "clipped-accumulated", "bf16"],
)
def test_a_healthy_run_is_bitwise_the_bare_run(tmp_path, settings, fused):
    bare = Loop(False, fused=fused, **settings).train()
    guarded = Loop(True, fused=fused, log=tmp_path / "run", **settings).train()
    assert same(bare.copies.states, guarded.copies.states)
    assert len(bare.copies.states) == guarded.guard.steps == -(-40 // settings.get("accumulate", 1))
    assert (bare.rates, bare.norms) == (guarded.rates, guarded.norms)
    assert guarded.guard.counts["skipped"] == guarded.guard.counts["alarms"] == 0
    adapter.end(guarded.accelerator)


def test_the_loss_is_the_mean_over_the_microbatches_and_the_norm_the_one_before_the_clip():
    loop = Loop(True, accumulate=4, clip=0.05).train()
    history = loop.guard.history
    assert [record.signals.grad_norm for record in history] == pytest.approx(loop.norms, rel=1e-5)
    assert min(loop.norms) > 0.05
    assert 0.5 < history[0].signals.loss < 3  # and not a quarter of it
    assert loop.guard.counts["clipped"] == 10


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_nan_batch_is_left_out_bitwise_and_the_schedule_continues(clip):
    loop = Loop(True, faults={8 * 21 + 3: float("nan")}, clip=clip).train()
    assert [i for i, record in enumerate(loop.guard.history) if record.skipped] == [21]
    assert same(loop.copies.states[20], loop.copies.states[21])
    assert not same(loop.copies.states[21], loop.copies.states[22])
    assert len(set(loop.rates)) == 40


@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_exploding_gradient_is_refused_before_the_clip_hides_it(clip):
    loop = Loop(True, model=Linear(), faults=dict.fromkeys(range(8 * 30, 8 * 31), 1e6), clip=clip).train()
    assert [i for i, record in enumerate(loop.guard.history) if record.skipped] == [30]
    assert loop.guard.history[30].reasons == ("explosion",)
    assert same(loop.copies.states[29], loop.copies.states[30])


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_an_fp16_overflow_stays_the_scalers_decision_and_is_counted(fused):
    ended = []
    for guarded in (False, True):
        loop = Loop(guarded, fused=fused, fp16=True, accumulate=2, clip=0.5, model=Overflowing()).train()
        ended.append((loop.copies.states, loop.rates, loop.accelerator.scaler.get_scale()))
    assert same(*ended)
    counts = loop.guard.counts
    assert counts["steps"] == 20
    assert counts["overflows"] == counts["skipped"] == 20 - math.log2(ended[1][2]) >= 2


def test_after_a_rate_that_was_100_times_too_high_the_weights_return_to_earlier_ones():
    def wrong_rate(loop: Loop) -> None:
        factor = 100 if 80 <= len(loop.copies.states) < 95 else 1
        loop.optimizer.param_groups[0]["lr"] = factor * LR

    losses = []
    for guarded in (False, True):
        loop = Loop(guarded).train(5, before=wrong_rate)
        rows = Rows(320)
        losses.append(loop.model.eval()(rows.x, rows.labels)["loss"].item())
    assert [incident.action for incident in loop.guard.incidents].count("roll_back") == 1
    assert losses[1] < 0.6 * losses[0]


def test_two_clippers_are_one_clear_error():
    with pytest.raises(UsageError, match="clipped twice"):
        Loop(True, clip=1.0, clipper=sf.ClipByNorm(1.0)).train()
    loop = Loop(True, clipper=sf.ClipByNorm(0.05)).train()
    assert loop.guard.counts["clipped"] == 40


def test_a_state_that_was_saved_is_loaded_with_the_rest(tmp_path):
    faults = {16 * 12: float("nan")}
    whole = Loop(True, accumulate=2, faults=faults).train(1)
    whole.accelerator.save_state(tmp_path / "saved")
    whole.train(2)
    again = Loop(True, accumulate=2, faults=faults)
    again.accelerator.load_state(tmp_path / "saved")
    assert again.guard.steps == 20
    again.train(2)
    assert same(whole.copies.states[20:], again.copies.states)
    assert again.guard.counts == whole.guard.counts


def test_a_run_that_is_killed_8_times_ends_as_if_it_never_had_been(tmp_path):
    found = killed.report("accelerate", tmp_path, kills=8)
    assert found == {"kills": 8, "steps": killed.STEPS, "skipped": 2, "equal": True, "logged": True}


def test_the_end_of_training_writes_log_and_diagnosis_and_leaves_accelerate_as_it_was(tmp_path):
    loop = Loop(True, log=tmp_path / "run", faults={8 * 21: float("nan")}).train()
    loop.accelerator.log({"mine": 1.0})
    loop.accelerator.end_training()
    assert len(sf.load_run(tmp_path / "run").scalars) == 40
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["steps"] == 40
    replaced = {"backward", "clip_grad_norm_", "clip_grad_value_", "log", "end_training"}
    assert not replaced & set(vars(loop.accelerator))
    assert loop.accelerator._custom_objects == []
    with pytest.raises(UsageError, match="nothing is guarded"):
        adapter.training_of(loop.accelerator)


def test_an_accelerator_without_references_is_not_kept_alive():
    loop = Loop(True)
    reference = weakref.ref(loop.model)
    loop.accelerator.free_memory()
    del loop
    AcceleratorState._reset_state(True)
    gc.collect()
    assert reference() is None
    assert list(adapter._TRAININGS) == []


def test_a_model_and_an_optimizer_are_needed():
    with pytest.raises(UsageError, match="1 models and 0 optimizers"):
        adapter.prepare(Accelerator(cpu=True), Classifier())
    with pytest.raises(SettingError, match="no optimizer trains a parameter of the model"):
        adapter.prepare(Accelerator(cpu=True), Classifier(), torch.optim.SGD(Classifier().parameters(), lr=0.1))


def test_an_accelerator_that_dies_ends_its_guard(tmp_path):
    loop = Loop(True, log=tmp_path / "run").train()
    loop.accelerator.free_memory()
    del loop
    AcceleratorState._reset_state(True)
    gc.collect()
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["steps"] == 40


def test_a_checkpoint_can_be_saved_after_the_optimizer_is_gone(tmp_path):
    loop = Loop(True)
    loop.model, loop.optimizer, loop.loader, loop.schedule = loop.accelerator.free_memory(
        loop.model, loop.optimizer, loop.loader, loop.schedule
    )
    gc.collect()
    loop.accelerator.save_state(tmp_path / "saved")
    assert loop.training.state_dict() == {"guards": []}


def test_a_second_prepare_is_one_clear_error_while_the_first_guard_is_attached():
    accelerator = Accelerator(cpu=True)
    parts = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (Classifier(), Classifier())]
    adapter.prepare(accelerator, *parts[0], device_placement=[True, False])
    with pytest.raises(UsageError, match=r"already guarded.*one call of `prepare`"):
        adapter.prepare(accelerator, *parts[1])
    assert adapter.training_of(accelerator).is_attached
    adapter.end(accelerator)
    adapter.prepare(accelerator, *parts[1])
    adapter.end(accelerator)


def test_two_models_with_an_optimizer_each_are_guarded_in_one_call():
    runs = []
    for guarded in (False, True):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator, rows = Accelerator(cpu=True), Rows(320)
        models = [Classifier(0), Classifier(1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        prepare = partial(adapter.prepare, accelerator) if guarded else accelerator.prepare
        prepared = prepare(*models, *optimizers)
        torch.manual_seed(1)
        for step in range(20):
            chosen = slice(8 * step, 8 * step + 8)
            for number, (model, optimizer) in enumerate(zip(prepared[:2], prepared[2:], strict=True)):
                loss = model(rows.x[chosen], rows.labels[chosen])["loss"]
                broken = (step, number) == (19, 1)
                accelerator.backward(loss * (float("nan") if broken else 1.0))
                optimizer.step()
                optimizer.zero_grad()
        runs.append([model.state_dict() for model in models])
    assert same(runs[0][0], runs[1][0])
    guards = adapter.training_of(accelerator).attachments
    assert [guard.counts["skipped"] for guard in guards] == [0, 1]
    assert guards[0].history[3].signals.loss != guards[1].history[3].signals.loss
    adapter.end(accelerator)
