"""The options of `surefoot run`."""

import pytest

from surefoot.commands.run_options import Request, misplaced, parse


def test_options_take_their_value_in_both_ways(monkeypatch):
    monkeypatch.setenv("HOOK", "http://localhost")
    for words in (
        ["--out", "a", "--tensorboard", "b", "--webhook-env", "HOOK", "--guard", "train.py", "--out", "c"],
        ["--out=a", "--tensorboard=b", "--webhook-env=HOOK", "--guard", "train.py", "--out", "c"],
    ):
        request = parse(words)
        assert isinstance(request, Request)
        assert (request.out, request.tensorboard, request.webhook_env) == ("a", "b", "HOOK")
        assert (request.guard, request.progress, request.eager_looks) == (True, False, False)
        assert (request.target.name, request.target.arguments) == ("train.py", ("--out", "c"))
        assert "--out after train.py was passed to the script" in misplaced(request.target)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--out"], "--out needs a folder: surefoot run --out DIR SCRIPT"),
        (["--webhook-env"], "--webhook-env needs the name of an environment variable"),
        (["--webhook-env", "NOT_SET", "train.py"], "--webhook-env NOT_SET: the environment variable is not set"),
        (["--heartbeat", "soon", "train.py"], "--heartbeat takes a number of seconds; got 'soon'"),
        (["--heartbeat", "60", "train.py"], "--heartbeat needs --webhook-env"),
        (["--unknown", "train.py"], "unknown option --unknown"),
        ([], "no script given"),
    ],
)
def test_wrong_use_is_answered(words, answer, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    assert str(parse(words)).startswith(answer)
