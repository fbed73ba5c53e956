"""Memory beyond the bare run, at default settings (P10: at most 1 %).

Trains the same GPT bare, guarded, and guarded with a run log, each in a process of its own, and compares the most
memory each had: on a CUDA device what torch allocated (124M parameters, microbatch 8, bf16 autocast), and the
resident memory of the process everywhere. Without a CUDA device a smaller model runs on the CPU. The first steps are
part of it: with a log, those are the ones that are looked at closely.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile

import torch
from gpt import GPT, GPT_124M, Shape

import surefoot as sf

SMALL = Shape(6, 384, 6, vocabulary=8192, context=256)
VARIANTS = ("bare", "guarded", "guarded, with a log")


def train(variant: str, device: str, steps: int, batch: int) -> dict[str, float]:
    """The most memory that so many steps needed, in MiB."""
    torch.manual_seed(0)
    shape = GPT_124M if device == "cuda" else SMALL
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(shape.vocabulary, (batch, shape.context), device=device)
    autocast = torch.autocast(device, dtype=torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder:
        guard = None
        if variant != "bare":
            guard = sf.TrainingStabilizer(model, optimizer, log=folder if "log" in variant else None)
        for _ in range(steps):
            with autocast:
                loss = model(ids, ids)
            if guard is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            else:
                guard.backward(loss)
                guard.step()
        if guard is not None and guard.log is not None:
            guard.log.close()
    used = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if device == "cuda":
        used["device"] = torch.cuda.max_memory_allocated() / 2**20
    return used


def measure(variant: str, device: str, steps: int, batch: int) -> dict[str, float]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--variant", variant, "--device", device]
    command += ["--steps", str(steps), "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="the median is printed")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here, and print its numbers as JSON")
    chosen = parser.parse_args()
    if chosen.variant:
        print(json.dumps(train(chosen.variant, chosen.device, chosen.steps, chosen.batch)))
        return
    rounds = [
        {variant: measure(variant, chosen.device, chosen.steps, chosen.batch) for variant in VARIANTS}
        for _ in range(chosen.rounds)
    ]
    for where in rounds[0]["bare"]:
        print(f"most {where} memory of {chosen.steps} steps on {chosen.device}:")
        middle = {v: sorted(each[v][where] for each in rounds)[len(rounds) // 2] for v in VARIANTS}
        for variant, used in middle.items():
            print(f"  {variant:22}{used:12,.1f} MiB{(used / middle['bare'] - 1) * 100:+9.2f} %")


if __name__ == "__main__":
    main()
