"""Transformers' Trainer with a GPT-2 of 6 layers of width 384, batch 16, for 300 steps."""

import os
import tempfile

import torch
from step_times import StepTimes
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

STEPS = 300
os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Clock(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.times = StepTimes(STEPS, waits=False)

    def on_step_end(self, args, state, control, **kwargs):
        self.times.step()

    def on_train_end(self, args, state, control, **kwargs):
        self.times.write()


torch.manual_seed(0)
ids = torch.cumsum(torch.randint(0, 3, (2048, 128)), 1) % 1000
data = [{"input_ids": row, "labels": row} for row in ids]
model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=128, n_embd=384, n_layer=6, n_head=6))
options = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=STEPS,
    per_device_train_batch_size=16,
    logging_steps=50,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    bf16=torch.cuda.is_available(),
)
Trainer(model=model, args=options, train_dataset=data, callbacks=[Clock()]).train()
