"""A reproduction is believed only if it fails by itself, without surefoot, exactly as it says."""

import pytest

from surefoot.replay.export.check import fails_alone
from surefoot.replay.export.folder import SCRIPT


@pytest.mark.parametrize(
    ("lines", "alone", "words"),
    [
        ("import sys\nsys.exit('reproduced: 1 NaN')", True, "reproduced: 1 NaN"),
        ("import sys\nsys.exit('reproduced: 1 NaN, recorded were 2')", False, "reproduced: 1 NaN, recorded were 2"),
        ("print('not reproduced')", False, "not reproduced"),
        ("import surefoot", False, "ImportError: a reproduction must not need surefoot"),
    ],
)
def test_the_script_is_run_alone(tmp_path, lines, alone, words):
    (tmp_path / SCRIPT).write_text(lines)
    assert fails_alone(tmp_path) == (alone, words)
