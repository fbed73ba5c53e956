"""How long the report of a million-step, 300-layer run takes to build and to open, and how large it is.

The log is written through `RunLog`, as a run of that length leaves it: scalars at every step, layers at every tenth,
histograms now and then, a few thousand events. "Opened" is the time from the start of the navigation to the last chart
drawn, in headless Chromium with the network off; the best of three, as the first also loads the browser's own files.
Processor times are printed beside the elapsed ones, because other programs lengthen only the latter; for opening it is
that of the page's main thread. Then a page that compares this run with a copy of it, which may take twice as long.

    python benchmarks/report.py [--steps N] [--layers N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import surefoot
from surefoot.record.bins import COUNT
from surefoot.record.messages import DeviceRow, Histogram, LayerRows, StepRow
from surefoot.report.page.compare import write_comparison
from surefoot.report.page.html import write_report

if TYPE_CHECKING:
    from collections.abc import Callable

BUILD_SECONDS, OPEN_SECONDS = 2.0, 1.0
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def write_log(folder: Path, steps: int, layers: int) -> None:
    random = np.random.default_rng(0)
    names = [f"transformer.blocks.{place // 6}.{'qkvofg'[place % 6]}_projection.weight" for place in range(layers)]
    noise = random.normal(size=(4096, layers))
    level = np.exp(-np.arange(layers) / 60)
    counts = np.exp(-(((np.arange(COUNT) - COUNT // 2) / 6) ** 2)) * 1000
    began = 1_760_000_000.0
    with surefoot.RunLog(folder) as log:
        for step in range(steps):
            loss = 2 + 6 * math.exp(-step / (steps / 8)) + 0.2 * noise[step % 4096, step % layers]
            norm = math.exp(noise[step % 4096, (step * 7) % layers])
            if step % (steps // 50) == steps // 100:
                loss = math.nan if step % 2 else 1e6
                log.event("skip", step, f"Step {step} was left out.", severity="warning", cause="nonfinite")
            if step % 1_000 == 999:
                log.event("checkpoint", step, "A checkpoint was written.")
                log.take(DeviceRow(began + step * 0.1, "cuda:0", step, {"allocated": 3e10 + step, "temperature": 65.0}))
            clip = min(1.0, 2.0 / norm)
            log.take(StepRow(step, began + step * 0.1, "", loss, norm, clip, 3e-4 * (1 - step / steps), 65536.0))
            if step % 10 == 0:
                norms = level * np.exp(noise[step // 10 % 4096] + step / steps)
                log.take(LayerRows(step, names, {"grad_norm": norms, "update_ratio": norms * 1e-3}))
            if step % (steps // 50) == 0:
                for name in names:
                    log.take(Histogram(step, "weight", name, counts.astype(int).tolist()))
            if step % 500 == 0:
                log.flush(60)  # as fast as it can be written, not faster
        print(f"log: {steps:,} steps, {layers} layers, {log.dropped} messages dropped")


def opened(page: Path) -> list[tuple[float, float]]:
    """Seconds until everything was drawn, and of processor time on the page's main thread, in three fresh tabs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = play.chromium.launch(executable_path=path, args=FLAGS)
        found = []
        for _ in range(3):
            context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900})
            tab = context.new_page()
            session = context.new_cdp_session(tab)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            tab.goto(page.resolve().as_uri(), wait_until="commit")
            tab.wait_for_function("() => document.documentElement.dataset.drawn", timeout=60_000)
            # The next frame shows what was drawn; `performance.now()` counts from the start of the navigation.
            shown_ms = tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => done(performance.now())))")
            metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
            found.append((shown_ms / 1000, metrics["TaskDuration"]))
            context.close()
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="use this folder; written if it holds no log yet")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch) / "run"
        if not (folder / "telemetry").is_dir():
            began = time.perf_counter()
            write_log(folder, chosen.steps, chosen.layers)
            print(f"written in {time.perf_counter() - began:.0f} s")
        size = sum(file.stat().st_size for file in folder.rglob("*.arrows"))
        print(f"telemetry {size / 2**20:.0f} MiB")
        copy = Path(scratch) / "copy"
        shutil.copytree(folder, copy)
        kept = [measure("one run", lambda: write_report(folder), 1)]
        kept.append(measure("two runs compared", lambda: write_comparison([folder, copy]), 2))
        if not all(kept):
            raise SystemExit(1)


def measure(name: str, write: Callable[[], Path], allowed: int) -> bool:
    """Print how long the page takes to build and to open; whether it takes at most `allowed` times the limits."""
    builds, busy = [], []
    for _ in range(2):
        began, worked = time.perf_counter(), time.process_time()
        page = write()
        builds.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    times, worked = zip(*opened(page), strict=True)
    most_build, most_open = allowed * BUILD_SECONDS, allowed * OPEN_SECONDS
    print(f"{name}: page of {page.stat().st_size / 2**20:.2f} MiB")
    print(f"  built in {min(builds):.2f} s (at most {most_build:g}), of which {min(busy):.2f} s on the processor")
    print(
        f"  opened in {min(times):.2f} s (at most {most_open:g}), of which {min(worked):.2f} s on the processor;"
        f" all: {', '.join(f'{t:.2f}' for t in times)}"
    )
    return min(builds) <= most_build and min(times) <= most_open


if __name__ == "__main__":
    main()
