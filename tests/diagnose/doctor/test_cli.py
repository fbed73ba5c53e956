"""`surefoot doctor` as a user types it: real files, a real process, its exit code and what it prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot

SOURCE = str(Path(surefoot.__file__).parents[1])
SETUPS = """
import torch
from torch import nn

torch.manual_seed(0)
X = torch.randn(128, 8)
LOADER = list(zip(X.split(32), (X[:, 0] > 0).long().split(32)))


class Holder:
    pass


def parts(*after):
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2), *after)
    return model, LOADER, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-3)


def healthy():
    print("building")
    return parts()


def faulty():
    return parts(nn.Softmax(-1))


def as_dict():
    return dict(zip(("model", "loader", "loss_fn", "optimizer"), parts())) | {"clip": 1.0, "unrelated": 3}


def as_object():
    holder = Holder()
    holder.model, holder.loader, holder.loss_fn, _ = parts()
    return holder


def too_many():
    return 1, 2, 3, 4, 5


def half():
    return {"model": parts()[0]}


def raising():
    raise ValueError("no data on this machine")


def wrong_model():
    return "model", LOADER


NOT_A_FUNCTION = 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "setups.py").write_text(SETUPS)
    (tmp_path / "broken.py").write_text("import torch\nimport surely_not_installed\n")
    return tmp_path


def doctor(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "surefoot", "doctor", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
    )


def test_a_healthy_setup_ends_with_code_0_and_a_table(folder):
    result = doctor(folder, "setups:healthy", "--seconds", "20")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tiny batch" in result.stdout
    assert "pass" in result.stdout
    assert "building" not in result.stdout
    assert "building" in result.stderr


def test_a_fault_ends_with_code_1_its_cause_and_its_fix(folder):
    result = doctor(folder, "setups.py:faulty", "--seconds", "10")
    assert result.returncode == 1
    assert "loss.softmax-before-cross-entropy" in result.stdout
    assert "Return the logits" in result.stdout
    assert "surefoot explain" in result.stdout


@pytest.mark.parametrize("name", ["healthy", "as_dict", "as_object"])
def test_json_is_all_there_is_on_stdout(folder, name):
    result = doctor(folder, f"setups:{name}", "--json", "--seconds", "3")
    content = json.loads(result.stdout)
    assert content["schema"] == 1
    assert content["ok"]
    assert {check["step"] for check in content["checks"]} == set(range(1, 11))
    assert set(content["checks"][0]) == {"step", "name", "status", "number", "expected", "summary", "fix", "cause"}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("setups", "module:function"),
        ("setups.py", "script"),
        ("nowhere:f", "no module 'nowhere'"),
        ("nowhere.py:f", "no file"),
        ("setups:nothing", "no 'nothing'"),
        ("setups:NOT_A_FUNCTION", "not a function"),
        ("setups:too_many", "5 values"),
        ("setups:half", "without loader"),
        ("setups:raising", "no data on this machine"),
        ("setups:wrong_model", "torch.nn.Module"),
        ("broken:f", "surely_not_installed"),
        (":", "module:function"),
    ],
)
def test_wrong_use_gets_one_line_and_code_2(folder, target, says):
    result = doctor(folder, target)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert says in line
    assert line.startswith("surefoot: ")
