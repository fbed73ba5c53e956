"""What the guarded step costs, beside what people do by hand, in one run.

On a CUDA device: the whole step of a 124M GPT (eager and compiled, microbatch 8 and 32), the optimizer side alone for
1.3B parameters (with a limit that is never exceeded and one that always is), and the host syncs of 100 guarded steps.
Without one: the whole step of a small transformer on the CPU. Variants take turns within each round and the median over
rounds is printed, so that the ratios hold on a noisy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpt import GPT, GPT_1_3B, GPT_124M, TINY, Shape, parameter_list
from torch import nn
from torch.nn.utils import clip_grad_norm_

import surefoot as sf

if TYPE_CHECKING:
    from collections.abc import Callable

FAR = 1e6
"""A clip limit that is never reached, so that every variant does the same arithmetic."""
NEAR = 1e-3
"""A clip limit that every step exceeds."""


def median_ms(variants: dict[str, Callable[[], None]], rounds: int, steps: int, cuda: bool) -> dict[str, float]:
    """Median milliseconds per call, the variants taking turns."""
    seen: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in variants.items():
            run()
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                run()
            if cuda:
                torch.cuda.synchronize()
            seen[name].append((time.perf_counter() - start) / steps * 1e3)
    return {name: statistics.median(times) for name, times in seen.items()}


def by_hand(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], zero_grad: bool
) -> dict[str, Callable[[], None]]:
    """The optimizer side as people write it."""

    def finish() -> None:
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad(set_to_none=True)

    def clip() -> None:
        clip_grad_norm_(parameters, FAR)
        finish()

    def clip_isfinite() -> None:
        if torch.isfinite(clip_grad_norm_(parameters, FAR)):
            optimizer.step()
        if zero_grad:
            optimizer.zero_grad(set_to_none=True)

    def item_monitor() -> None:
        for parameter in parameters:
            parameter.grad.norm().item()
        clip()

    return {"bare": finish, "clip_grad_norm_": clip, "+ isfinite": clip_isfinite, ".item() monitor": item_monitor}


def guarded(model: Any, optimizer: Any, zero_grad: bool) -> dict[str, sf.TrainingStabilizer]:
    everything = sf.LayerMetrics(parameters=True, updates=True)
    return {
        "surefoot": sf.TrainingStabilizer(model, optimizer, zero_grad=zero_grad),
        "surefoot + clip": sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(FAR), zero_grad=zero_grad),
        "surefoot, all watched": sf.TrainingStabilizer(model, optimizer, watch=everything, zero_grad=zero_grad),
    }


def whole_step(
    shape: Shape, batch: int, device: str, compiled: bool, rounds: int, steps: int
) -> tuple[dict[str, float], float]:
    """Milliseconds of a whole training step per variant, and peak memory beyond the bare run in percent."""
    torch.manual_seed(0)
    cuda = device == "cuda"
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    parameters = list(model.parameters())
    ids = torch.randint(shape.vocabulary, (batch, shape.context), device=device)
    forward = torch.compile(model) if compiled else model
    autocast = torch.autocast(device, dtype=torch.bfloat16) if cuda else contextlib.nullcontext()

    def loss() -> torch.Tensor:
        with autocast:
            return forward(ids, ids)

    variants: dict[str, Callable[[], None]] = {}
    for name, finish in by_hand(optimizer, parameters, zero_grad=True).items():
        variants[name] = lambda finish=finish: (loss().backward(), finish())
    for name, stabilizer in guarded(model, optimizer, zero_grad=True).items():
        variants[name] = lambda s=stabilizer: (s.backward(loss()), s.step())
    times = median_ms(variants, rounds, steps, cuda)
    extra = 0.0
    if cuda:
        peaks = []
        for name in ("bare", "surefoot"):
            torch.cuda.reset_peak_memory_stats()
            variants[name]()
            peaks.append(torch.cuda.max_memory_allocated())
        extra = (peaks[1] / peaks[0] - 1) * 100
    return times, extra


def optimizer_side(shape: Shape, dtype: torch.dtype, rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds of the optimizer side alone, and the floor: one read of the gradients."""
    parameters = parameter_list(shape, dtype, "cuda")
    model = nn.ParameterList(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-9, fused=True)
    count = sum(parameter.numel() for parameter in parameters)
    flat = torch.randn(count, dtype=dtype, device="cuda")
    variants: dict[str, Callable[[], None]] = {"floor: one read": lambda: _read(flat)}
    variants |= by_hand(optimizer, parameters, zero_grad=False)
    variants |= {name: lambda s=s: s.step() for name, s in guarded(model, optimizer, zero_grad=False).items()}
    variants |= always_clipped(model, optimizer, parameters)
    return median_ms(variants, rounds, steps, cuda=True)


def always_clipped(
    model: Any, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> dict[str, Callable[[], None]]:
    """Steps that are clipped each time. Clipping changes the gradients, so both variants put them back first."""
    gradients = [parameter.grad for parameter in parameters]
    saved = [gradient.clone() for gradient in gradients]
    stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(NEAR), zero_grad=False)

    def restored(step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            torch._foreach_copy_(gradients, saved)
            step()

        return run

    return {"bare, restored": restored(optimizer.step), "surefoot, always clips": restored(stabilizer.step)}


def _read(flat: torch.Tensor) -> None:
    torch.amax(flat)


def host_syncs(steps: int = 100) -> int:
    """Host syncs in guarded steps of a small model, as torch's own debug mode counts them."""
    import warnings

    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(1.0))
    x = torch.randn(64, 256, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            stabilizer.backward((model(x) - x).square().mean())
            stabilizer.step()
        torch.cuda.set_sync_debug_mode("default")
    syncs = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    for warning in syncs:
        print(f"  sync at {warning.filename}:{warning.lineno}")
    return len(syncs)


def show(title: str, times: dict[str, float], base: str = "bare") -> None:
    print(f"\n{title}")
    for name, value in times.items():
        print(f"  {name:24s} {value:9.3f} ms   {value / times[base]:6.3f} x {base}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("optimizer", "whole", "syncs"), help="P1; P2, P3 and P10; P4")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    results: dict[str, Any] = {"torch": torch.__version__}
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads")
        times, _ = whole_step(TINY, 16, "cpu", False, options.rounds, 4)
        show("whole step, 4-layer transformer of width 128, batch 16, fp32", times)
        print("\nP1 to P4 need a CUDA device.")
        return
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    parts = [options.only] if options.only else ["optimizer", "whole", "syncs"]
    for dtype in (torch.float32, torch.bfloat16) if "optimizer" in parts else ():
        for label, shape in (("124M", GPT_124M), ("1.3B", GPT_1_3B)):
            times = optimizer_side(shape, dtype, options.rounds, 10)
            results[f"optimizer {label} {dtype}"] = times
            show(f"optimizer side, {label}, {dtype}", times)
            floor = times["floor: one read"]
            for name, base, target in (
                ("surefoot", "bare", 1.2),
                ("surefoot + clip", "bare", 1.3),
                ("surefoot, always clips", "bare, restored", 2.65),
            ):
                said = f"(target {target} at 1.3B fp32)"
                print(f"  P1 ({name} - {base}) / floor = {(times[name] - times[base]) / floor:.2f} {said}")
    torch.cuda.empty_cache()
    for batch, steps in ((8, 10), (32, 4)) if "whole" in parts else ():
        for compiled in (False, True):
            times, extra = whole_step(GPT_124M, batch, "cuda", compiled, options.rounds, steps)
            results[f"whole {batch} {'compiled' if compiled else 'eager'}"] = times | {"memory beyond bare, %": extra}
            show(f"whole step, 124M, bf16 autocast, microbatch {batch}, {'compiled' if compiled else 'eager'}", times)
            print(f"  P2 surefoot / bare = {times['surefoot'] / times['bare']:.4f}")
            print(f"  P2 surefoot / clip_grad_norm_ = {times['surefoot'] / times['clip_grad_norm_']:.4f}")
            print(f"  P2 surefoot + clip / clip_grad_norm_ = {times['surefoot + clip'] / times['clip_grad_norm_']:.4f}")
            print(f"  P3 all watched / bare = {times['surefoot, all watched'] / times['bare']:.4f}")
            print(f"  P10 peak memory beyond bare = {extra:.3f} %")
            torch.cuda.empty_cache()
    if "syncs" in parts:
        results["P4"] = host_syncs()
        print(f"\nP4 host syncs in 100 guarded steps = {results['P4']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
