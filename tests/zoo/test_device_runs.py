"""A score on a device: what counts, what cannot run there, and that a script is watched as on the CPU.

`cpu:0` is a device by itself: the scripts are prepared for it as for an accelerator, and run on the CPU.
"""

import json
import sys

import pytest
from small_zoo import SCRIPT, a_zoo

import forked
import patience
from surefoot.core.console import result_console
from surefoot.zoo.device_runs import run_all
from surefoot.zoo.score import as_json, folder_of, recorded, show

LABELS = """
import torch
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    if step == 7: y[2] = 3
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
ON_DEVICE_ONLY = """
import torch
if torch.get_default_device() == torch.device("cpu:0"): raise RuntimeError("no kernel for this")
"""
WATCHED_ONLY = """
import traceback, torch
if any("run.py" in frame.filename for frame in traceback.extract_stack()): raise RuntimeError("surefoot did it")
"""
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def score(tmp_path_factory):
    root = tmp_path_factory.mktemp("score")
    scripts = a_zoo(
        root / "zoo",
        testing__healthy__line=SCRIPT,
        testing__healthy__device_only=ON_DEVICE_ONLY,
        testing__healthy__watched_only=WATCHED_ONLY,
        testing__healthy__killed=KILLED,
        **{"testing__data_label-out-of-range__labels": LABELS},
    )
    done = []
    limit = patience.HANG_SECONDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forked.executable())
        results = run_all("cpu:0", scripts, [100], 3, keep=root / "kept", timeout_s=limit, done=done.append)
    assert sorted(result.name for result in done) == [result.name for result in results]
    return root, scripts, {result.script: result for result in results}


def test_only_what_fails_on_the_device_alone_cannot_run(score):
    _, _, results = score
    assert {result.device for result in results.values()} == {"cpu:0"}
    errors = {name: result.cannot_run for name, result in results.items() if result.cannot_run}
    assert errors == {"device_only": "RuntimeError: no kernel for this"}
    codes = {name: result.exit_code for name, result in results.items() if not result.trouble}
    assert codes == {"line": 0, "labels": 1, "watched_only": 1, "device_only": 1}
    assert "exit code -9" in results["killed"].trouble
    assert not any(result.unwatched for result in results.values())


def test_the_evidence_names_the_line_of_the_script(score):
    root, scripts, results = score
    assert results["labels"].named[0] == "data.label-out-of-range"
    folder = folder_of(root / "kept", scripts[-1], 100)
    (found,) = json.loads((folder / "findings.json").read_text())["findings"][:1]
    assert any(where.endswith("labels.py:8") for where in found["where"]), found["where"]
    assert "on_device" not in (folder / "output.txt").read_text().split("surefoot: ")[1]


def test_the_score_says_the_device_and_leaves_out_what_cannot_run(score, capsys):
    results = list(score[2].values())
    show(results, result_console(plain_width=200))
    printed = capsys.readouterr().out.splitlines()
    faulty = "testing on cpu:0: 1 faulty runs, top-1 100.0 %, top-3 100.0 %"
    (line,) = (line for line in printed if line.startswith(faulty))
    assert " of 3 healthy runs judged, 0 with a false alarm; not judged: killed:100" in line
    assert "  testing/healthy/device_only:100: RuntimeError: no kernel for this" in printed
    assert "  testing/healthy/device_only:100: exit code 1" not in printed
    written = json.loads(as_json(results))
    assert written["device"] == "cpu:0"
    assert written["cannot_run"] == [
        {"run": "testing/healthy/device_only:100", "error": "RuntimeError: no kernel for this"}
    ]
    assert written["halves"]["testing"]["healthy"] == 3


def test_kept_runs_are_scored_again_with_their_device(score):
    root, _, results = score
    again = {result.script: result for result in recorded(root / "kept")}
    for name in ("line", "labels", "device_only", "watched_only"):
        assert vars(again[name]) == vars(results[name])
