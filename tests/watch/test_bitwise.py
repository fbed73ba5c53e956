"""With and without `surefoot run`: output, parameters, buffers, optimizer states, random streams are bit for bit equal.

`benchmarks/bitwise.py` does the same for every script of the zoo.
"""

from pathlib import Path

import pytest
from odd_scripts import ODD

import forked
import patience

DRIVER = Path(__file__).parents[2] / "benchmarks" / "bitwise.py"
PARTS = {"odd": len(ODD)}


@pytest.mark.parametrize("part", PARTS)
def test_watching_changes_no_bit(part):
    result = forked.run([DRIVER, f"--{part}", "--times=1", "--jobs=1", f"--deadline={patience.HANG_SECONDS}"])
    assert "DIFFERS" not in result.stdout, result.stdout
    assert "UNWATCHED" not in result.stdout, result.stdout
    assert f"bitwise equal: {PARTS[part]} of {PARTS[part]} scripts" in result.stdout, result.stdout + result.stderr
