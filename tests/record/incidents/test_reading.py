"""An incident from a stranger can be refused, never run; and one that is sent on tells nothing it should not."""

import json
import pickle
import platform
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

import surefoot as sf
from captured import capture, incidents_in
from surefoot.core.redaction import Redactor
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.diagnose.terminal import as_full_text
from surefoot.diagnose.terminal import as_text as as_short_text
from surefoot.errors import UsageError
from surefoot.experiments.incident import CapturedIncident, findings_near
from surefoot.record.incidents.environment import versions
from surefoot.record.incidents.reading import read_incident
from surefoot.replay.processes import ReplayPass
from surefoot.replay.verdict import as_text, judge

SECRET = "hunter2-4f1a9c7d"


class Payload:
    """Unpickling it would leave a file behind."""

    def __reduce__(self):
        return (open, (str(self.where), "w"))


@pytest.fixture
def folder(tmp_path):
    capture(tmp_path, "mlp", step=2)
    return incidents_in(tmp_path)[0]


@pytest.mark.parametrize(
    "name", ["incident.json", "state/state.json", "state/tensors.safetensors", "state/manifest.json"]
)
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickle_in_any_place_is_refused_and_never_loaded(tmp_path, folder, name, how):
    payload = Payload()
    payload.where = tmp_path / "ran"
    if how == "pickle":
        (folder / name).write_bytes(pickle.dumps(payload))
    else:
        torch.save({"weights": payload}, folder / name)
    with pytest.raises(UsageError):
        read_incident(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["incident.json", "state/state.json", "state/tensors.safetensors"])
def test_what_is_cut_off_is_refused(folder, name):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"cannot be read|damaged"):
        read_incident(folder)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "manifest.json"])
def test_a_file_that_is_said_to_be_larger_than_the_memory_is_not_read(folder, name):
    with open(folder / "state" / name, "r+b") as file:
        file.truncate(1 << 43)
    with pytest.raises(UsageError, match=r"more than the [\d,]+ bytes of memory"):
        read_incident(folder)


def test_facts_of_another_kind_are_refused_by_name(folder):
    facts = json.loads((folder / "incident.json").read_text())
    prints = facts["fingerprints"]
    named = [{"schema": 7}, {"fingerprints": []}, {"exact": "yes"}]
    named += [{"fingerprints": prints | {part: each}} for part in ("losses", "gradients") for each in (None, "x", [1])]
    named += [{"fingerprints": prints | {"losses": [[{"value": 1}]]}}, {"fingerprints": {}}]
    for wrong in named:
        (folder / "incident.json").write_text(json.dumps(facts | wrong))
        with pytest.raises(UsageError, match=next(iter(wrong))):
            read_incident(folder)


def test_nothing_private_is_in_any_byte_of_the_folder(tmp_path, monkeypatch):
    home = Path.home()
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    monkeypatch.setenv("LOGNAME", "alice_w")
    monkeypatch.setattr(socket, "gethostname", lambda: "build-host-17.example.org")
    monkeypatch.setattr("sys.argv", ["train.py", f"--token={SECRET}", str(home / "data" / "set.bin")])
    model = nn.Linear(4, 1)
    stabilizer = sf.TrainingStabilizer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        scheduler=Noting(f"{home}/notes {SECRET}"),
        incidents=tmp_path / "run",
    )
    paths = [f"{home}/images/{socket.gethostname()}-cat.png", "by alice_w", str(tmp_path / "x.png")]
    batch = {"x": torch.full((2, 4), torch.nan), "names": paths, "token": SECRET, "file": open}
    for given in stabilizer.resume([batch]):
        stabilizer.backward(model(given["x"]).sum())
        stabilizer.step()
    (folder,) = incidents_in(tmp_path / "run")
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    private = [SECRET, f"{home}/", str(tmp_path), "build-host-17", "alice_w"]
    assert [word for word in private if word.encode() in written] == []
    assert b"set.bin" in written
    assert b"builtin_function_or_method" in written  # said to be left out


def test_without_redaction_all_of_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--out", "/some/where/out.bin"])
    capture(sf.IncidentKeeper(tmp_path, redact=False), "mlp", step=2)
    (folder,) = incidents_in(tmp_path)
    assert read_incident(folder).facts["script"]["arguments"] == ["--out", "/some/where/out.bin"]


def test_an_environment_that_says_the_version_of_torch_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_VERSION", str(torch.__version__))
    monkeypatch.setenv("MY_ARCHITECTURE", platform.machine())
    capture(tmp_path, "mlp", step=2)
    (folder,) = incidents_in(tmp_path)
    assert read_incident(folder).facts["versions"] == versions()  # or a replay would find everything changed


class Noting:
    """A scheduler whose state has text in it."""

    def __init__(self, text):
        self.text = text

    def step(self):
        pass

    def state_dict(self):
        return {"note": self.text}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/sets/a.bin", "a.bin"),
        ("see '/data/sets/a.bin' and C:\\Users\\me\\b.txt", "see 'a.bin' and b.txt"),
        ("loss/train is 3/4", "loss/train is 3/4"),
        ("lr=1e-3, betas=(0.9, 0.999)", "lr=1e-3, betas=(0.9, 0.999)"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("<function f at 0x7f00aa>", "<function f>"),
    ],
)
def test_paths_are_reduced_to_file_names_and_nothing_else_is(text, shown):
    assert Redactor()(text) == shown


def test_an_incident_cannot_give_orders_to_the_terminal(folder):
    facts = read_incident(folder).facts
    now = {name: facts[name] for name in ("versions", "hardware", "switches")}
    once = ReplayPass(facts["fingerprints"], {}, **now)
    facts["versions"] = {**facts["versions"], "torch": "\x1b]0;owned\x07\x1b[2J"}
    assert "\x1b" not in as_text(judge(facts, once, once))


def test_findings_of_a_stranger_cannot_give_orders_to_the_terminal_either(tmp_path, folder):
    orders = "\x1b]0;owned\x07\x1b[2J"
    finding = Finding("lr.too-high", "error", 0.9, f"the rate {orders}", 3, (orders,), {orders: [orders]}, (orders,))
    diagnosis = Diagnosis("broken", 5, (finding,))
    for text in (as_full_text(diagnosis, "run"), as_short_text(diagnosis, "run")):
        assert "\x1b" not in text
    (tmp_path / "findings.json").write_text(json.dumps(diagnosis.as_json()))
    near = findings_near(CapturedIncident(folder, {"step": 2}))
    assert near.findings[0].cause == "lr.too-high"
    assert "\\u001b" not in json.dumps(near.as_json())
