"""The real DeepSpeed under Transformers and Accelerate: watched, and one line says that nothing is guarded.

Skipped unless DeepSpeed is installed: it is no part of `dev`. `pip install --constraint constraints.txt deepspeed`.
Lightning refuses DeepSpeed without a CUDA device.
"""

from __future__ import annotations

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

import forked
from trainers import deepspeed_runs

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.mark.parametrize("framework", ["transformers", "accelerate"])
def test_the_losses_are_logged_and_one_line_says_that_nothing_is_guarded(tmp_path, framework):
    path = os.pathsep.join([str(Path(__file__).parents[1]), forked.SOURCE])
    ended = forked.run([deepspeed_runs.__file__, framework, tmp_path], env=forked.environment(PYTHONPATH=path))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert [line for line in found["said"] if "not guarded" in line] == [
        "surefoot: DeepSpeed runs the optimizer step itself, so steps are not guarded: losses are logged, "
        "but bad steps are not skipped."
    ]
    assert len(found["logged"]) == deepspeed_runs.STEPS
    assert found["logged"][:4] == pytest.approx(found["losses"][:4], abs=1e-3)
    assert math.isnan(found["logged"][4])  # the step was applied, and the log does not hide it
    assert math.isnan(found["losses"][4])
