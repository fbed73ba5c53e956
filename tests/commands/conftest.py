"""The command line in this process: its exit code, its stdout and its stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from surefoot.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable


class Answer(NamedTuple):
    code: int
    out: str
    error: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def run(*arguments: object) -> Answer:
        with pytest.raises(SystemExit) as ending:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Answer(int(ending.value.code or 0), printed.out, printed.err)

    return run
