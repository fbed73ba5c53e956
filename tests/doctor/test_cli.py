"""`surefoot doctor` as a user types it: real files, a process of its own, its exit code and what it prints."""

import json

import pytest

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


@pytest.fixture
def doctor(watch, folder):
    def run(*arguments):
        return watch.command(folder, "doctor", *arguments)

    return run


def test_a_plain_script_is_watched_instead(folder, doctor, starts_forks):
    script = "import torch\nscores = torch.randn(4, 3, requires_grad=True)\n"
    script += "torch.nn.functional.cross_entropy(scores, torch.arange(4)).backward()\n"
    (folder / "plain.py").write_text(script)
    code, out, _ = doctor("plain.py", "--seconds", "100000")  # it ends by itself
    assert code == 1
    assert "data.label-out-of-range" in out
    assert "fewer than 20 steps: later problems were not observed" in " ".join(out.split())
    assert "increase --seconds" not in " ".join(out.split())  # more time would not help


def test_a_script_without_a_problem_says_what_was_looked_for(folder, doctor, starts_forks):
    script = "import torch\nnet = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    script += "for x in torch.randn(30, 8, 4):\n    optimizer.zero_grad()\n"
    script += "    torch.nn.functional.mse_loss(net(x), x.mean(1, keepdim=True)).backward()\n    optimizer.step()\n"
    (folder / "sound.py").write_text(script)
    code, out, _ = doctor("sound.py", "--seconds", "100000", "--json")
    checks = json.loads(out)["checks"]
    assert code == 0
    assert len({check["summary"] for check in checks}) == len(checks) == 10
    skipped = {check["name"]: check["summary"] for check in checks if check["status"] == "skipped"}
    assert skipped.pop("clipping") == "the script clips no gradients"
    assert list(skipped) == ["overfits a tiny batch"]


def test_a_healthy_setup_ends_with_code_0_and_a_table(doctor):
    code, out, err = doctor("setups:healthy", "--seconds", "1")
    assert code == 0, out + err
    assert "tiny batch" in out
    assert "pass" in out
    assert "building" not in out
    assert "building" in err


def test_a_fault_ends_with_code_1_its_cause_and_its_fix(doctor):
    code, out, _ = doctor("setups.py:faulty", "--seconds", "1")
    assert code == 1
    assert "loss.softmax-before-cross-entropy" in out
    assert "Return the logits" in out
    assert "surefoot explain" in out


@pytest.mark.parametrize("name", ["healthy", "as_dict", "as_object"])
def test_json_is_all_there_is_on_stdout(doctor, name):
    _, out, _ = doctor(f"setups:{name}", "--json", "--seconds", "1")
    content = json.loads(out)
    assert content["schema"] == 1
    assert content["ok"]
    assert {check["step"] for check in content["checks"]} == set(range(1, 11))
    assert set(content["checks"][0]) == {"step", "name", "status", "number", "expected", "summary", "fix", "cause"}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("setups", "module:function"),
        ("nothing.py", "no file"),
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
def test_wrong_use_gets_one_line_and_code_2(doctor, target, says):
    code, out, err = doctor(target)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert says in line
    assert line.startswith("surefoot: ")
