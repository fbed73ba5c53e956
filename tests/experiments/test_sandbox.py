"""Whether this system can confine a process, and how it is asked to."""

import json
import sys

from surefoot.experiments import sandbox


def test_the_command_begins_with_the_folders_that_may_be_written(tmp_path):
    words = sandbox.confined([str(tmp_path)])
    if not sandbox.can_confine():
        assert words == []
        return
    assert words[0] == sys.executable
    assert json.loads(words[-2]) == [str(tmp_path)]
    assert words[-1] == "--"


def test_what_is_not_protected_is_printed_once(capsys):
    sandbox.warn_if_unconfined()
    said = capsys.readouterr().err
    assert ("cannot confine" in said) == (not sandbox.can_confine())
