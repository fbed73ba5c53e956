"""No secret is in anything that surefoot writes, and nothing else is taken out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import surefoot as sf
from captured import capture, incidents_in
from runlogs import KeptEvents
from surefoot.core.redaction import REDACTED, Redactor
from surefoot.record.run_folder import describe_run, write_json
from surefoot.report.page.html import write_report

if TYPE_CHECKING:
    from watched import Nursery

CANARY = "c4n4ry-5b1f9e"
"""The beginning of every secret."""
TRAIN = """
import os, sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
os.environ["MY_SERVICE_TOKEN"] = sys.argv[-1]
secret = os.environ.pop("MY_SERVICE_TOKEN") if "--forget" in sys.argv else os.environ["MY_SERVICE_TOKEN"]
for step in range(12):
    optimizer.zero_grad()
    x = torch.randn(8, 4) / (0.0 if step == 11 else 1.0)
    model(x).square().mean().backward()
    optimizer.step()
home = os.path.expanduser("~")
raise RuntimeError(f"no answer from https://me:{secret}@db.example.org for {secret!r}, see {home}/notes/log.txt")
"""
ARGUMENTS = [
    "--api-key", f"{CANARY}-1", f"--token={CANARY}-2", "--password", f"{CANARY}-3", f"https://me:{CANARY}-4@host/x",
    f"db.password={CANARY}-5", f"http://host/?access_token={CANARY}-6&page=2", f"me:{CANARY}-7@host", "--lr", "0.1",
]  # fmt: skip


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_no_secret_and_no_home_is_in_any_file_of_a_run_and_its_page(watch: Nursery) -> None:
    folder = watch.given([*ARGUMENTS, f"{CANARY}-8"], TRAIN).folder / "run"
    (incident,) = incidents_in(folder)
    assert "RuntimeError" in (folder / "facts.json").read_text()
    page = write_report(folder)
    assert CANARY.encode() not in written(folder)
    assert f"{Path.home()}/notes".encode() not in written(folder)
    run = json.loads((folder / "run.json").read_text())
    assert run["arguments"][:4] == ["--api-key", REDACTED, f"--token={REDACTED}", "--password"]
    assert run["arguments"][-3:-1] == ["--lr", "0.1"]
    assert run["torch"] == str(torch.__version__)
    assert "page=2" in page.read_text()
    assert json.loads((incident / "incident.json").read_text())["script"]["redacted"]


def test_a_page_about_the_folder_of_an_older_version_shows_no_secret(tmp_path: Path) -> None:
    with sf.RunLog(tmp_path) as log:
        log.event("checkpoint", 0, "the first")
    secrets = {"arguments": ["--token", f"{CANARY}-1", "--lr", "0.1"], "script": "train.py"}
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1} | secrets))
    page = write_report(tmp_path).read_text()
    assert CANARY not in page
    assert "0.1" in page


def test_events_reach_the_disk_and_every_sink_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", f"{CANARY}-1")
    sink = KeptEvents()
    with sf.RunLog(tmp_path, sinks=[sink]) as log:
        evidence = {"where": [f"{Path.home()}/x.py:3", {"text": f"({CANARY}-1)"}], "password": f"{CANARY}-2", "n": 3}
        log.event("alarm", 3, f"--api-key {CANARY}-3 was refused", evidence=evidence)
        itself: dict[str, Any] = {"summary": f"{CANARY}-1"}
        itself["itself"] = itself
        log.event("alarm", 4, "holds itself", evidence=itself)
    assert CANARY.encode() not in written(tmp_path)
    assert CANARY not in repr(sink.events)
    first = sink.events[0]
    assert first.summary == f"--api-key {REDACTED} was refused"
    assert first.evidence["n"] == 3
    assert first.evidence["where"][0] == "~/x.py:3"


def test_what_a_script_takes_out_of_its_environment_stays_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GONE_SECRET", f"{CANARY}-gone")
    assert Redactor()(f"x {CANARY}-gone") == f"x {REDACTED}"
    monkeypatch.delenv("GONE_SECRET")
    assert Redactor()(f"x {CANARY}-gone") == f"x {REDACTED}"


ENVIRONMENT = {
    "HF_TOKEN": "hunter2-4f1a9c7d",
    "DB_PASSWORD": "correcthorse",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "DATABASE_URL": "postgres://bob:s3cr%40tpw@db/x",
    "MY_PRIVATE_KEY": "QUJDREVGR0hJSktMTU5P/x+y==",
    "ODD_PASSWORD": "$ecret(9!",
    "API_KEY_VERSION": "2.13.0",
    "SECRET_FLAG": "true",
    "USE_TOKEN": "1",
    "SORT_KEY": "validation",
    "TOKENIZERS_PARALLELISM": "false",
    "TOKENIZER_NAME": "gpt2-large",
    "NUM_TOKENS": "100000",
    "SSH_AUTH_SOCK": "/run/agent.sock",
    "PLAIN": "x86_64-linux",
}


@pytest.fixture
def redact(monkeypatch: pytest.MonkeyPatch) -> Redactor:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("surefoot.core.redaction._seen", {})
    return Redactor(identity=False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("got hunter2-4f1a9c7d!", f"got {REDACTED}!"),
        ("correcthorse battery", f"{REDACTED} battery"),
        ("key 0123456789abcdef0123456789abcdef01234567", f"key {REDACTED}"),
        ("s3cr@tpw or s3cr%40tpw", f"{REDACTED} or {REDACTED}"),
        ("QUJDREVGR0hJSktMTU5P/x+y==", REDACTED),
        ("login with $ecret(9! failed", f"login with {REDACTED} failed"),
        ("https://user:pass@host/x", f"https://{REDACTED}@host/x"),
        ("https://tokenonly@host/x", f"https://{REDACTED}@host/x"),
        ("--token X9z --lr 0.1", f"--token {REDACTED} --lr 0.1"),
        ("unrecognized arguments: --token=X9zabc -v", f"unrecognized arguments: --token={REDACTED} -v"),
        ("--db-password=p;w,x", f"--db-password={REDACTED}"),
        ("error: token=abc", f"error: token={REDACTED}"),
        ("http://h/?sig=abc123def&x=1", f"http://h/?sig={REDACTED}&x=1"),
        ("Authorization: Bearer abcDEF123456", f"Authorization: Bearer {REDACTED}"),
        ('{"password": "two words", "n": 1}', f'{{"password": "{REDACTED}", "n": 1}}'),
        ("api_key='abc'", f"api_key='{REDACTED}'"),
        ("hf_abcdefghijklmnopqrstuvwx", REDACTED),
        ("AKIAIOSFODNN7EXAMPLE", REDACTED),
        ("connect to user:p@host", f"connect to {REDACTED}@host"),
        ("user:p@ss@host", f"{REDACTED}@host"),
        ("failed: password=ab;cd,ef(gh) at 3", f"failed: password={REDACTED} at 3"),
        ("password=(ab)cd x", f"password={REDACTED} x"),
        ("label_key=a,password=b;c", f"label_key=a,password={REDACTED}"),
        ("""{"password": "it's \\"so\\"", "n": 1}""", f'{{"password": "{REDACTED}", "n": 1}}'),
        ("postgresql://user:p@s/w@host/db", f"postgresql://{REDACTED}@host/db"),
        ("db://a:b@h/x,db://c:d@i/y", f"db://{REDACTED}@h/x,db://{REDACTED}@i/y"),
        ("--token -abc1234567xyz -v", f"--token {REDACTED} -v"),
        ("--password -hunter2", f"--password {REDACTED}"),
        ("Authorization: Basic dXNlcjpwYXNz", f"Authorization: Basic {REDACTED}"),
        ("{'Authorization': 'Token abc'}", f"{{'Authorization': 'Token {REDACTED}'}}"),
    ],
)
def test_a_secret_is_taken_out(redact: Redactor, text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.13.0, 1 true false validation, step 100000",
        "gpt2-large on x86_64-linux",
        "correcthorsebattery",
        "unexpected token: foo",
        "pad_token='</s>' max_tokens=2048 eos_token_id=2 --max-tokens 512 --pad-token <pad>",
        "num_key_value_heads=8 key_dim=64 query_key=True label_key=caption the key: value",
        "lr=1e-3, betas=(0.9, 0.999)",
        "https://example.org/a/b?page=2 ssh://git@github.com/a/b",
        "train.py:11 secrets.py:4 token.py",
        "the password was wrong",
        "/run/agent.sock",
        "at 10:30@home cuda:0@rank1 train.py:11@main recall:0.5@10 image:1.2-cuda@sha256:0a1b",
        "http://host:8080/a@b http://[::1]:80/a@b https://unpkg.com/@scope/x@1.2 git+https://github.com/a/b@v1",
        "f(password=None, secret=True) api_key=() secret_keys: [1, 2] {'password': None} password=<pad>",
        "--token --beta1=0.9 --key -v --token -lr=0.0001 --token -1.5",
        "https://h/?page=2 Authorization: required",
        "model.layers.0.attn.key.weight",
        "SHA-256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)
def test_nothing_else_is_taken_out(redact: Redactor, text: str) -> None:
    assert redact(text) == text


def test_arguments_keep_their_names_and_everything_that_is_no_secret(redact: Redactor) -> None:
    words = ["--token", "--flag", "--password", "1234", "--key", "caption", "key=value", "--tokens", "12", "-v"]
    words += ["--hf_token", "abc", "+trainer.token=abc", "--lr=0.1", "data/key.txt"]
    shown = ["--token", "--flag", "--password", REDACTED, "--key", "caption", "key=value", "--tokens", "12", "-v"]
    shown += ["--hf_token", REDACTED, f"+trainer.token={REDACTED}", "--lr=0.1", "data/key.txt"]
    assert redact.arguments(words) == shown
    words, shown = [*words, "--token", "-x9"], [*shown, "--token", "-x9"]
    words += ["--token", "-abc1234567xyz", "--db", "user:pw@host"]
    shown += ["--token", REDACTED, "--db", f"{REDACTED}@host"]
    assert redact.arguments(words) == shown
    assert redact.inside({"Authorization": "Basic dXNlcjpwYXNz"}) == {"Authorization": f"Basic {REDACTED}"}
    assert describe_run("train.py", tuple(words), False, False, time.time())["arguments"] == shown


def test_the_home_becomes_a_tilde_in_files(redact: Redactor, tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {f"{Path.home()}/a.py:3": [f"see {Path.home()}/b", float("nan"), 1]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"~/a.py:3": ["see ~/b", "nan", 1]}


def test_a_user_called_like_a_common_word_is_no_reason_to_change_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "train")
    assert Redactor()("train loss 0.1") == "train loss 0.1"


def test_the_arguments_of_an_incident_are_redacted_as_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--password", f"{CANARY}-1", "--lr", "0.1"])
    capture(tmp_path, "mlp", step=2)
    (folder,) = incidents_in(tmp_path)
    assert CANARY.encode() not in written(folder)
    assert json.loads((folder / "incident.json").read_text())["script"]["arguments"][2:] == ["--lr", "0.1"]
