"""Supervised fine-tuning with TRL, guarded by one line. A learning rate that is far too high is set for a few steps.

    python examples/trainer_trl.py

Needs `pip install -e ".[trl]"`. Runs offline on a CPU: the model and its tokenizer are made here.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import surefoot as sf

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]


class WrongRate(TrainerCallback):
    """A bug in a schedule: a hundred times the learning rate for 15 steps."""

    def on_step_begin(self, args, state, control, **kwargs):
        if 80 <= state.global_step < 95:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = 100 * args.learning_rate


def main() -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    text = [" ".join(f"w{(i + j) % 30}" for j in range(12)) for i in range(120)]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_positions=32, n_embd=32, n_layer=2, n_head=2))
    arguments = SFTConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=180, learning_rate=3e-3, logging_steps=20,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    run = tempfile.mkdtemp()
    callback = sf.trainers.transformers.StabilizerCallback(run)
    SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": text}),
        processing_class=tokenizer,
        callbacks=[callback, WrongRate()],
    ).train()
    guard = callback.training.attachments[0]
    for incident in guard.incidents:
        print(f"step {incident.step}: {incident.summary}")
    print(f"loss {guard.history[-1].signals.loss:.2f} after {guard.counts['steps']} steps; see: surefoot report {run}")


if __name__ == "__main__":
    main()
