"""Scripts of the zoo, which are written for a CPU, run on CUDA unmodified, and their faults are named there too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surefoot.zoo import find
from surefoot.zoo.device_runs import run_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SCRIPTS = (
    "testing/optim.missing-zero-grad/char_gru",  # draws with a generator
    "testing/model.saturated-units/gate_mixture",  # arrays from NumPy
    "testing/clip.before-unscale/mixed_precision_gru",  # autocast and GradScaler for the CPU
)
PREPARED = """
import numpy as np, torch
from torch.utils.data import DataLoader, TensorDataset, random_split

def draws():
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(5, generator=generator), torch.randperm(9, generator=generator)
    second = torch.empty(4).uniform_(generator=generator), torch.ones(6).multinomial(2, generator=generator)
    loader = DataLoader(TensorDataset(torch.arange(8)), 8, shuffle=True, generator=generator)
    return [*first, *second, *next(iter(loader))]

expected = draws()
from surefoot.zoo.on_device import use_device
use_device(torch.device("cuda"))
for one, other in zip(expected, draws(), strict=True):
    assert other.is_cuda, other
    assert torch.equal(one, other.cpu()), (one, other)
kept = torch.zeros(3)
assert kept.uniform_(generator=torch.Generator()) is kept and kept.any()
assert kept.is_cuda and not torch.zeros(3, device="cpu").is_cuda
assert torch.from_numpy(np.ones(3)).is_cuda
assert np.mean(np.asarray(torch.ones(3))) == torch.ones(3).numpy().mean() == 1
assert len(random_split(range(10), [3, 7])[0]) == 3
packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
assert packed.data.is_cuda and len(packed.data) == 5
with torch.autocast("cpu", dtype=torch.float16):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
with torch._C.DisableTorchFunction():
    assert not torch.from_numpy(np.ones(3)).is_cuda
"""


def test_what_a_script_for_the_cpu_does_is_done_on_the_device() -> None:
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", PREPARED],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_three_scripts_run_on_cuda_and_their_faults_are_named(tmp_path: Path) -> None:
    results = run_all("cuda", [find(name) for name in SCRIPTS], [100], jobs=3, keep=tmp_path, timeout_s=500)
    for result in results:
        assert (result.device, result.cannot_run, result.trouble, result.exit_code) == ("cuda", "", "", 0), result
        assert result.named[:1] == [result.truth], result
        assert result.unwatched == {}, result
