"""Runs of different kinds, and the data that `surefoot report` puts into the page of each.

The runs are written through the real run log (`tests/report_runs.py`) or by a stabilizer that trains, and the data is
taken out of the written page: what the browser is given.
"""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import report_runs
import surefoot
from goldens.golden import as_json, shortened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WARNING = {
    "cause": "data.unshuffled",
    "severity": "warning",
    "confidence": 0.6,
    "step": None,
    "where": ["train.py:12"],
    "evidence": {"runs": 31},
    "summary": "The rows of the data set come in the order of their classes.",
    "fixes": ["Shuffle: `DataLoader(..., shuffle=True)`."],
}
EXPERIMENTS = [
    {"name": "baseline", "title": "baseline", "verdict": "fails", "why": "not finite", "steps": 3, "final_loss": 1e30}
    | {"loss": [[0, 2.0], [1, 9.0], [2, 1e30], [3, "nan"]]},
    {"name": "clip", "title": "clip 1.0", "verdict": "does not", "steps": 50, "final_loss": 2.9, "loss": [[0, 2.0]]},
    {"name": "lr-10", "title": "LR / 10", "verdict": "cures", "steps": 50, "loss": [[0, 2.0], [50, 0.1]]},
    {"name": "fp32", "title": "fp32", "verdict": "does not apply", "why": "no autocast", "steps": 0, "loss": []},
]


def healthy(folder: Path) -> None:
    """The loss falls, the diagnosis found nothing."""
    report_runs.quiet(folder, steps=40)


def everything(folder: Path) -> None:
    """Two parts, clipping, skipped steps, a spike, NaN, histograms and a device; nobody diagnosed it."""
    report_runs.rough(folder)


def broken(folder: Path) -> None:
    """A finding that is an error, and one that is a warning."""
    report_runs.quiet(folder, steps=40)
    report_runs.write_findings(folder, report_runs.FINDING, WARNING, steps=40)


def unstable(folder: Path) -> None:
    """Warnings only."""
    report_runs.quiet(folder, steps=40)
    report_runs.write_findings(folder, WARNING, verdict="unstable", steps=40)


def killed(folder: Path) -> None:
    """A run that never ended, and was not diagnosed."""
    report_runs.quiet(folder, steps=40)
    report_runs.describe(folder, exit_code=None, seconds=None)
    for name in ("findings.json", "events.jsonl"):  # the only event is the one of the end
        (folder / name).unlink()


def crashed(folder: Path) -> None:
    """A script that raised, and could not be judged."""
    report_runs.quiet(folder, steps=3)
    report_runs.describe(folder, exit_code=1, error="RuntimeError")
    value = {
        "schema": 1,
        "verdict": "unknown",
        "steps": 3,
        "summary": "The script crashed after 3 steps.",
        "findings": [],
    }
    (folder / "findings.json").write_text(json.dumps(value), encoding="utf-8")


def several_ranks(folder: Path) -> None:
    """Three ranks with a folder each; the second is broken."""
    for rank in range(3):
        report_runs.quiet(folder / f"rank{rank}", steps=20)
    report_runs.write_findings(folder / "rank1", report_runs.FINDING, steps=20)


def bisected(folder: Path) -> None:
    """What `surefoot bisect` leaves."""
    report_runs.quiet(folder / "baseline", steps=20)
    value = {"schema": 1, "sentence": "LR / 10 cures it; clip 1.0 does not.", "runs": EXPERIMENTS}
    (folder / "bisect.json").write_text(json.dumps(value), encoding="utf-8")
    report_runs.write_findings(folder, report_runs.FINDING, steps=20)


def resumed(folder: Path) -> None:
    """A second session takes the place of the last steps of the first."""
    for session, first in enumerate((0, 15)):
        with surefoot.RunLog(folder, device_seconds=None) as log:
            for step in range(first, first + 20):
                row = surefoot_row(step, loss=float(100 * session + step))
                log.take(row)
            log.event("checkpoint", first + 18, "checkpoint written")
    report_runs.describe(folder)


def guarded(folder: Path) -> None:
    """A stabilizer that trains, clips, and skips the step of a batch with NaN; all its numbers are exact."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with surefoot.RunLog(folder, device_seconds=None) as log:
        stabilizer = surefoot.TrainingStabilizer(model, optimizer, clip=surefoot.ClipByNorm(1.0), log=log)
        for step in range(6):
            x = torch.tensor([[3.0, 4.0]]) if step != 3 else torch.tensor([[float("nan"), 4.0]])
            stabilizer.observe(kl=float(step))
            stabilizer.backward(model(x).sum())
            stabilizer.step()
    report_runs.describe(folder, script="loop.py")


def empty(folder: Path) -> None:
    """A log without a single step."""
    with surefoot.RunLog(folder, device_seconds=None) as log:
        log.event("start", 0, "training begins")
    report_runs.describe(folder, exit_code=0)


RUNS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        *(healthy, everything, broken, unstable, killed, crashed),
        *(several_ranks, bisected, resumed, guarded, empty),
    )
}


def surefoot_row(step: int, loss: float) -> Any:
    """One row of the log."""
    from surefoot.record.messages import StepRow

    return StepRow(step=step, time=report_runs.BEGAN + step, loss=loss, grad_norm=1.0, lr=0.5)


# ---- the page's data ----------------------------------------------------------------------------------------------


def report_data(name: str, scratch: Path) -> str:
    """The data in the page of one run, as text."""
    folder = scratch / name
    folder.mkdir()
    RUNS[name](folder)
    page = scratch / f"{name}.html"
    _surefoot("report", str(folder), "--out", str(page))
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    return as_json(shortened(_without_times(json.loads(data))))


def _surefoot(*words: str) -> None:
    from surefoot.__main__ import main

    argv, sys.argv = sys.argv, ["surefoot", *words]
    try:
        with redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"surefoot {' '.join(words)} ended with {end.code}") from None
    finally:
        sys.argv = argv


def _without_times(data: dict[str, Any]) -> dict[str, Any]:
    """When the page was made, and the clock of events and steps, which the run itself reads."""
    for event in data["events"]["list"]:
        event.pop("time", None)
    data["head"]["tiles"] = [tile for tile in data["head"]["tiles"] if tile["name"] != "steps per second"]
    return {**data, "made": "(time)"}
