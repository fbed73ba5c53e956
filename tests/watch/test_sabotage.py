"""A crash inside the watching never reaches the script: every probe is made to raise in turn."""

from pathlib import Path

import forked


def test_every_probe_may_fail_and_the_script_continues_the_same():
    driver = Path(__file__).with_name("sabotage.py")  # without an argument it also goes through every function
    result = forked.run([driver, "probe"])
    assert "FAILED" not in result.stdout, result.stdout
    assert result.returncode == 0, result.stdout + result.stderr
    assert "cases went unnoticed" in result.stdout
