"""P7, P8 and P10 to P13: what `surefoot run` adds to a script, and what importing surefoot and `--help` cost.

    python benchmarks/run_overhead.py [--repeat 5] [--only mlp|transformer|accumulating|start]
    python benchmarks/run_overhead.py --cuda [--repeat 3] [--guard] [--turns]
                                      [--only eager|compiled|graphs|captured|accumulating|hf]

P7 runs each script under `python` and under `surefoot run` in turns and compares medians, so that what else the machine
does falls on both alike. The ratio of processor time is printed beside it: on a busy machine it is the steadier figure.
Python keeps what it has compiled, as it does for users, in a folder for the length of the benchmark.

`--cuda` runs the scripts of `benchmarks/scripts` on a GPU, in turns as well. They measure themselves (`step_times`): a
steady step (median over blocks of ten steps from step 40 on), the first twenty steps, the time from the first step to
the end, peak memory, and how often the host waited for the device in the last hundred steps. With `--turns`, a further
run under `surefoot run` switches the watching off and on: the ratio of neighbouring turns in one process does not
depend on how fast the machine happens to be.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).parents[1] / "src")
HERE = Path(__file__).parent
PATHS = os.pathsep.join([SOURCE, str(HERE), str(HERE / "scripts")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "FIGURES": os.devnull}

SCRIPTS = HERE / "scripts"
ON_CUDA = {
    "eager": ("gpt_124m", [], 1.02),
    "compiled": ("gpt_124m", ["compiled"], 1.03),
    "graphs": ("gpt_124m", ["graphs"], 1.03),
    "captured": ("captured", [], 1.01),
    "accumulating": ("accumulating", [], 1.02),
    "hf": ("hf_trainer", [], 1.05),
}
"""For each line of `--cuda`: the script, its arguments, and the target of a steady step."""
KEYS = ("steady_ms", "mean_ms", "whole_s", "first_ms", "peak_gib", "waits")

MLP = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x[:, :5].sum(1) > x[:, 5:10].sum(1)).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()
for step in range(11_000):
    i = torch.randint(0, len(x), (64,))
    loss = loss_fn(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 1000 == 0:
        print(step, loss.item())
"""

TRANSFORMER = """
import inspect
import torch
from torch import nn

torch.manual_seed(0)
text = inspect.getsource(inspect)
kinds = sorted(set(text))
data = torch.tensor([kinds.index(c) for c in text])
CONTEXT = 64


class Model(nn.Module):
    def __init__(self, kinds, width=128, depth=4):
        super().__init__()
        self.token, self.place = nn.Embedding(kinds, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, kinds)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.body(x, mask=mask, is_causal=True))


model = Model(len(kinds))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(420):
    at = torch.randint(len(data) - CONTEXT - 1, (16,))
    batch = torch.stack([data[i : i + CONTEXT + 1] for i in at])
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, len(kinds)), batch[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0:
        print(step, loss.item())
"""


def seconds(command: list[str], folder: str) -> tuple[float, float]:
    """Wall time and processor time of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def keep_compiled(folder: str) -> None:
    """Have Python compile torch and surefoot once, whatever the environment says, and not at every start."""
    ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
    ENVIRONMENT["PYTHONPYCACHEPREFIX"] = folder
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "script.py").write_text(MLP.replace("11_000", "20"))
        for command in (["script.py"], ["-m", "surefoot", "run", "--out", "run", "script.py"]):
            seconds([sys.executable, *command], place)


def p7(name: str, text: str, target: float, repeat: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(text)
        plain, watched = [], []
        for _ in range(repeat):
            plain.append(seconds([sys.executable, "script.py"], folder))
            watched.append(seconds([sys.executable, "-m", "surefoot", "run", "--out", "run", "script.py"], folder))
    (wall, wall_watched), (work, work_watched) = (
        [statistics.median(run[kind] for run in runs) for runs in (plain, watched)] for kind in (0, 1)
    )
    pairs = [b[0] / a[0] for a, b in zip(plain, watched, strict=True)]
    print(
        f"P7 {name}: {wall_watched / wall:.3f} (target <= {target}); python {wall:.2f} s, surefoot run "
        f"{wall_watched:.2f} s, {repeat} interleaved pairs, ratios {min(pairs):.3f} to {max(pairs):.3f}; "
        f"processor time {work_watched / work:.3f} ({work:.2f} s, {work_watched:.2f} s)",
        flush=True,
    )


def figures_of(script: str, arguments: list[str], run: list[str], turns: bool = False) -> dict[str, Any]:
    """What a script of `benchmarks/scripts` measured of itself; `run` are the words before it."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "figures.json"
        environment = {**ENVIRONMENT, "FIGURES": str(written), **({"TURNS": "1"} if turns else {})}
        command = [sys.executable, *run, str(SCRIPTS / f"{script}.py"), *arguments]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        figures: dict[str, Any] = json.loads(written.read_text())
        return figures


def on_cpu(only: str | None, repeat: int) -> None:
    """P7 and P8."""
    if only in (None, "start"):
        p8(repeat)
    if only in (None, "mlp"):
        p7("tiny MLP", MLP, 1.20, repeat)
    if only in (None, "transformer"):
        p7("small transformer", TRANSFORMER, 1.05, repeat)
    if only in (None, "accumulating"):
        p7("accumulating GPT", (SCRIPTS / "accumulating.py").read_text(), 1.05, repeat)


def on_cuda(only: str | None, repeat: int, guard: bool, turns: bool) -> None:
    """P10 to P13: each script under `python` and under `surefoot run`, in turns."""
    import torch

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    watched = ["-m", "surefoot", "run", "--out", "run", *(["--guard"] if guard else [])]
    for name, (script, arguments, target) in ON_CUDA.items():
        if only not in (None, name):
            continue
        runs: dict[str, list[dict[str, Any]]] = {"bare": [], "run": []}
        for _ in range(repeat):
            runs["bare"].append(figures_of(script, arguments, []))
            runs["run"].append(figures_of(script, arguments, watched))
        middle = {
            kind: {key: statistics.median(each[key] for each in found) for key in KEYS} for kind, found in runs.items()
        }
        bare, run = middle["bare"], middle["run"]
        print(f"{name}: surefoot run{' --guard' if guard else ''} / python, {repeat} turns each")
        print(f"  steady step   {run['steady_ms'] / bare['steady_ms']:.3f} (target <= {target}): "
              f"{bare['steady_ms']:.2f} and {run['steady_ms']:.2f} ms")  # fmt: skip
        print(f"  all after 40  {run['mean_ms'] / bare['mean_ms']:.3f}: looks included")
        print(
            f"  whole         {run['whole_s'] / bare['whole_s']:.3f}: {bare['whole_s']:.2f} and {run['whole_s']:.2f} s"
        )
        print(f"  first 20      {run['first_ms'] / bare['first_ms']:.2f}: "
              f"{bare['first_ms']:.1f} and {run['first_ms']:.1f} ms per step")  # fmt: skip
        print(f"  peak memory   {100 * (run['peak_gib'] / bare['peak_gib'] - 1):+.2f} %")
        print(f"  waits of the host in the last 100 steps: {bare['waits']:.0f} and {run['waits']:.0f}", flush=True)
        for place in runs["run"][-1]["waits_at"]:
            print(f"    {place}", flush=True)
        if turns:
            ratios = [figures_of(script, arguments, watched, turns=True)["turns"] for _ in range(repeat)]
            print(f"  in turns      {', '.join(f'{ratio:.3f}' for ratio in ratios)}: looks included", flush=True)


def p8(repeat: int) -> None:
    timed = "import time; import torch; b = time.perf_counter(); import surefoot; print(time.perf_counter() - b)"
    found = [
        float(subprocess.run([sys.executable, "-c", timed], env=ENVIRONMENT, capture_output=True, text=True).stdout)
        for _ in range(repeat)
    ]
    print(f"P8 import surefoot beyond import torch: {1000 * statistics.median(found):.1f} ms (target <= 50 ms)")
    helped = [seconds([sys.executable, "-m", "surefoot", "--help"], ".")[0] for _ in range(repeat)]
    print(f"P8 surefoot --help: {statistics.median(helped):.3f} s (target <= 0.3 s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=["mlp", "transformer", "start", *ON_CUDA])
    parser.add_argument("--cuda", action="store_true", help="the scripts for a GPU")
    parser.add_argument("--guard", action="store_true", help="with `--cuda`: `surefoot run --guard`")
    parser.add_argument("--turns", action="store_true", help="with `--cuda`: also in turns within one process")
    asked = parser.parse_args()
    if asked.cuda:
        on_cuda(asked.only, asked.repeat, asked.guard, asked.turns)
        return
    with tempfile.TemporaryDirectory() as compiled:
        keep_compiled(compiled)
        on_cpu(asked.only, asked.repeat)


if __name__ == "__main__":
    main()
