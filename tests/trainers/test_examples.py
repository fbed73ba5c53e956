"""The example of every framework runs, and shows what its first line says."""

from __future__ import annotations

import ast
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
SLOW = {"ray"}
FRAMEWORKS = [
    pytest.param(name, marks=[pytest.mark.long] if name in SLOW else [])
    for name in sorted(path.stem.removeprefix("trainer_") for path in EXAMPLES.glob("trainer_*.py"))
]
"""Every `examples/trainer_<framework>.py`."""


def imports(code):
    """The packages that a script imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_an_example_is_skipped_only_for_a_package_that_it_imports():
    code = "import os.path\nfrom lightning.fabric import Fabric\ndef main():\n    import trl as t, torch\n"
    assert set(imports(code)) == {"os", "lightning", "trl", "torch"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_example_runs_offline(framework, tmp_path):
    path = EXAMPLES / f"trainer_{framework}.py"
    if missing := [name for name in imports(path.read_text()) if find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    offline = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    offline |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    offline |= {"RAY_TMPDIR": tempfile.gettempdir()}  # the path of a socket has a limit of 107 characters
    found = forked.run([path], env=forked.environment(**offline), cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    if framework == "trl":
        assert "back to the state before step" in found.stdout
        assert float(re.search(r"loss ([\d.]+) after 180 steps", found.stdout)[1]) < 1.5
    else:
        assert "nonfinite: " in found.stdout or "non-finite" in found.stdout
        applied, steps = map(int, re.search(r"(\d+) of (\d+) steps applied", found.stdout).groups())
        assert applied < steps
    if framework == "ray":
        assert "continues from the checkpoint of step" in found.stdout  # one worker was killed
