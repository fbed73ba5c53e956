"""The trainer settings to change if the training loop is not the script's own.

The fixes of a cause are written for a loop that the user can change. For a run whose loop is a library's (`trainer` of
the facts), the equivalent setting comes first. Causes whose fix is in the script's own code (its model, its data) are
not listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.diagnose.rules.pace import rate_divisors

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun

_ARGUMENTS = "`TrainingArguments`"
_BF16 = f"Set `bf16=True` and `fp16=False` in {_ARGUMENTS}, and load the weights in float32."
_TRANSFORMERS = {
    "lr.no-warmup": f"Set `warmup_steps` in {_ARGUMENTS} to a few hundred, or a tenth of the steps of a short run.",
    "lr.schedule-broken": f"Check `lr_scheduler_type`, `warmup_steps` and `max_steps` of {_ARGUMENTS}.",
    "model.exploding-gradient": f"Set `max_grad_norm=1.0` in {_ARGUMENTS}.",
    "clip.saturated": f"Raise `max_grad_norm` of {_ARGUMENTS}, or lower `learning_rate`.",
    "data.unshuffled": "Shuffle the data set once, `dataset.shuffle(seed=0)`, before the Trainer is given it.",
    "loss.padding-counted": "Ignore the padding: `labels[attention_mask == 0] = -100` in the data collator.",
    "optim.weight-decay": f"Lower `weight_decay` of {_ARGUMENTS}.",
    "optim.epsilon": f"Set `adam_epsilon=1e-8` in {_ARGUMENTS}.",
    "optim.parameters-missing": "Give the Trainer all parameters in `optimizers=`, or leave `optimizers=` out.",
    "model.batchnorm-tiny-batch": f"Raise `per_device_train_batch_size` of {_ARGUMENTS}.",
    "precision.fp16-overflow": _BF16,
    "precision.fp16-underflow": _BF16,
    "precision.scaler-stuck": _BF16,
    "precision.low-precision-weights": f"Load the weights in float32, and set `bf16=True` in {_ARGUMENTS}.",
    "resume.state-missing": "Resume by `trainer.train(resume_from_checkpoint=True)`, which loads every state.",
    "resume.data-replayed": f"Leave `ignore_data_skip=False` in {_ARGUMENTS}.",
    "repro.unseeded": "Call `transformers.set_seed(0)` before the model is made.",
}
_PRECISION = 'Set `precision="bf16-mixed"` in the `Trainer`.'
_LIGHTNING = {
    "model.exploding-gradient": "Set `gradient_clip_val=1.0` in the `Trainer`.",
    "clip.saturated": "Raise `gradient_clip_val` of the `Trainer`, or lower the learning rate.",
    "accum.uneven-microbatches": "Set `drop_last=True` in the training `DataLoader`.",
    "precision.fp16-overflow": _PRECISION,
    "precision.fp16-underflow": _PRECISION,
    "precision.scaler-stuck": _PRECISION,
    "precision.low-precision-weights": _PRECISION,
    "resume.state-missing": "Resume by `trainer.fit(model, ckpt_path=PATH)`, which loads every state.",
    "repro.unseeded": "Call `lightning.seed_everything(0)` first.",
}
_MIXED = 'Make the `Accelerator` with `mixed_precision="bf16"`, and keep the weights in float32.'
_ACCELERATE = {
    "precision.fp16-overflow": _MIXED,
    "precision.fp16-underflow": _MIXED,
    "precision.scaler-stuck": _MIXED,
    "clip.before-unscale": "Clip by `accelerator.clip_grad_norm_`, which unscales first.",
}
_FIXES = {"transformers": _TRANSFORMERS, "lightning": _LIGHTNING, "accelerate": _ACCELERATE}


def trainer_fixes(run: RecordedRun, cause: str) -> tuple[str, ...]:
    """The trainer settings to change; empty if the script's own code must change."""
    trainer = run.facts.trainer
    if trainer is None:
        return ()
    if trainer == "transformers" and cause in ("lr.too-high", "lr.too-low") and run.lr:
        rate = max(run.lr)
        change, better = "Multiply the rate by 10 to 100", rate * 10
        if cause == "lr.too-high":
            least, most = rate_divisors(run)
            change, better = f"Divide the rate by {least:,} to {most:,}", rate / most
        words = f"{change}: `learning_rate={better:.1g}` in {_ARGUMENTS}; its highest value in this run was {rate:.3g}."
        return (words,)
    if cause == "model.exploding-gradient" and any(each is not None for each in run.series.clip_norm):
        return ()  # the trainer clips already: the default of `max_grad_norm` is 1.0
    fix = _FIXES.get(trainer, {}).get(cause)
    return () if fix is None else (fix,)
