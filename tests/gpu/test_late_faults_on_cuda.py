"""A step that goes wrong after step 1,000, beyond every early window: skipped under `--guard`, reported, and kept.

All runs are made at once, each in a process of its own, before the first test: see `together`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from together import DEVICE, ON_DEVICE, Ended, run_all, watched

pytestmark = ON_DEVICE

SCRIPT = Path(__file__).with_name("late_faults.py")
AT, STEPS = 1_005, 1_030
CASES = [
    "AdamW fused",
    "AdamW foreach",
    "AdamW compiled model",
    "SGD",
    "SGD fused",
    "Adam scaler",
    "Adam scaler fused",
    "LBFGS closure",
    "SGD closure",
]
GUARDED = [
    *((case, "gradient" if "scaler" in case else "nan") for case in CASES),  # a NaN in the loss is the scaler's
    ("AdamW fused", "gradient"),
    ("AdamW foreach", "gradient"),
]
WATCHED = [
    *((case, "nan") for case in ("AdamW fused", "AdamW foreach", "AdamW compiled model", "LBFGS closure")),
    *((case, "spike") for case in ("AdamW fused", "AdamW foreach", "AdamW compiled model", "SGD closure")),
]
REPLAYED = [("--guard", "AdamW fused", "nan"), ("--guard", "AdamW foreach", "nan"), ("", "AdamW fused", "nan")]
Key = tuple[str, str, str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Ended]:
    """Every run, by `--guard` or nothing, its case and its fault; the bare one is called `bare`."""
    programs: dict[Key, tuple[Path, list[Any]]] = {}
    for key in (("bare", "all", "leave-out"), *(("--guard", *each) for each in GUARDED), *(("", *e) for e in WATCHED)):
        option, case, fault = key
        folder = tmp_path_factory.mktemp("late")
        shutil.copy(SCRIPT, folder / "train.py")
        arguments = ["train.py", DEVICE, case, fault]
        watching = watched(*arguments[1:], options=[option] if option else [])
        programs[key] = folder, arguments if option == "bare" else watching
    return run_all(programs)


@pytest.fixture(scope="module")
def replays(runs: dict[Key, Ended]) -> dict[Key, Ended]:
    """`surefoot replay` on the incidents of some of the runs."""
    kept = {key: runs[key] for key in REPLAYED if incidents(runs[key])}
    return run_all(
        {
            key: (ended.folder, ["-m", "surefoot", "replay", "--json", incidents(ended)[0], "--script", "train.py",
                                 "--", DEVICE, *key[1:]])
            for key, ended in kept.items()
        }
    )  # fmt: skip


def incidents(ended: Ended) -> list[Path]:
    return sorted((ended.folder / "run" / "incidents").glob("*"))


def kept(runs: dict[Key, Ended], key: Key) -> list[Path]:
    """The incidents of a run. A step that the host learns of when it is over is not kept: see `docs/run.md`.

    With `--guard` the host waits for each step, unless the optimizer is fused and decides on the device.
    """
    found = incidents(runs[key])
    host_decides = DEVICE == "cpu" or (key[0] == "--guard" and key[1] in ("AdamW foreach", "SGD"))
    if not found and not host_decides:
        pytest.xfail("the host learned of the step when it was over")
    return found


@pytest.mark.parametrize(("case", "fault"), GUARDED)
def test_the_guard_skips_the_step_and_leaves_every_bit_as_without_it(runs, case: str, fault: str) -> None:
    bare, ended = runs["bare", "all", "leave-out"].last_line, runs["--guard", case, fault]
    assert ended.last_line == {case: bare[case]}
    guarded = ended.written("run.json")["guarded"]
    assert (guarded["checked"], guarded["skipped"], guarded["first"], guarded["not_guarded"]) == (STEPS, 1, AT, {})
    assert "stopped watching" not in ended.errors
    assert ended.written("facts.json")["problems"] == {}


@pytest.mark.parametrize(("case", "fault"), GUARDED)
def test_the_diagnosis_names_the_step_that_was_skipped(runs, case: str, fault: str) -> None:
    found = runs["--guard", case, fault].written("findings.json")
    assert found["verdict"] in ("unstable", "broken")
    assert f"`--guard` skipped 1 of {STEPS:,} steps, at step {AT}" in found["summary"]
    assert found["findings"][0]["step"] == AT
    skips = [
        event for event in runs["--guard", case, fault].written("facts.json")["events"] if event["event"] == "skip"
    ]
    assert [event["step"] for event in skips] == [AT]


@pytest.mark.parametrize(("case", "fault"), [each for each in GUARDED if "scaler" not in each[0]])
def test_the_skipped_step_is_kept(runs, case: str, fault: str) -> None:
    (folder,) = kept(runs, ("--guard", case, fault))
    assert folder.name == f"{AT:09}"
    assert "the step was left out by `--guard`" in (folder / "summary.md").read_text()


@pytest.mark.parametrize(("case", "fault"), [each for each in WATCHED if each[1] == "nan"])
def test_without_the_guard_a_loss_that_is_not_finite_is_reported_with_its_step_and_kept(runs, case, fault) -> None:
    ended = runs["", case, fault]
    found = ended.written("findings.json")
    assert found["verdict"] == "broken"
    first = found["findings"][0]
    assert (first["cause"], first["step"]) == ("data.nonfinite-input", AT), first["summary"]
    assert ended.written("facts.json")["problems"] == {}
    assert [folder.name for folder in kept(runs, ("", case, fault))] == [f"{AT:09}"]


@pytest.mark.parametrize(("case", "fault"), [each for each in WATCHED if each[1] == "spike"])
def test_a_spike_is_noted_with_its_step_and_its_size(runs, case: str, fault: str) -> None:
    events = runs["", case, fault].written("facts.json")["events"]
    (spike,) = [event for event in events if event["event"] == "spike" and event["step"] == AT]
    assert 0.9e6 < spike["value"] < 1.1e6  # the targets are 1,000 too high
    assert spike["level"] < 1.0
    assert incidents(runs["", case, fault]) == []


@pytest.mark.parametrize("key", REPLAYED, ids=lambda key: " ".join(filter(None, key)))
def test_a_kept_step_is_run_again_with_the_same_result(runs, replays, key: Key) -> None:
    assert kept(runs, key)
    ended = replays[key]
    assert ended.out.startswith("{"), ended.errors[-3000:]
    found = json.loads(ended.out)
    assert (found["step"], found["kind"], found["fails_again"]) == (AT, "reproduced", True), found["summary"]
    assert "before any operation" in found["origin"]["text"]
