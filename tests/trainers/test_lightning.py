"""`StabilizerCallback` in the real Lightning `Trainer`: faults, accumulation, clipping, fp16, checkpoints, loggers."""

from __future__ import annotations

import json
import logging
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import surefoot as sf
from surefoot.errors import UsageError
from trainers import killed
from trainers.small_training import LR, Classifier, Linear, Rows, same

pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn about is theirs


@pytest.fixture(scope="module", autouse=True)
def _framework() -> None:
    """The framework is imported when the first test of this file runs: every worker collects every file."""
    global L, Callback, ModelCheckpoint, CSVLogger, MixedPrecision, Precision, StabilizerCallback
    global Copies, Module, train
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        L = pytest.importorskip("lightning")
        from lightning.pytorch.callbacks import Callback, ModelCheckpoint
        from lightning.pytorch.loggers import CSVLogger
        from lightning.pytorch.plugins import MixedPrecision, Precision

        from surefoot.trainers.lightning import StabilizerCallback
        from trainers.lightning_classes import Copies, Module, train


def guard_of(callback: StabilizerCallback) -> Any:
    return callback.training.attachments[0]


ACCUMULATED, BF16 = {"accumulate_grad_batches": 4}, {"precision": "bf16-mixed"}
CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("settings", "fused"),
    [({}, False), ({}, True), (ACCUMULATED, False), (CLIPPED, False), (CLIPPED, True), (BY_VALUE, True), (BF16, True)],
    ids=["default", "fused", "accumulated", "clipped", "clipped-fused", "clipped-by-value-fused", "bf16-fused"],
)
def test_a_healthy_run_is_bitwise_the_bare_run(tmp_path, settings, fused):
    bare, guarded = Copies(), Copies()
    train(tmp_path, bare, module=Module(fused=fused), **settings)
    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, guarded, callback, module=Module(fused=fused), **settings)
    assert len(bare.states) == len(guarded.states) == -(-40 // settings.get("accumulate_grad_batches", 1))
    assert same(bare.states, guarded.states)
    assert bare.rates == guarded.rates
    counts = guard_of(callback).counts
    assert counts["skipped"] == counts["alarms"] == 0
    assert counts["steps"] == len(bare.states)


def test_the_loss_is_the_mean_over_the_microbatches_also_of_a_short_last_window(tmp_path):
    losses = []

    class Told(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            losses.append(loss.item())
            return loss

    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, module=Told(), accumulate_grad_batches=3)
    expected = [sum(losses[i : i + 3]) / len(losses[i : i + 3]) for i in range(0, 40, 3)]
    assert [record.signals.loss for record in guard_of(callback).history] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_a_nan_batch_is_left_out_bitwise_and_the_counters_go_on(tmp_path, fused):
    copies, callback = Copies(), StabilizerCallback(tmp_path / "run")
    faults = {8 * 21 + 3: float("nan")}
    trainer = train(tmp_path, callback, copies, module=Module(fused=fused), faults=faults, gradient_clip_val=1.0)
    history = guard_of(callback).history
    assert [i for i, record in enumerate(history) if record.skipped] == [21]
    assert history[21].reasons == ("nonfinite",)
    assert same(copies.states[20], copies.states[21])
    assert not same(copies.states[21], copies.states[22])
    assert trainer.global_step == 40
    assert len(set(copies.rates)) == 40  # the schedule follows the data


@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_exploding_gradient_is_refused_before_the_clip_hides_it(tmp_path, clip):
    copies, callback = Copies(), StabilizerCallback(tmp_path / "run")
    faults = dict.fromkeys(range(8 * 30, 8 * 31), 1e6)
    train(tmp_path, copies, callback, module=Module(Linear()), faults=faults, gradient_clip_val=clip)
    history = guard_of(callback).history
    assert [i for i, record in enumerate(history) if record.skipped] == [30]
    assert history[30].reasons == ("explosion",)
    assert history[30].signals.grad_norm > 1e3
    assert same(copies.states[29], copies.states[30])


def test_an_infinite_gradient_is_not_made_ordinary_by_clipping_values(tmp_path):
    module, backwards = Module(), []

    def break_the_sixth(gradient: torch.Tensor) -> torch.Tensor:
        backwards.append(1)
        return gradient * float("inf") if len(backwards) == 6 else gradient

    module.model.head.weight.register_hook(break_the_sixth)
    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, module=module, gradient_clip_val=0.5, gradient_clip_algorithm="value", max_steps=8)
    assert [record.skipped for record in guard_of(callback).history].index(True) == 5


def test_two_clippers_are_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match=r"gradients twice.*gradient_clip_val"):
        train(tmp_path, StabilizerCallback(clip=sf.ClipByNorm(1.0)), gradient_clip_val=1.0)
    callback = StabilizerCallback(clip=sf.ClipByNorm(0.05))
    train(tmp_path, callback, max_steps=5)
    assert guard_of(callback).counts["clipped"] == 5


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_an_fp16_overflow_stays_the_scalers_decision_and_is_counted(tmp_path, fused):
    runs = {}
    for name in ("bare", "guarded"):
        copies, callback = Copies(), StabilizerCallback(tmp_path / "run")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
        precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        chosen = [callback] if name == "guarded" else []
        train(tmp_path, copies, *chosen, module=Module(fused=fused), plugins=[precision], max_steps=30)
        runs[name] = (copies.states, scaler.get_scale())
    assert same(runs["bare"], runs["guarded"])
    counts = guard_of(callback).counts
    assert counts["overflows"] == counts["skipped"] > 3
    assert counts["steps"] == 30
    assert runs["guarded"][1] == 2.0 ** (40 - counts["overflows"])


def test_after_a_rate_that_was_100_times_too_high_the_weights_return_to_earlier_ones(tmp_path):
    class WrongRate(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            factor = 100 if 80 <= trainer.global_step < 95 else 1
            trainer.optimizers[0].param_groups[0]["lr"] = factor * LR

    callback, losses = StabilizerCallback(tmp_path / "run"), {}
    for name, chosen in (("bare", []), ("guarded", [callback])):
        trainer = train(tmp_path, WrongRate(), *chosen, epochs=5)
        rows = Rows(320)
        model = trainer.lightning_module.model.eval()
        losses[name] = model(rows.x, rows.labels)["loss"].item()
    assert [incident.action for incident in guard_of(callback).incidents].count("roll_back") == 1
    assert losses["guarded"] < 0.6 * losses["bare"]


def test_a_resumed_run_is_the_uninterrupted_one_with_the_rules_that_it_had(tmp_path):
    def checkpoints() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)

    settings = {"accumulate_grad_batches": 2, "enable_checkpointing": True, "faults": {16 * 12: float("nan")}}
    settings["epochs"] = 3
    whole, callback = Copies(), StabilizerCallback(tmp_path / "run")
    train(tmp_path, whole, callback, checkpoints(), module=Module(Linear()), **settings)  # Linear has no dropout
    later, resumed = Copies(), StabilizerCallback(tmp_path / "resumed")
    later.states = whole.states[:20]
    first = tmp_path / "saved" / "epoch=0.ckpt"
    train(tmp_path, later, resumed, module=Module(Linear()), resume=first, **settings)
    assert same(whole.states, later.states)
    assert guard_of(resumed).counts == guard_of(callback).counts
    assert guard_of(resumed).counts["skipped"] == 3


def test_a_run_that_is_killed_8_times_ends_as_if_it_never_had_been(tmp_path):
    found = killed.report("lightning", tmp_path, kills=8)
    assert found == {"kills": 8, "steps": killed.STEPS, "skipped": 2, "equal": True, "logged": True}


def test_manual_optimization_with_two_optimizers_is_guarded(tmp_path):
    class Two(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.models = torch.nn.ModuleList([Classifier(0), Classifier(1)])

        def training_step(self, batch: Any, index: int) -> None:
            for number, (optimizer, model) in enumerate(zip(self.optimizers(), self.models, strict=True)):
                optimizer.zero_grad()
                loss = model(**batch)["loss"]
                self.manual_backward(loss * (float("nan") if (index, number) == (5, 1) else 1.0))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]

    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, module=Two())
    first, second = callback.training.attachments
    assert (first.counts["steps"], first.counts["skipped"]) == (40, 0)
    assert [i for i, record in enumerate(second.history) if record.skipped] == [5]
    assert first.history[3].signals.loss != second.history[3].signals.loss


def test_the_run_folder_has_log_facts_and_diagnosis_and_the_logger_our_numbers(tmp_path, nothing_compiled):
    callback = StabilizerCallback(tmp_path / "run")
    logger = CSVLogger(tmp_path / "csv")
    trainer = train(tmp_path, callback, faults={8 * 21: float("nan")}, logger=logger, log_every_n_steps=10)
    assert len(sf.load_run(tmp_path / "run").scalars) == 40
    found = json.loads((tmp_path / "run" / "findings.json").read_text())
    assert (found["steps"], found["findings"][0]["cause"]) == (40, "data.nonfinite-input")
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert (facts["scope"], facts["trainer"], facts["problems"]) == ("training", "lightning", {})
    assert len(facts["batches"]) == 40  # from the first one on, which is drawn before the guard is attached
    logged = (tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "surefoot/skipped" in logged.splitlines()[0]
    assert not {"clip_grad_by_norm", "clip_grad_by_value"} & set(vars(trainer.precision_plugin))
    assert not guard_of(callback).attached


def test_a_training_that_raises_is_detached(tmp_path):
    class Failing(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 3:
                raise ValueError("no")
            return super().training_step(batch, index)

    callback = StabilizerCallback(tmp_path / "run")
    with pytest.raises(ValueError, match="no"):
        train(tmp_path, callback, module=Failing())
    assert not guard_of(callback).attached
    assert len(sf.load_run(tmp_path / "run").scalars) == 3


def mixed(scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000))


def test_the_loss_of_fp16_is_the_one_before_the_loss_scale(tmp_path):
    losses = []
    for scale in (1.0, 1024.0):
        callback = StabilizerCallback()
        train(tmp_path, callback, module=Module(Linear()), plugins=[mixed(scale)], max_steps=4, log_every_n_steps=0)
        losses.append([record.signals.loss for record in guard_of(callback).history])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_an_fp16_run_that_is_resumed_within_an_accumulation_counts_no_overflow(tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 3:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    settings: dict[str, Any] = {"accumulate_grad_batches": 2}
    train(tmp_path, StabilizerCallback(), Save(), plugins=[mixed(1024.0)], **settings)
    callback = StabilizerCallback()
    train(tmp_path, callback, plugins=[mixed(1024.0)], resume=tmp_path / "saved.ckpt", **settings)
    assert guard_of(callback).counts["overflows"] == 0
    assert guard_of(callback).steps == 20


def test_clipping_that_a_plugin_has_written_stays_its_own(tmp_path):
    calls, states = [], []

    class Own(Precision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
            calls.append(1)
            super().clip_grad_by_norm(optimizer, clip_val / 2)

    for callbacks in ([], [StabilizerCallback()]):
        module = Module()
        train(tmp_path, *callbacks, module=module, plugins=[Own()], gradient_clip_val=0.05, max_steps=5)
        states.append(module.state_dict())
    assert len(calls) == 10
    assert same(*states)


def test_a_checkpoint_after_training_has_the_state_and_a_second_fit_does_not_miss_one(tmp_path, caplog):
    callback = StabilizerCallback()
    trainer = train(tmp_path, callback)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Module(), DataLoader(Rows(320), batch_size=8))
    resumed = StabilizerCallback()
    train(tmp_path, resumed, resume=tmp_path / "end.ckpt", epochs=2)
    assert guard_of(resumed).steps == 80
    assert "start without history" not in caplog.text


def test_a_callback_that_has_trained_can_be_sent_to_another_process(tmp_path):
    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, max_steps=3)
    assert pickle.loads(pickle.dumps(callback)).training is None


def test_an_optimizer_that_replaces_the_guarded_one_gets_one_line(tmp_path, caplog):
    class Again(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index in (5, 6):
                trainer.strategy.setup_optimizers(trainer)

    train(tmp_path, StabilizerCallback(), Again(), max_steps=10)
    assert caplog.text.count("Lightning has other optimizers since step 5 than at the beginning") == 1
    caplog.clear()
    train(tmp_path, StabilizerCallback(), max_steps=10)
    assert "other optimizers" not in caplog.text


def test_a_module_without_optimizers_trains_as_before(tmp_path):
    class Without(Module):
        def configure_optimizers(self) -> None:
            return None

    callback = StabilizerCallback()
    train(tmp_path, callback, module=Without(), max_steps=3)
    assert callback.training.attachments == []


def test_a_state_that_a_test_has_loaded_is_not_used_by_the_next_training(tmp_path):
    class Tested(Module):
        def test_step(self, batch: Any, index: int) -> None:
            self.model(**batch)

    callback = StabilizerCallback()
    trainer = train(tmp_path, callback, module=Tested(), max_steps=5)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.test(Tested(), DataLoader(Rows(16), batch_size=8), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    other = L.Trainer(
        default_root_dir=tmp_path, callbacks=[callback], accelerator="cpu", logger=False, max_steps=3,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    other.fit(Module(), DataLoader(Rows(320), batch_size=8))
    assert guard_of(callback).steps == 3


def test_a_callback_of_the_user_that_raises_ends_the_guard(tmp_path):
    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise ValueError("no")

    callback = StabilizerCallback(tmp_path / "run")
    with pytest.raises(ValueError, match="no"):
        train(tmp_path, callback, Failing())
    assert not guard_of(callback).attached


def test_validation_during_training_changes_no_step_and_no_loss(tmp_path):
    class Validated(Module):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.model(**batch)["loss"])

    runs = []
    for chosen in ([], [StabilizerCallback(tmp_path / "run")]):
        copies = Copies()
        torch.manual_seed(1)
        trainer = L.Trainer(
            default_root_dir=tmp_path, callbacks=[copies, *chosen], accelerator="cpu", logger=False, max_epochs=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, val_check_interval=10,
        )  # fmt: skip
        loaders = [DataLoader(Rows(count), batch_size=8) for count in (320, 40)]
        trainer.fit(Validated(), *loaders)
        runs.append(copies.states)
    assert same(*runs)
    assert guard_of(chosen[0]).counts.items() >= {"steps": 40, "skipped": 0, "alarms": 0}.items()


def test_a_second_fit_continues_in_the_log_of_the_first(tmp_path):
    callback, module = StabilizerCallback(tmp_path / "run"), Module()
    trainer = train(tmp_path, callback, module=module, max_steps=5)
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(Rows(320), batch_size=8))
    assert sf.load_run(tmp_path / "run").scalars["step"].to_pylist() == list(range(8))


def test_a_checkpoint_that_is_saved_after_an_exception_has_the_state_of_the_guard(tmp_path):
    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise ValueError("no")

    class Saving(Callback):
        def on_exception(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "failed.ckpt")

    with pytest.raises(ValueError, match="no"):
        train(tmp_path, StabilizerCallback(), Failing(), Saving())
    saved = torch.load(tmp_path / "failed.ckpt", weights_only=False)["callbacks"]
    assert saved["StabilizerCallback"]["guards"][0]["results"]["steps"] == 3


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_watching_clips_as_lightning_does(tmp_path, algorithm):
    class Infinite(Module):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 3:
                self.model.head.weight.grad[0, 0] = float("inf")

    states = []
    for chosen in ([], [StabilizerCallback(mode="watch")]):
        module = Infinite()
        settings = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm, "max_steps": 5}
        train(tmp_path, *chosen, module=module, **settings)
        states.append({name: value.nan_to_num(7) for name, value in module.state_dict().items()})
    assert same(*states)


def test_a_callback_of_two_trainings_says_that_the_rows_of_the_first_are_replaced(tmp_path, caplog):
    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, max_steps=6)
    assert "another training" not in caplog.text
    train(tmp_path, callback, max_steps=4)
    assert caplog.text.count("another training of 6 steps, whose rows in") == 1
    assert len(sf.load_run(tmp_path / "run").scalars) == 4


def test_weight_averaging_ends_with_a_pass_without_backward_that_raises_no_alarm(tmp_path, caplog):
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.body[1] = torch.nn.BatchNorm1d(24)

    ended, callback = [], StabilizerCallback(tmp_path / "run")
    for chosen in ([], [callback]):
        averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
        saving = ModelCheckpoint(tmp_path / f"saved-{len(chosen)}", save_last=True)
        module = Module(Normed())
        train(tmp_path, averaging, saving, *chosen, module=module, epochs=3, enable_checkpointing=True)
        ended.append(module.state_dict())
    assert same(*ended)
    assert guard_of(callback).counts.items() >= {"steps": 120, "skipped": 0, "alarms": 0}.items()
    assert "no parameter of the optimizer has a gradient" not in caplog.text
    saved = torch.load(tmp_path / "saved-1" / "last.ckpt", weights_only=False)["callbacks"]
    assert len(saved["StabilizerCallback"]["guards"]) == 1
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["verdict"] == "healthy"


def test_a_healthy_run_ends_with_one_line_that_says_so_and_where_to_look(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("surefoot"), "propagate", False)  # as in a script without logging
    train(tmp_path, StabilizerCallback(tmp_path / "run"), epochs=2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("surefoot: ")]
    folder = tmp_path / "run"
    assert re.fullmatch(
        rf"surefoot: (healthy|unknown) · \d+ steps · {folder} · details: surefoot report {folder}", line
    )


def test_a_training_step_that_returns_none_leaves_the_step_out_without_an_alarm(tmp_path):
    class Choosing(Module):
        def training_step(self, batch, index):
            return None if index % 5 == 3 else super().training_step(batch, index)

    ended, callback = [], StabilizerCallback(tmp_path / "run")
    for chosen in ([], [callback]):
        module = Choosing()
        train(tmp_path, *chosen, module=module)
        ended.append(module.state_dict())
    assert same(*ended)
    assert guard_of(callback).counts.items() >= {"steps": 40, "skipped": 0, "alarms": 0}.items()


def test_the_callback_of_the_other_framework_is_refused_by_one_line(tmp_path):
    from surefoot.trainers import transformers as other
    from trainers import transformers_classes

    with pytest.raises(sf.UsageError, match=r"use `sf\.trainers\.lightning\.StabilizerCallback`"):
        train(tmp_path, other.StabilizerCallback(tmp_path / "run"))
    with pytest.raises(sf.UsageError, match=r"use `sf\.trainers\.transformers\.StabilizerCallback`"):
        transformers_classes.train(tmp_path, StabilizerCallback(tmp_path / "run"))


@pytest.mark.parametrize("faults", [None, {8 * 11 + 3: float("nan")}], ids=["healthy", "nan"])
def test_attach_guards_a_loop_of_fabric(tmp_path, faults):
    """As on the page: `clip=` has the bits of torch's clipping, and a NaN batch is left out."""

    def run(guarded: bool) -> tuple[Any, Any]:
        torch.manual_seed(1)
        fabric, model = L.Fabric(accelerator="cpu", devices=1), Classifier()
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LR))
        clip, log = sf.ClipByNorm(1.0), tmp_path / "run"
        guard = sf.attach(wrapped, optimizer, log=log, clip=clip) if guarded else None
        for batch in fabric.setup_dataloaders(DataLoader(Rows(320, faults), batch_size=8)):
            optimizer.zero_grad()
            loss = wrapped(**batch)["loss"]
            fabric.backward(loss)
            if guard is not None:
                guard.observe(loss=loss)
                optimizer.step()
            elif torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
        if guard is not None:
            guard.detach()
        return model.state_dict(), guard

    bare, _ = run(False)
    guarded, guard = run(True)
    assert same(bare, guarded)
    assert guard.counts.items() >= {"steps": 40, "skipped": 0 if faults is None else 1}.items()


def test_a_loss_that_no_parameter_can_be_reached_from_still_raises_an_alarm(tmp_path, caplog):
    """A loss was passed, so that the step was meant."""

    class Detached(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            return loss if index < 3 else loss.detach().requires_grad_()

    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, module=Detached())
    assert "no parameter of the optimizer has a gradient" in caplog.text
