"""The callback for `transformers.Trainer` in the trainers of TRL: bitwise while healthy, their own numbers watched."""

from __future__ import annotations

import json
import math
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import surefoot as sf
from trainers import killed
from trainers.small_training import same, use_fp16_on_cpu
from trainers.words import WORDS, tokenizer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn about is theirs


@pytest.fixture(scope="module", autouse=True)
def _framework() -> None:
    """The framework is imported when the first test of this file runs: every worker collects every file."""
    global \
        transformers, \
        Copies, \
        Dataset, \
        GPT2Config, \
        GPT2LMHeadModel, \
        DPOConfig, \
        DPOTrainer, \
        GRPOConfig, \
        GRPOTrainer, \
        KTOConfig, \
        KTOTrainer, \
        SFTConfig, \
        SFTTrainer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trl")
        import transformers
        from datasets import Dataset, disable_progress_bars
        from transformers import GPT2Config, GPT2LMHeadModel
        from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

        from trainers.transformers_classes import Copies
    disable_progress_bars()
    transformers.logging.set_verbosity_error()


SETTINGS = {
    "per_device_train_batch_size": 4,
    "max_steps": 8,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "learning_rate": 1e-3,
    "bf16": False,
    "gradient_checkpointing": False,
}


def model() -> Any:
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_positions=64, n_embd=16, n_layer=1, n_head=2, **ids))


def sft(folder: Path, callbacks: list[Any], **more: Any) -> Any:
    rows = Dataset.from_list([{"text": " ".join(f"w{(i + j) % 30}" for j in range(12))} for i in range(48)])
    arguments = SFTConfig(str(folder), gradient_accumulation_steps=4, max_length=32, **(SETTINGS | more))
    return SFTTrainer(model(), arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks)


def sft_bf16(folder: Path, callbacks: list[Any]) -> Any:
    return sft(folder, callbacks, bf16=True)


def with_reference(trainer: Any, config: Any, rows: list[dict[str, Any]], folder: Path, callbacks: list[Any]) -> Any:
    """A trainer that compares the model with a reference, which starts equal."""
    return trainer(
        model(),
        model(),
        args=config(str(folder), **SETTINGS),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def dpo(folder: Path, callbacks: list[Any]) -> Any:
    rows = [{"prompt": f"w{i % 30} w1", "chosen": " w2 w3", "rejected": " w4 w5"} for i in range(48)]
    return with_reference(DPOTrainer, DPOConfig, rows, folder, callbacks)


def kto(folder: Path, callbacks: list[Any]) -> Any:
    rows = [
        {"prompt": f"w{i % 30} w1", "completion": " w2 w3" if i % 2 else " w4 w5", "label": bool(i % 2)}
        for i in range(48)
    ]
    return with_reference(KTOTrainer, KTOConfig, rows, folder, callbacks)


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each.split()))) for each in completions]


def one_reward(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def grpo(folder: Path, callbacks: list[Any], reward: Any = distinct_words, **more: Any) -> Any:
    rows = Dataset.from_list([{"prompt": f"w{i % 30} w1"} for i in range(48)])
    arguments = GRPOConfig(str(folder), num_generations=4, max_completion_length=8, **(SETTINGS | more))
    return GRPOTrainer(
        model(),
        args=arguments,
        reward_funcs=reward,
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("build", [sft, sft_bf16, dpo, kto, grpo])
def test_a_healthy_run_is_bitwise_the_bare_run(build, tmp_path):
    ended, callback = [], sf.trainers.transformers.StabilizerCallback(tmp_path / "run")
    for chosen in ([], [callback]):
        trainer = build(tmp_path, chosen)
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        torch.manual_seed(1)
        trainer.train()
        ended.append(trainer.model.state_dict())
    assert same(*ended)
    guard = callback.training.attachments[0]
    assert guard.counts["steps"] == 8
    assert guard.counts["skipped"] == guard.counts["alarms"] == 0
    logged = [each for each in trainer.state.log_history if "loss" in each]
    assert [record.signals.loss for record in guard.history] == pytest.approx(
        [each["loss"] for each in logged], abs=1e-5
    )
    verdicts = [each["cause"] for each in findings(tmp_path / "run") if each["severity"] != "info"]
    assert not [cause for cause in verdicts if cause.startswith("rl.")]
    if build is grpo:
        watched = guard.history[-1].signals.extra
        assert watched["reward"] == pytest.approx(logged[-2]["reward"])
        assert watched["entropy"] == pytest.approx(logged[-2]["entropy"])


def findings(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "findings.json").read_text())["findings"]


@pytest.mark.parametrize("probes", [True, False], ids=["observed", "log-only"])
def test_rewards_that_are_all_equal_are_named_as_the_cause(tmp_path, probes):
    callback = sf.trainers.transformers.StabilizerCallback(tmp_path / "run", probes=probes)
    trainer = grpo(tmp_path, [callback], one_reward, max_steps=12)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    first = findings(tmp_path / "run")[0]
    assert (first["cause"], first["severity"]) == ("rl.zero-advantage", "error")
    if not probes:
        assert first["evidence"]["steps_without"] == 11  # what the last step logged belongs to the next one


def test_a_broken_microbatch_is_left_out_bitwise(tmp_path):
    broken_at = {30: (float("nan"), "nonfinite"), 33: (1e6, "explosion")}
    copies, callback = Copies(), sf.trainers.transformers.StabilizerCallback(tmp_path / "run")
    trainer = sft(tmp_path, [callback, copies], max_steps=40)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    compute_loss, calls = trainer.compute_loss, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        step, microbatch = divmod(len(calls), 4)
        calls.append(1)
        return compute_loss(*args, **kwargs) * (broken_at[step][0] if step in broken_at and microbatch == 1 else 1.0)

    trainer.compute_loss = broken
    trainer.train()
    guard = callback.training.attachments[0]
    assert [i for i, record in enumerate(guard.history) if record.skipped] == [*broken_at]
    for step, (_, reason) in broken_at.items():
        assert guard.history[step].reasons == (reason,)
        assert same(copies.states[step - 1], copies.states[step])
        assert not same(copies.states[step], copies.states[step + 1])
    assert trainer.state.global_step == 40


@pytest.mark.parametrize("optim", ["adamw_torch_fused"])  # `test_transformers.py` has the others
def test_an_fp16_overflow_stays_the_scalers_decision_and_is_counted(tmp_path, monkeypatch, optim):
    create, runs = transformers.Trainer.create_accelerator_and_postprocess, []

    def with_scaler(trainer: Any) -> None:
        create(trainer)
        use_fp16_on_cpu(trainer.accelerator)

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", with_scaler)
    for callbacks in ([], [callback := sf.trainers.transformers.StabilizerCallback(tmp_path / "run")]):
        trainer = sft(tmp_path, [*callbacks, copies := Copies()], optim=optim)
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        own = trainer.compute_loss
        trainer.compute_loss = lambda *args, own=own, **kwargs: 100 * own(*args, **kwargs)
        trainer.train()
        runs.append((copies.states, copies.rates, trainer.accelerator.scaler.get_scale()))
    assert same(*runs)
    counts = callback.training.attachments[0].counts
    assert counts["steps"] == trainer.state.global_step == 8
    assert counts["overflows"] == counts["skipped"] == 20 - math.log2(runs[1][2]) >= 2


def test_a_run_that_is_killed_8_times_ends_as_if_it_never_had_been(tmp_path):
    found = killed.report("trl", tmp_path, kills=8)
    assert found == {"kills": 8, "steps": killed.STEPS, "skipped": 2, "equal": True, "logged": True}
