"""Ten faults in scripts that train with `transformers.Trainer` and Lightning: which cause does `surefoot run` name?

    python benchmarks/trainer_faults.py [--inside] [--framework transformers|lightning] [--only FAULT ...]

Each script trains a classifier of handwritten digits, or a small language model, on a CPU with one fault, as a user
would write it, and is watched by `surefoot run`; with `--inside`, by the callback of the framework, and the diagnosis
is the one at the end of the training. For each it prints the verdict and the findings above `info`, best first. The
scripts without a fault must be healthy.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A fault, and the causes that name it."""

    name: str
    causes: tuple[str, ...]
    task: str = "digits"


FAULTS = (
    Fault("none", ()),
    Fault("none-text", (), "text"),
    Fault("lr", ("lr.too-high",)),
    Fault("nan-row", ("data.nonfinite-input",)),
    Fault("labels", ("data.labels-uninformative",)),
    Fault("eval-mode", ("model.eval-mode-training",)),
    Fault("frozen", ("optim.frozen-parameters",)),
    Fault("softmax", ("loss.softmax-before-cross-entropy",)),
    Fault("fp16", ("precision.fp16-overflow", "precision.low-precision-weights")),
    Fault("pad", ("loss.padding-counted",), "text"),
    Fault("unshuffled", ("data.unshuffled",)),
    Fault("mask", ("mask.leaks-future",), "text"),
)

COMMON = '''
import sys
import torch
from torch import nn
from torch.nn import functional as F

FAULT = sys.argv[1]
torch.manual_seed(0)


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, 10)
        if FAULT == "frozen":
            for parameter in self.body.parameters():
                parameter.requires_grad_(False)

    def forward(self, x):
        if FAULT == "fp16":
            x = x.half().float() if self.head.weight.dtype == torch.float32 else x.half()
        logits = self.head(self.body(x))
        return logits.softmax(-1) if FAULT == "softmax" else logits


def digits():
    from sklearn.datasets import load_digits

    found = load_digits()
    x, labels = torch.tensor(found.data, dtype=torch.float32) / 8 - 1, torch.tensor(found.target)
    order = labels.argsort(stable=True) if FAULT == "unshuffled" else torch.randperm(len(x))
    x, labels = x[order][:1600], labels[order][:1600]
    if FAULT == "labels":
        labels = labels[torch.randperm(len(labels))]
    if FAULT == "nan-row":
        x[777, 5] = float("nan")
    return x, labels


class Text(nn.Module):
    """Predicts the next of 20 words; word 0 is padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(21, 32), nn.Embedding(24, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 21)

    def forward(self, words):
        mask = None if FAULT == "mask" else nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        x = self.embed(words) + self.place(torch.arange(words.shape[1]))
        return self.head(self.body(x, mask=mask))


def text():
    """Sentences in which each word depends on the one before; most are short and padded."""
    follows = torch.rand(21, 21).pow(4)
    follows[:, 0] = 0
    words = torch.zeros(1200, 24, dtype=torch.long)
    words[:, 0] = torch.randint(1, 21, (1200,))
    for place in range(1, 24):
        words[:, place] = torch.multinomial(follows[words[:, place - 1]], 1).squeeze(1)
    lengths = torch.randint(6, 12, (1200, 1)) if FAULT == "pad" else torch.randint(16, 25, (1200, 1))
    words[torch.arange(24) >= lengths] = 0
    return words[:, :-1], words[:, 1:]


def loss_of(logits, targets):
    if logits.dim() == 3:
        ignore = -100 if FAULT == "pad" else 0
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=ignore)
    return F.cross_entropy(logits.float(), targets)


def callbacks():
    if len(sys.argv) < 4:
        return []
    import surefoot

    return [getattr(surefoot.trainers, sys.argv[2]).StabilizerCallback(sys.argv[3])]


TASK = "text" if FAULT in ("none-text", "pad", "mask") else "digits"
LR = 3e-3 * (100 if FAULT == "lr" else 1)
inputs, targets = text() if TASK == "text" else digits()
network = Text() if TASK == "text" else Digits()
'''

SCRIPTS = {
    "transformers": COMMON
    + """
import tempfile
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network

    def forward(self, x, labels):
        if FAULT == "eval-mode":
            self.network.eval()
        logits = self.network(x)
        return {"loss": loss_of(logits, labels), "logits": logits}


arguments = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=2, learning_rate=LR, report_to=[],
    use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=50, lr_scheduler_type="constant",
    train_sampling_strategy="sequential" if FAULT == "unshuffled" else "random",
)
model = Model()
if FAULT == "fp16":
    model = model.half()
rows = [{"x": x, "labels": y} for x, y in zip(inputs, targets)]
Trainer(model, arguments, train_dataset=rows, callbacks=callbacks()).train()
""",
    "lightning": COMMON
    + """
import tempfile
import lightning as L
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network

    def training_step(self, batch, index):
        if FAULT == "eval-mode":
            self.network.eval()
        return loss_of(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR)


L.seed_everything(0)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=FAULT != "unshuffled")
precision = {"precision": "16-true"} if FAULT == "fp16" else {}
L.Trainer(
    default_root_dir=tempfile.mkdtemp(), accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=2,
    enable_model_summary=False, enable_checkpointing=False, callbacks=callbacks(), **precision,
).fit(Module(), loader)
""",
}


def watched(framework: str, fault: Fault, folder: Path) -> dict[str, object]:
    """What `surefoot run` says about one script, as `surefoot diagnose --json` prints it."""
    script = folder / f"train_{framework}.py"
    script.write_text(SCRIPTS[framework])
    out = folder / f"{framework}-{fault.name}"
    command = [sys.executable, "-m", "surefoot", "run", "--out", str(out), str(script), fault.name]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if not (out / "findings.json").exists():
        raise RuntimeError(f"{framework}, {fault.name}: no diagnosis\n{ended.stderr[-3000:]}")
    return json.loads((out / "findings.json").read_text())


def from_inside(framework: str, fault: Fault, folder: Path) -> dict[str, object]:
    """What the callback says about one script at the end of the training.

    The script runs in a process that has already imported its framework: importing takes longer than training.
    """
    script = folder / f"train_{framework}.py"
    script.write_text(SCRIPTS[framework])
    out = folder / f"{framework}-{fault.name}-inside"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    _import_all()
    child = os.fork()
    if child == 0:
        try:
            output = os.open(folder / f"{out.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = [str(script), fault.name, framework, str(out)]
            runpy.run_path(str(script), run_name="__main__")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
    if not (out / "findings.json").exists():
        raise RuntimeError(f"{framework}, {fault.name}: no diagnosis\n{Path(f'{out}.txt').read_text()[-3000:]}")
    return json.loads((out / "findings.json").read_text())


def _import_all() -> None:
    import lightning  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch
    from transformers import Trainer  # noqa: F401

    import surefoot

    torch.set_num_threads(1)  # threads do not survive a fork
    for name in SCRIPTS:
        getattr(surefoot.trainers, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=list(SCRIPTS), action="append")
    parser.add_argument("--only", nargs="*", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--inside", action="store_true", help="let the callback of the framework watch")
    parser.add_argument("--keep", type=Path, help="a folder for scripts and run folders")
    chosen = parser.parse_args()
    folder = chosen.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{'framework':14}{'fault':12}{'first':7}{'verdict':10}findings above info, best first")
    for framework in chosen.framework or SCRIPTS:
        right = total = 0
        for fault in FAULTS:
            if chosen.only and fault.name not in chosen.only:
                continue
            found = (from_inside if chosen.inside else watched)(framework, fault, folder)
            named = [each["cause"] for each in found["findings"] if each["severity"] != "info"]
            is_right = named[:1] == [] and found["verdict"] == "healthy" if not fault.causes else False
            is_right = is_right or bool(named and named[0] in fault.causes)
            right, total = right + (is_right and bool(fault.causes)), total + bool(fault.causes)
            words = ", ".join(named) or "none"
            print(
                f"{framework:14}{fault.name:12}{'yes' if is_right else 'NO':7}{found['verdict']:10}{words}", flush=True
            )
        print(f"{framework}: {right} of {total} faults named first", flush=True)


if __name__ == "__main__":
    main()
