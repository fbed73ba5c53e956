"""`StabilizerCallback` in the real `transformers.Trainer`: faults, accumulation, clipping, checkpoints, loggers."""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
import surefoot as sf
from surefoot.errors import UsageError
from surefoot.guard.step_hooks import hooks_of
from trainers import killed, on_ranks
from trainers.small_training import LR, Classifier, Linear, Overflowing, Rows, same, use_fp16_on_cpu

pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn about is theirs
IMPORTED = ("transformers.trainer", "surefoot.trainers.transformers")
"""What the programs of this file find imported."""


@pytest.fixture(scope="module", autouse=True)
def _framework() -> None:
    """The framework is imported when the first test of this file runs: every worker collects every file."""
    global transformers, Trainer, TrainerCallback, TrainingArguments
    global StabilizerCallback, policy_signals, Copies, InOrder, train
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        from transformers import Trainer, TrainerCallback, TrainingArguments

        from surefoot.trainers.transformers import StabilizerCallback, policy_signals
        from trainers.transformers_classes import Copies, InOrder, train
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def guard_of(callback: StabilizerCallback) -> Any:
    return callback.training.attachments[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 4, "max_steps": 20},
        {"max_grad_norm": 0.05},
        {"max_grad_norm": 0.05, "gradient_accumulation_steps": 3, "optim": "adamw_torch", "max_steps": 20},
        {"max_grad_norm": 0.0, "optim": "sgd"},
        {"bf16": True, "gradient_accumulation_steps": 4, "max_steps": 12},
    ],
    ids=["default", "accumulated", "clipped", "clipped-accumulated", "unclipped-sgd", "bf16"],
)
def test_a_healthy_run_is_bitwise_the_bare_run(tmp_path, settings, nothing_compiled):
    bare, guarded = Copies(), Copies()
    train(tmp_path / "bare", bare, **settings)
    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path / "guarded", guarded, callback, **settings)
    assert len(bare.states) == len(guarded.states) == settings.get("max_steps", 40)
    assert same(bare.states, guarded.states)
    assert bare.rates == guarded.rates
    counts = guard_of(callback).counts
    assert counts["skipped"] == counts["alarms"] == 0
    assert counts["clipped"] == {None: counts["clipped"], 0.0: 0, 0.05: counts["steps"]}[settings.get("max_grad_norm")]
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["problems"] == {}
    assert len(facts["sampled_steps"]) >= 4  # so many are observed in depth, however slow the machine is


class Sentences(Rows):
    """Sequences in which each token follows from the one before it, some of them with padding that is trained on."""

    def __init__(self, count: int, padded: bool = False) -> None:
        super().__init__(count)
        self._padded = padded
        self._order = torch.randperm(count, generator=torch.Generator().manual_seed(6)).tolist()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = self._order[index]
        tokens = 1 + (first + 3 * torch.arange(10)) % 16
        if self._padded:
            tokens[3 + first % 5 :] = 0
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=17, n_positions=10, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)  # adds `smart_apply` to the class of all modules


def test_a_model_of_the_library_is_observed_in_depth_and_bitwise_the_bare_one(tmp_path, nothing_compiled):
    ends = []
    for callbacks in ([], [StabilizerCallback(tmp_path / "run")]):
        model = gpt2()
        train(tmp_path, *callbacks, model=model, rows=Sentences(320))
        ends.append(dict(model.state_dict()))
    assert same(ends[:1], ends[1:])
    assert len(json.loads((tmp_path / "run" / "facts.json").read_text())["sampled_steps"]) >= 4
    found = json.loads((tmp_path / "run" / "findings.json").read_text())
    assert (found["verdict"], [each for each in found["findings"] if each["severity"] != "info"]) == ("healthy", [])


def test_padding_that_a_language_model_of_the_library_counts_is_named_with_its_fix(tmp_path, nothing_compiled):
    train(tmp_path, StabilizerCallback(tmp_path / "run"), model=gpt2(), rows=Sentences(320, padded=True))
    first = json.loads((tmp_path / "run" / "findings.json").read_text())["findings"][0]
    assert first["cause"] == "loss.padding-counted"
    assert "`labels[attention_mask == 0] = -100`" in first["fixes"][0]


class Softmax(Classifier):
    """A fault that the loss and the gradients do not show."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        probabilities = self.head(self.body(x)).softmax(-1)
        return {"loss": torch.nn.functional.cross_entropy(probabilities, labels), "logits": probabilities}


def test_the_diagnosis_at_the_end_says_what_only_sampled_steps_show(tmp_path, nothing_compiled):
    train(tmp_path, StabilizerCallback(tmp_path / "run"), model=Softmax(), max_grad_norm=0.5)
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert (facts["trainer"], facts["clips"][0]["limit"]) == ("transformers", 0.5)
    assert set(facts["optimizers"][0]["series"]["clip_limit"]) == {0.5}
    found = json.loads((tmp_path / "run" / "findings.json").read_text())
    assert found["findings"][0]["cause"] == "loss.softmax-before-cross-entropy"
    assert Path(__file__).name in found["findings"][0]["where"][0]
    train(tmp_path, StabilizerCallback(tmp_path / "off", probes=False), model=Softmax())
    assert not (tmp_path / "off" / "facts.json").exists()
    found = json.loads((tmp_path / "off" / "findings.json").read_text())
    assert [each["cause"] for each in found["findings"] if each["severity"] != "info"] == []


def test_the_probes_read_the_numbers_of_the_guard_and_measure_nothing_again(tmp_path, nothing_compiled):
    attached = set()
    note = lambda record: attached.add(len(hooks_of(guard_of(callback).optimizer)))  # noqa: E731
    callback = StabilizerCallback(tmp_path / "run", on_step=note)
    train(tmp_path, callback, max_grad_norm=0.05)
    assert attached == {1}
    series = json.loads((tmp_path / "run" / "facts.json").read_text())["optimizers"][0]["series"]
    assert series["grad_norm"] == pytest.approx([0.05] * 40, rel=1e-3)  # as applied
    assert min(series["clip_norm"]) > 0.05


def test_an_optimizer_of_another_model_is_observed_and_named(tmp_path, nothing_compiled):
    other = torch.optim.AdamW(Classifier().parameters(), lr=LR)
    callback = StabilizerCallback(tmp_path / "run", clip=sf.ClipByNorm(1.0))  # there is nothing to clip
    train(tmp_path, callback, optimizer=other, max_grad_norm=0.0)
    found = json.loads((tmp_path / "run" / "findings.json").read_text())
    assert found["findings"][0]["cause"] == "optim.parameters-missing"
    assert found["findings"][0]["fixes"][0].startswith("Give the Trainer all parameters in `optimizers=`")


class Adapted(torch.nn.Module):
    """A layer with a small trained one beside it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.down, self.up = base, torch.nn.Linear(12, 4), torch.nn.Linear(4, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen_body(adapters: bool) -> Classifier:
    """A new model whose body is frozen, with or without trained parameters among the frozen ones."""
    model = Classifier()
    model.body.requires_grad_(False)
    if adapters:
        model.body[0] = Adapted(model.body[0])
    return model


@pytest.mark.parametrize(("adapters", "causes"), [(False, ["optim.frozen-parameters"]), (True, [])])
def test_a_new_body_that_is_frozen_is_named_although_the_trainer_leaves_it_out(
    tmp_path, adapters, causes, nothing_compiled
):
    train(
        tmp_path, StabilizerCallback(tmp_path / "run"), model=frozen_body(adapters), learning_rate=1e-2, max_steps=120
    )
    found = json.loads((tmp_path / "run" / "findings.json").read_text())["findings"]
    assert [each["cause"] for each in found if each["severity"] == "error"] == causes
    if causes:
        assert "78% of the weights of `model`" in found[0]["summary"]
        assert found[0]["fixes"][0].startswith("Set requires_grad=True on them, or load the weights")


def test_the_loss_is_that_of_the_whole_step(tmp_path):
    callback = StabilizerCallback(tmp_path / "run")
    trainer = train(tmp_path, callback, gradient_accumulation_steps=4, max_steps=10, logging_steps=1)
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert [record.signals.loss for record in guard_of(callback).history] == pytest.approx(logged, rel=1e-5)
    assert 0.5 < logged[0] < 3  # and not a quarter of it


def test_a_nan_batch_is_left_out_bitwise_and_the_counters_go_on(tmp_path):
    copies, callback = Copies(), StabilizerCallback(tmp_path / "run")
    trainer = train(tmp_path, copies, callback, faults={8 * 21 + 3: float("nan")})
    assert [i for i, record in enumerate(guard_of(callback).history) if record.skipped] == [21]
    assert guard_of(callback).history[21].reasons == ("nonfinite",)
    assert same(copies.states[20], copies.states[21])
    assert not same(copies.states[21], copies.states[22])
    assert trainer.state.global_step == 40
    assert copies.rates == sorted(copies.rates, reverse=True)
    assert len(set(copies.rates)) == 40  # the schedule follows the data
    finite = [torch.isfinite(parameter).all() for parameter in trainer.model.parameters()]
    assert all(finite)


def test_a_nan_is_found_where_it_is_and_not_spread_by_the_clip(tmp_path):
    model, backwards = Classifier(), []

    def break_the_sixth(gradient: torch.Tensor) -> torch.Tensor:
        backwards.append(1)
        return gradient * float("nan") if len(backwards) == 6 else gradient

    model.head.bias.register_hook(break_the_sixth)
    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, model=model, max_steps=8, max_grad_norm=1.0)
    record = guard_of(callback).history[5]
    assert record.skipped
    layers = record.signals.layers
    assert [name for name, count in zip(layers.names, layers.nonfinite, strict=True) if count] == ["head.bias"]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_an_exploding_gradient_is_refused_before_the_clip_hides_it(tmp_path, max_grad_norm):
    copies, callback = Copies(), StabilizerCallback(tmp_path / "run")
    faults = dict.fromkeys(range(8 * 30, 8 * 31), 1e6)
    train(tmp_path, copies, callback, model=Linear(), faults=faults, max_grad_norm=max_grad_norm)
    history = guard_of(callback).history
    assert [i for i, record in enumerate(history) if record.skipped] == [30]
    assert history[30].reasons == ("explosion",)
    assert history[30].signals.grad_norm > 1e3
    assert same(copies.states[29], copies.states[30])


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_an_fp16_overflow_stays_the_scalers_decision_and_is_counted(tmp_path, monkeypatch, optim, max_grad_norm):
    create, runs = transformers.Trainer.create_accelerator_and_postprocess, []

    def with_scaler(trainer: Any) -> None:
        create(trainer)
        use_fp16_on_cpu(trainer.accelerator)

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", with_scaler)
    settings = {"optim": optim, "max_grad_norm": max_grad_norm, "gradient_accumulation_steps": 4, "max_steps": 10}
    for callbacks in ([], [callback := StabilizerCallback(tmp_path / "run")]):
        trainer = train(tmp_path, copies := Copies(), *callbacks, model=Overflowing(), **settings)
        runs.append((copies.states, copies.rates, trainer.accelerator.scaler.get_scale()))
    assert same(*runs)
    counts = guard_of(callback).counts
    assert counts["steps"] == trainer.state.global_step == 10
    assert counts["overflows"] == counts["skipped"] == 20 - math.log2(runs[1][2]) >= 2


def test_the_norm_that_is_logged_is_the_one_before_the_clip(tmp_path):
    callback = StabilizerCallback(tmp_path / "run")
    trainer = train(tmp_path, callback, max_grad_norm=0.05, max_steps=5, logging_steps=1)
    logged = [each for each in trainer.state.log_history if "grad_norm" in each]
    norms = [record.signals.grad_norm for record in guard_of(callback).history]
    assert norms == pytest.approx([each["grad_norm"] for each in logged], rel=1e-5)
    assert min(norms) > 0.05
    assert [each["surefoot/clipped"] for each in logged] == [1, 2, 3, 4, 5]
    assert logged[0]["surefoot/grad_norm"] == pytest.approx(norms[0], rel=1e-5)


def test_two_clippers_are_one_clear_error(tmp_path):
    callback = StabilizerCallback(tmp_path / "run", clip=sf.ClipByNorm(1.0))
    with pytest.raises(UsageError, match=r"clip the gradients twice.*max_grad_norm=0"):
        train(tmp_path, callback)
    callback = StabilizerCallback(tmp_path / "other", clip=sf.ClipByNorm(0.05))
    train(tmp_path, callback, max_grad_norm=0.0, max_steps=5)
    assert guard_of(callback).counts["clipped"] == 5


def test_after_a_rate_that_was_100_times_too_high_the_weights_return_to_earlier_ones(tmp_path):
    class WrongRate(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if 80 <= state.global_step < 95:
                for group in kwargs["optimizer"].param_groups:
                    group["lr"] = 100 * LR

    callback = StabilizerCallback(tmp_path / "run")
    losses = {}
    for name, chosen in (("bare", []), ("guarded", [callback])):
        trainer = train(tmp_path, WrongRate(), *chosen, max_steps=200, lr_scheduler_type="constant", logging_steps=20)
        losses[name] = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert [incident.action for incident in guard_of(callback).incidents].count("roll_back") == 1
    assert losses["guarded"][:4] == losses["bare"][:4]
    assert losses["guarded"][-1] < 0.6 * losses["bare"][-1]
    assert trainer.state.global_step == 200


def test_a_resumed_run_is_the_uninterrupted_one_with_the_rules_that_it_had(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 7, "gradient_accumulation_steps": 2, "max_steps": 30}
    faults = {16 * 12: float("nan"), 16 * 17: float("nan")}
    whole, callback = Copies(), StabilizerCallback(tmp_path / "whole-run")
    train(tmp_path / "whole", whole, callback, faults=faults, **settings)
    later, resumed = Copies(), StabilizerCallback(tmp_path / "resumed-run")
    train(
        tmp_path / "whole", later, resumed, faults=faults, resume=str(tmp_path / "whole" / "checkpoint-14"), **settings
    )
    assert same(whole.states[14:], later.states)
    assert guard_of(resumed).counts == guard_of(callback).counts
    assert guard_of(resumed).steps == 30


def test_a_run_that_is_killed_8_times_ends_as_if_it_never_had_been(tmp_path):
    found = killed.report("transformers", tmp_path, kills=8, imported=IMPORTED)
    assert found == {"kills": 8, "steps": killed.STEPS, "skipped": 2, "equal": True, "logged": True}


def test_a_checkpoint_holds_our_state_before_any_callback_hears_of_it(tmp_path):
    class Ends(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    settings = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Ends(), StabilizerCallback(), **settings)
    callback = StabilizerCallback()
    train(tmp_path, callback, resume=str(tmp_path / "checkpoint-5"), **settings)
    assert guard_of(callback).steps == 10


def test_two_ranks_leave_a_step_out_together_and_resume_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).parents[1]), forked.SOURCE])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path}
    environments = [forked.environment(RANK=rank, LOCAL_RANK=rank, **shared) for rank in ("0", "1")]
    ranks = [forked.start([on_ranks.__file__, tmp_path], env=each, imported=IMPORTED) for each in environments]
    ended = [rank.end() for rank in ranks]
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    first, second = (json.loads(each.stdout.splitlines()[-1]) for each in ended)
    assert first == second
    assert first.items() >= {"steps": on_ranks.STEPS, "skipped": [9], "resumed_equal": True}.items()
    left = on_ranks.STEPS - 12  # one rank misses its state, and has no memory for copies: so it is on both
    assert first.items() >= {"steps_anew": left, "warned_anew": 2}.items()
    for name in ("run", "watched"):  # each rank has a log of its own, whether it acts or not
        assert [len(sf.load_run(tmp_path / name / rank).scalars) for rank in ("rank0", "rank1")] == [16, 16]


def test_a_checkpoint_without_our_state_is_resumed_with_fresh_rules(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    train(tmp_path / "bare", **settings)
    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path / "bare", callback, resume=str(tmp_path / "bare" / "checkpoint-5"), **settings)
    assert guard_of(callback).steps == 5
    assert "no readable state of the guard" in caplog.text


def test_the_run_folder_has_log_and_diagnosis_and_the_trainer_is_as_it_was(tmp_path):
    callback = StabilizerCallback(tmp_path / "run")
    trainer = train(tmp_path, callback, faults={8 * 21: float("nan")})
    tables = sf.load_run(tmp_path / "run")
    assert len(tables.scalars) == 40
    assert [event.event for event in tables.events if event.step == 21] == ["skip"]
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["steps"] == 40
    assert not {"backward", "clip_grad_norm_", "clip_grad_value_"} & set(vars(trainer.accelerator))
    assert "log" not in vars(trainer)
    assert not guard_of(callback).attached
    trainer.args.max_steps = 45
    trainer.train()  # the same callback again
    assert callback.training.attachments[0].steps == 40 + 45  # it goes on in the log of the first


def test_after_an_error_the_next_training_is_guarded_again(tmp_path):
    class Failing(Classifier):
        fails = True

        def forward(self, x: Any, labels: Any) -> Any:
            if self.fails:
                raise ValueError("no")
            return super().forward(x, labels)

    model, callback = Failing(), StabilizerCallback(tmp_path / "run")
    with pytest.raises(ValueError, match="no"):
        train(tmp_path, callback, model=model, max_steps=3)
    model.fails = False
    train(tmp_path, callback, model=model, max_steps=3)
    assert guard_of(callback).counts["steps"] == 3


def test_watching_changes_nothing(tmp_path):
    bare, watched = Copies(), Copies()
    faults = {8 * 12: float("nan")}
    train(tmp_path / "bare", bare, faults=faults, max_steps=14)
    callback = StabilizerCallback(mode="watch")
    train(tmp_path / "watched", watched, callback, faults=faults, max_steps=14)
    assert same(bare.states[:12], watched.states[:12])
    assert guard_of(callback).history[12].reasons == ("nonfinite",)
    assert not guard_of(callback).history[12].skipped


def test_what_trl_logs_about_a_policy_is_watched():
    logs = {"objective/kl": 0.1, "entropy": 2.0, "clip_ratio/high_mean": 0.2, "loss": 1.0, "eval_reward": 3.0}
    logs |= {"rewards/margins": 1.0, "policy/approxkl_avg": 0.3, "surefoot/kl": 1.0}
    assert policy_signals(logs) == {
        "objective_kl": 0.1,
        "entropy": 2.0,
        "clip_ratio_high_mean": 0.2,
        "policy_approxkl_avg": 0.3,
    }


def test_a_training_that_raises_is_detached_and_its_optimizer_can_be_trained_again(tmp_path):
    class Failing(Classifier):
        calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().forward(x, labels)

    model = Failing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    callbacks = [StabilizerCallback(tmp_path / name) for name in ("first", "second")]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, callbacks[0], model=model, optimizer=optimizer)
    assert not guard_of(callbacks[0]).attached
    assert len(sf.load_run(tmp_path / "first").scalars) == 3
    trainer = train(tmp_path, callbacks[1], model=model, optimizer=optimizer, max_steps=5)
    assert guard_of(callbacks[1]).steps == 5
    assert not {"log", "_run_epoch"} & set(vars(trainer))
    pickle.dumps(callbacks[1])


@pytest.mark.parametrize("event", ["on_epoch_begin", "on_step_end", "on_evaluate"])
def test_a_callback_of_the_user_that_raises_ends_the_guard(tmp_path, event):
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    model, callback = Classifier(), StabilizerCallback(tmp_path / "run")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    failing = type("Failing", (TrainerCallback,), {event: fail})()
    with pytest.raises(ValueError, match="no"):
        train(tmp_path, callback, failing, model=model, optimizer=optimizer, eval_strategy="steps", eval_steps=3)
    assert not guard_of(callback).attached
    again = StabilizerCallback()
    trainer = train(tmp_path, again, model=model, optimizer=optimizer, max_steps=2)
    assert guard_of(again).steps == 2
    assert "call_event" not in vars(trainer.callback_handler)


def test_the_last_checkpoint_is_found_and_its_state_continued(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 5, "faults": {8 * 3: float("nan")}}
    train(tmp_path, StabilizerCallback(), max_steps=10, **settings)
    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, resume=True, max_steps=14, **settings)
    assert guard_of(callback).counts.items() >= {"steps": 14, "skipped": 1}.items()
    assert "start without history" not in caplog.text


def test_evaluation_the_best_model_and_a_short_last_window_stay_bitwise(tmp_path):
    settings = {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2, "logging_steps": 1}
    settings |= {"eval_strategy": "steps", "eval_steps": 7, "save_strategy": "steps", "save_steps": 7}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    bare, guarded, callback = Copies(), Copies(), StabilizerCallback(tmp_path / "run")
    models = []
    for copies, chosen in ((bare, []), (guarded, [callback])):
        trainer = train(tmp_path / str(len(chosen)), copies, *chosen, **settings)
        models.append(trainer.model.state_dict())
    assert same(bare.states, guarded.states)
    assert same(*models)
    assert len(bare.states) == guard_of(callback).steps == 28
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert [record.signals.loss for record in guard_of(callback).history] == pytest.approx(logged, rel=1e-4)


def test_a_callback_that_raises_when_training_begins_leaves_no_guard(tmp_path):
    class Failing(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            raise ValueError("no")

    model, callback = Classifier(), StabilizerCallback(tmp_path / "run")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match="no"):
        train(tmp_path, callback, Failing(), model=model, optimizer=optimizer)
    assert callback.training is None
    assert optimizer._optimizer_step_pre_hooks == {}
    train(tmp_path, callback, model=model, optimizer=optimizer, max_steps=2)
    assert guard_of(callback).steps == 2


def test_a_second_training_continues_in_the_log_of_the_first(tmp_path):
    callback = StabilizerCallback(tmp_path / "run")
    trainer = train(tmp_path, callback, max_steps=5)
    trainer.train()
    assert sf.load_run(tmp_path / "run").scalars["step"].to_pylist() == list(range(10))
    assert not any(type(each).__name__ == "_AfterOthers" for each in trainer.callback_handler.callbacks)


def test_a_guard_that_cannot_begin_is_taken_off_again(tmp_path, monkeypatch):
    model, callback = Classifier(), StabilizerCallback()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    monkeypatch.setattr(StabilizerCallback, "_add_to_logs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, callback, model=model, optimizer=optimizer)
    assert not guard_of(callback).attached


def test_several_callbacks_in_one_trainer_are_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match=r"several `StabilizerCallback`s: remove all but one"):
        train(tmp_path, StabilizerCallback(tmp_path / "one"), StabilizerCallback(tmp_path / "two"))
    twice = StabilizerCallback(tmp_path / "run")
    train(tmp_path, twice, twice, max_steps=5)
    assert guard_of(twice).counts["steps"] == 5


def test_a_callback_that_guards_another_trainer_is_one_clear_error_while_that_one_trains(tmp_path):
    shared = StabilizerCallback(tmp_path / "run")

    class TrainsAnother(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            train(tmp_path / "other", shared, max_steps=2)

    with pytest.raises(UsageError, match=r"training has not ended.*a callback of its own"):
        train(tmp_path, shared, TrainsAnother())
    assert not guard_of(shared).attached
    train(tmp_path, shared, max_steps=5)  # and it can be used again
    assert guard_of(shared).counts["steps"] == 5


def test_a_callback_of_two_trainings_says_that_the_rows_of_the_first_are_replaced(tmp_path, caplog):
    callback = StabilizerCallback(tmp_path / "run")
    trainer = train(tmp_path, callback, max_steps=6)
    trainer.train()  # the same model: it continues
    assert "another training" not in caplog.text
    train(tmp_path, callback, max_steps=4)
    assert caplog.text.count("another training of 12 steps, whose rows in") == 1
    assert len(sf.load_run(tmp_path / "run").scalars) == 4


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path, caplog):
    (tmp_path / "file").touch()
    trainer = train(tmp_path, callback := StabilizerCallback(tmp_path / "file" / "run"), max_steps=5)
    assert trainer.state.global_step == guard_of(callback).counts["steps"] == 5
    said = [record.getMessage() for record in caplog.records if record.name.startswith("surefoot")]
    assert len([line for line in said if "cannot be written" in line]) == len(said) == 1


def test_evaluation_and_prediction_alone_write_no_run_folder(tmp_path):
    trainer = InOrder(Classifier(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True))
    trainer.add_callback(StabilizerCallback(tmp_path / "run"))
    trainer.predict(Rows(16))
    trainer.evaluate(Rows(16))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("changed", "own", "warnings"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_a_changed_rate_that_the_trainer_does_not_use_on_resume_is_one_warning(
    tmp_path, caplog, changed, own, warnings
):
    rates = []
    for steps, rate in ((5, LR), (10, LR / 3 if changed else LR)):
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR) if own else None
        settings = {"save_strategy": "steps", "save_steps": 5, "learning_rate": rate, "lr_scheduler_type": "constant"}
        resume = str(tmp_path / "checkpoint-5") if steps == 10 else None
        copies, callback = Copies(), StabilizerCallback(tmp_path / "run")
        train(tmp_path, copies, callback, model=model, optimizer=optimizer, resume=resume, max_steps=steps, **settings)
        rates += copies.rates
    assert set(rates) == {LR}
    assert caplog.text.count("has no effect: the resumed schedule is that of the checkpoint") == warnings


def test_a_training_step_whose_loss_is_not_seen_is_guarded_with_one_warning(tmp_path, caplog):
    class Own(InOrder):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()
            return loss.detach()

    callback = StabilizerCallback(tmp_path / "run")
    train(tmp_path, callback, trainer_class=Own, faults={8 * 11 + 3: math.nan})
    assert caplog.text.count("call `self.accelerator.backward(loss)` instead of `loss.backward()`") == 1
    assert guard_of(callback).counts["skipped"] == 1
