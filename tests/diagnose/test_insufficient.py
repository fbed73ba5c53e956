"""A run is called healthy only if it could be judged; any other run without a finding is `unknown`, with the reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.diagnose.engine import diagnose
from surefoot.report.page.source import read_source
from surefoot.report.page.summary import head
from watched import CLASSES, FIT, LOOP, NET, VALUES

if TYPE_CHECKING:
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"


def loop(steps: int = 60, last: str = "") -> str:
    return LOOP.replace("range(60)", f"range({steps})") + last


CASES = {
    "dies on an import": (
        ("import torch", "import nowhere_to_be_found"),
        "No training step was seen: the script ended with ModuleNotFoundError: No module named 'nowhere_to_be_found'.",
    ),
    "exits with a code": (
        ("import torch", "raise SystemExit(3)"),
        "No training step was seen: the script ended with exit code 3.",
    ),
    "never trains": ((START, NET, "print(model(x).mean())"), "No training step was seen."),
    "is interrupted": (
        (START, NET, loop(10, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")),
        "After 10 steps the script was interrupted; no fault was found until then.",
    ),
    "exits with a code after training": (
        (START, NET, loop(60, "raise SystemExit(3)\n")),
        "After 60 steps the script ended with exit code 3; no fault was found until then.",
    ),
    "crashes after training": (
        (START, NET, loop(60, "raise ValueError('no such \\033[1mmetric\\033[0m' + ', but others' * 12)\n")),
        f"After 60 steps the script ended with ValueError: no such metric{', but others' * 8}, but ...; no fault was "
        "found until then.",
    ),
    "takes three steps": (
        (START, NET, loop(3)),
        "Too short to judge: only 3 losses were seen, and a curve needs 5.",
    ),
    "never calls backward": (
        (
            START,
            NET,
            LOOP.replace(
                "    loss.backward()\n",
                "    for p, g in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())): p.grad = g\n",
            ),
        ),
        "No loss was seen in 60 steps: nothing that was trained on went through `backward`.",
    ),
    "trains inside a mode": (
        (START, "torch.device('cpu').__enter__()", NET, loop()),
        "No fault was found in 60 steps, but the script trains inside a torch mode, so what happens between data and "
        "loss was not observed.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_was_not_judged_is_unknown_and_says_why(watch: Nursery, name: str) -> None:
    parts, reason = CASES[name]
    run = watch(*parts)
    assert (run.diagnosis.verdict, run.diagnosis.summary) == ("unknown", reason)
    written = json.loads((run.folder / "run" / "findings.json").read_text())
    assert (written["verdict"], written["summary"]) == ("unknown", reason)
    assert f"surefoot: unknown · {run.diagnosis.steps} steps" in run.errors


def test_a_run_that_was_judged_is_healthy(watch: Nursery) -> None:
    diagnosis = watch(START, NET, loop()).diagnosis
    assert diagnosis.verdict == "healthy"
    assert re.fullmatch(r"No fault was found in 60 steps, in which the loss went from \S+ to \S+\.", diagnosis.summary)
    assert watch(START, NET, loop(5)).diagnosis.verdict == "healthy"


def test_a_compiled_run_is_judged_by_what_is_seen_and_says_what_is_not(watch: Nursery) -> None:
    diagnosis = watch(START, NET, "model = torch.compile(model, backend='eager')", loop()).diagnosis
    limit = "The model is compiled: the operations inside it were not watched."
    assert diagnosis.verdict == "healthy"
    assert diagnosis.summary.startswith("No fault was found in 60 steps, in which the loss went from ")
    assert diagnosis.summary.endswith(limit)


def test_a_crash_or_an_interrupt_costs_no_finding(watch: Nursery) -> None:
    broken = NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.Softmax(-1)")
    diagnosis = watch(START, broken, loop(60, "raise KeyboardInterrupt\n")).diagnosis
    assert diagnosis.verdict == "broken"
    assert diagnosis.summary == diagnosis.findings[0].summary


def test_a_run_that_was_killed_or_only_partly_watched_is_unknown(watch: Nursery) -> None:
    facts, description = watch(START, NET, loop()).loaded
    killed = diagnose(facts, replace(description, exit_code=None))
    assert killed.verdict == "unknown"
    assert "had not ended" in killed.summary
    partly = diagnose(replace(facts, problems={"gradients": "TypeError: odd"}), description)
    assert partly.verdict == "unknown"
    assert "stopped watching gradients (TypeError: odd)" in partly.summary
    assert diagnose(replace(facts, problems={"run log": "OSError: full"}), description).verdict == "healthy"


def test_every_reader_shows_the_reason(watch: Nursery) -> None:
    run = watch(*CASES["takes three steps"][0])
    folder, reason = run.folder / "run", CASES["takes three steps"][1]
    shown = CliRunner().invoke(app, ["diagnose", str(folder)]).stdout
    assert "unknown · 3 steps" in shown
    assert reason in " ".join(shown.split())
    content = json.loads(CliRunner().invoke(app, ["diagnose", str(folder), "--json"]).stdout)
    assert (content["verdict"], content["summary"], content["findings"]) == ("unknown", reason, content["findings"])
    page = head(read_source(folder))
    assert (page["verdict"], page["headline"]) == ("unknown", "the run could not be judged")
    assert page["lead"].startswith(reason)
    live = CliRunner().invoke(app, ["watch", "--once", str(folder)]).stdout
    assert "finished: unknown" in live
    assert reason in live


@pytest.mark.parametrize(("sign", "is_doubted"), [("", True), ("-", False)])
def test_a_log_probability_times_a_number_that_makes_good_actions_unlikely_is_no_healthy_run(
    watch: Nursery, sign: str, is_doubted: bool
) -> None:
    run = watch(
        VALUES,
        FIT.replace("nn.Linear(32, 1)", "nn.Linear(32, 2)").replace("1e-2", "1e-3"),
        "for step in range(60):\n"
        "    optimizer.zero_grad()\n"
        "    for row in torch.randint(256, (4,)).tolist():\n"
        "        chances = torch.softmax(model(x[row]), 0)\n"
        "        action = int(torch.multinomial(chances.detach(), 1))\n"
        "        gain = 1.0 + abs(float(y[row])) * action\n"
        f"        ({sign}torch.log(chances[action]) * gain).backward()\n"
        "    optimizer.step()\n",
    )
    assert ("are costs" in run.diagnosis.summary) == is_doubted
