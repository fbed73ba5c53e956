"""The script that trained, unmodified, runs the captured step again, and nothing else of it."""

import hashlib
import json
import os
import shutil
import sys
import timeit
from pathlib import Path

import pytest

import without_landlock
from captured import incidents_in
from replayed import run, write_script
from surefoot.errors import UsageError
from surefoot.record.incidents.reading import read_facts, read_incident
from surefoot.replay.command import replay
from surefoot.replay.consent import asking, import_path, order_for, received
from surefoot.replay.processes import Order, run_pass

BROKEN = """
import torch
from torch import nn
import surefoot as sf

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1), nn.ReLU())
stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1), incidents="out")

def loss_of(x, y):
    rate = model(x).squeeze(1)
    return (rate - y * torch.log(rate)).mean()

batches = [(torch.randn(4, 4), torch.ones(4)) for _ in range(40)]
for x, y in stabilizer.resume(batches):
    stabilizer.backward(loss_of(x, y))
    stabilizer.step()
"""


@pytest.mark.parametrize(("model", "precision", "accumulate"), [("cnn", "bf16", 2), ("transformer", "fp16", 1)])
def test_the_script_does_it_again_bit_for_bit_and_stops_there(tmp_path, model, precision, accumulate, starts_forks):
    script = write_script(tmp_path)
    arguments = (model, precision, str(accumulate), "out")
    run(tmp_path, str(script), *arguments).check_returncode()
    (folder,) = incidents_in(tmp_path / "out")
    facts = read_incident(folder).facts
    assert facts["exact"], facts["inexact"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for left in ("model.pt", "last.pt", "at_exit"):
        (tmp_path / left).unlink()
    found = run_pass(Order(folder, script=str(script), arguments=(*arguments, "7")), scratch, 1, locate=False)
    for kind in ("losses", "inputs", "gradients"):
        assert found.prints[kind] == facts["fingerprints"][kind], kind
    assert found.differences == {}
    # The script was left where its step ended: neither what follows nor `finally` nor exit hooks have run.
    assert not [left for left in ("model.pt", "last.pt", "at_exit") if (tmp_path / left).exists()]
    assert len(incidents_in(tmp_path / "out")) == 1


def test_the_command_names_the_operation_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "train.py").write_text(BROKEN)
    run(tmp_path, "train.py").check_returncode()
    folder = incidents_in(tmp_path / "out")[0]
    before = sorted(path.name for path in tmp_path.rglob("*"))
    told = run(tmp_path, "-m", "surefoot", "replay", str(folder), "--json", "--script", "train.py")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["kind"] == "reproduced"
    assert found["fails_again"]
    assert found["origin"]["op"] == "aten.log.default"
    assert (Path(found["origin"]["file"]).name, found["origin"]["source"]) == (
        "train.py",
        "return (rate - y * torch.log(rate)).mean()",
    )
    assert sorted(path.name for path in tmp_path.rglob("*") if "__pycache__" not in str(path)) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "is not an incident"),
        (["incident", "--script", "quiet.py"], "before its first step"),
    ],
)
def test_wrong_use_is_one_answer_and_exit_code_2(tmp_path, broken_incident, words, said):
    (tmp_path / "train.py").write_text(BROKEN)
    (tmp_path / "quiet.py").write_text("print('nothing to train')")
    (tmp_path / "incident").symlink_to(broken_incident)
    told = run(tmp_path, without_landlock.__file__, "-m", "surefoot", "replay", *words)
    assert told.returncode == 2
    assert said in told.stderr
    assert told.stderr.count("this system cannot confine the runs") == ("quiet.py" in words)
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"script": "missing.py"}, "no script 'missing.py'"),
        ({"script": __file__, "target": "a:b"}, "use only one of"),
        ({"target": "nomodule:f"}, "no module 'nomodule'"),
    ],
)
def test_what_cannot_be_run_is_named(broken_incident, given, said, starts_forks):
    with pytest.raises(UsageError, match=said):
        replay(broken_incident, **given)


@pytest.fixture(scope="module")
def broken_incident(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    (folder / "train.py").write_text(BROKEN)
    run(folder, "train.py").check_returncode()
    return incidents_in(folder / "out")[0]


CARELESS = """
import os, shutil, subprocess, sys
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

shutil.rmtree("old", ignore_errors=True)
log = open("losses.csv", "w")
torch.manual_seed(0)
model = nn.Linear(4, 1)
torch.save(model.state_dict(), "model.pt")
save_file(model.state_dict(), "large.safetensors")
if "--child" in sys.argv:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(os.environ["PID_FILE"], "w").write(str(child.pid))
x, y = torch.randn(24, 4), torch.randn(24, 1)
x[13, 2] = float("inf")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
    optimizer.zero_grad()
    loss = (model(a) - b).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def careless_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("careless")
    (folder / "train.py").write_text(CARELESS)
    ended = run(folder, "-m", "surefoot", "run", "--out", "runs/one", "train.py")
    assert "the first bad step was captured" in ended.stderr, ended.stderr
    return folder


@pytest.fixture
def careless(careless_run, tmp_path):
    """A script that begins by clearing away, its incident, and results that are worth keeping."""
    folder = tmp_path / "work"
    shutil.copytree(careless_run, folder)
    (folder / "old").mkdir(exist_ok=True)
    for name in ("old/results", "losses.csv", "model.pt"):
        (folder / name).write_text("precious")
    (folder / "large.safetensors").write_bytes(b"precious" * 600_000)
    return folder


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_replay_leaves_every_file_as_it_was_and_no_process(careless, monkeypatch, tmp_path_factory):
    pid_file = tmp_path_factory.mktemp("pid") / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    before = contents(careless)
    incident = ("runs/one/incidents/000000001", "--script", "train.py")
    allowed = ("--allow-writes", str(pid_file.parent))
    ended = run(careless, "-m", "surefoot", "replay", *incident, *allowed, "--", "--child", starts_forks=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert contents(careless) == before
    assert not alive(int(pid_file.read_text()))


@pytest.mark.parametrize("how", ["module", "library", "shipped", "outside"])
def test_an_incident_cannot_choose_what_is_run(careless, how, monkeypatch):
    folder = careless / "runs" / "one" / "incidents" / "000000001"
    code = "open('ran', 'w').close()"
    (folder / "evil.py").write_text(code)
    (careless.parent / "evil.py").write_text(code)
    named = {
        "module": {"path": None, "module": "timeit", "arguments": ["-n1", "-r1", code]},
        "library": {"path": timeit.__file__, "module": None, "arguments": ["-n1", "-r1", code]},
        "shipped": {"path": str((folder / "evil.py").relative_to(careless)), "module": None, "arguments": []},
        "outside": {"path": "../evil.py", "module": None, "arguments": []},
    }
    facts = json.loads((folder / "incident.json").read_text())
    (folder / "incident.json").write_text(json.dumps(facts | {"script": named[how]}))
    monkeypatch.chdir(careless)
    with pytest.raises(UsageError, match="--script"):
        replay(folder)
    assert not list(careless.parent.rglob("ran"))


def test_another_input_is_not_the_same_step_though_all_is_nan_in_both(careless):
    folder = careless / "runs" / "one" / "incidents" / "000000001"
    noisy = CARELESS.replace("model(a)", "model(a + torch.rand((), generator=torch.Generator().manual_seed(5)))")
    (careless / "train.py").write_text(noisy)
    ended = run(careless, "-m", "surefoot", "replay", str(folder), "--json", "--script", "train.py")
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["kind"], found["fails_again"]) == (5, "inconclusive", True)
    assert "inputs differ from the recorded ones" in found["summary"]


def naming(folder, **script):
    """An incident that names something to run."""
    facts = json.loads((folder / "incident.json").read_text())
    named = {"path": None, "module": None, "arguments": [], **script}
    (folder / "incident.json").write_text(json.dumps(facts | {"script": named}))
    return read_facts(folder)


def test_what_an_incident_names_is_shown_and_run_only_if_the_user_agrees(careless, monkeypatch):
    folder = careless / "runs" / "one" / "incidents" / "000000001"
    facts = naming(folder, path="train.py", arguments=["--lr", "a b", "\x1b[2J"])
    monkeypatch.chdir(careless)
    checksum = hashlib.sha256((careless / "train.py").read_bytes()).hexdigest()
    with pytest.raises(
        UsageError, match=rf"'train.py' \(SHA-256 {checksum}\).*--script train.py -- --lr 'a b'"
    ) as refused:
        order_for(folder, facts, None, (), None)
    assert "\x1b" not in str(refused.value)
    asked = []
    order = order_for(folder, facts, None, (), None, ask=lambda words: asked.append(words) or True)
    assert (order.script, order.arguments) == ("train.py", ("--lr", "a b", "\x1b[2J"))
    assert checksum in asked[0]
    assert "--lr 'a b'" in asked[0]
    with pytest.raises(UsageError, match="nothing was run"):
        order_for(folder, facts, None, (), None, ask=lambda words: False)
    order = order_for(folder, facts, "train.py", ("--lr", "1"), None)
    assert order.arguments == ("--lr", "1")
    assert order_for(folder, facts, "train.py", (), None).arguments == ()  # the incident chooses no arguments


def test_a_question_shows_every_argument_or_is_not_asked(careless, monkeypatch):
    folder = careless / "runs" / "one" / "incidents" / "000000001"
    monkeypatch.chdir(careless)
    odd = ["a" * 1000, "two\nlines", "\x1b[2J'\\", "\u202eback", "\udc80", "--upload=everything"]
    facts = naming(folder, path="train.py", arguments=odd)
    asked = []
    order = order_for(folder, facts, None, (), None, ask=lambda words: asked.append(words) or True)
    assert order.arguments == tuple(odd)
    shown = r"""$'two\nlines' $'\x1b[2J\'\\' $'\u202eback' $'\x80' --upload=everything"""
    assert asked[0].endswith(f" {'a' * 1000} {shown}.")
    with pytest.raises(UsageError) as refused:
        order_for(folder, facts, None, (), None)
    assert str(refused.value).endswith(f"--script train.py -- {'a' * 1000} {shown}`")
    facts = naming(folder, path="train.py", arguments=["a" * 4000, "--upload=everything"])
    with pytest.raises(UsageError, match=r"too long .*: --script train\.py -- ARGS"):
        order_for(folder, facts, None, (), None, ask=lambda words: True)


def test_only_somebody_at_a_terminal_is_asked(monkeypatch):
    assert asking() is None  # pytest's own input is none
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as keyboard, open(os.devnull, "w") as screen:
        monkeypatch.setattr(sys, "stdin", keyboard)
        monkeypatch.setattr(sys, "stderr", screen)
        assert asking() is None  # nobody would see the question
        with os.fdopen(os.dup(keyboard.fileno()), "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            for answer, agreed in (("y", True), ("", False), ("no", False)):
                os.write(ours, f"{answer}\n".encode())
                assert asking()("It names train.py.") is agreed
    os.close(ours)


def test_redacted_arguments_have_to_be_given(careless, monkeypatch):
    folder = careless / "runs" / "one" / "incidents" / "000000001"
    monkeypatch.chdir(careless)
    for script in ({"arguments": ["--token=<redacted>"]}, {"arguments": ["data.bin"], "redacted": True}):
        facts = naming(folder, path="train.py", **script)
        with pytest.raises(UsageError, match=r"redacted.*--script train\.py --"):
            order_for(folder, facts, None, (), None, ask=lambda words: True)


@pytest.mark.parametrize(
    "how", ["script", "link", "dots", "module", "target", "module target", "recorded", "recorded module"]
)
def test_nothing_in_the_folder_that_an_incident_came_in_is_ever_run(careless, how, monkeypatch):
    run_folder = careless / "runs" / "one"
    folder = run_folder / "incidents" / "000000001"
    for name in ("evil.py", "__init__.py"):
        (run_folder / name).write_text("open('ran', 'w').close()")
    (careless / "innocent.py").symlink_to("runs/one/evil.py")
    monkeypatch.chdir(careless)
    given = {
        "script": {"script": "runs/one/evil.py"},
        "link": {"script": "innocent.py"},
        "dots": {"script": "runs/../runs/one/incidents/../evil.py"},
        "module": {"module": "runs.one.evil"},
        "target": {"target": "runs/one/evil.py:build"},
        "module target": {"target": "runs.one.evil:build"},
    }.get(how, {})
    named = {"recorded module": {"module": "runs.one.evil"}}.get(how, {"path": "innocent.py"})
    naming(folder, **named)
    with pytest.raises(UsageError, match="the folder that the incident came in"):
        replay(folder, **given, ask=lambda words: True)
    assert not list(careless.parent.rglob("ran"))


def test_neither_the_working_directory_nor_the_import_path_may_lie_in_what_was_received(careless, monkeypatch):
    run_folder = careless / "runs" / "one"
    folder = run_folder / "incidents" / "000000001"
    monkeypatch.chdir(run_folder)
    with pytest.raises(UsageError, match="the working directory is inside"):
        replay(folder, script="../../train.py")
    (careless / "linked").symlink_to(run_folder)
    path = [str(run_folder), str(careless / "linked"), str(careless / "lib"), "", str(folder / "state")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    assert import_path(received(folder)) == [str(careless / "lib")]


@pytest.mark.parametrize(
    ("place", "came_in"),
    [
        ("run/incidents/000000001", "run"),
        ("run/rank3/incidents/000000001", "run"),
        ("sent/000000001", "sent/000000001"),
    ],
)
def test_what_was_received_is_the_whole_run_folder(tmp_path, place, came_in):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / "link").symlink_to(place)
    assert received(tmp_path / place) == received(tmp_path / "link") == tmp_path / came_in


def test_a_pass_imports_nothing_from_the_working_directory_before_the_script_does(careless, tmp_path, monkeypatch):
    for name in ("torch", "numpy", "safetensors"):
        (careless / f"{name}.py").write_text("open('ran', 'w').close()")
    (careless / "quiet.py").write_text("import sys\nprint(sys.path[0])\nsys.exit(3)")
    monkeypatch.chdir(careless)
    (tmp_path / "scratch").mkdir()
    order = Order(careless / "runs" / "one" / "incidents" / "000000001", script="quiet.py")
    with pytest.raises(UsageError, match=rf"before its first step[^$]*\n    {careless}$"):
        run_pass(order, tmp_path / "scratch", 1, locate=False)
    assert not list(tmp_path.rglob("ran"))
