"""A run that may write to few folders only still has its GPU, and the kernels it compiles."""

import time

import pytest
import torch

from surefoot.experiments import processes as children

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SCRIPT = """
import sys
import torch

x = torch.randn(256, 256, device="cuda", requires_grad=True)
def step(x):
    return torch.softmax(x @ x, 1).square().sum()

step = torch.compile(step) if "--compile" in sys.argv else step
step(x).backward()
torch.cuda.synchronize()
open(sys.argv[1], "w").write(str(torch.isfinite(x.grad).all().item()))
"""


@pytest.mark.parametrize("how", ["--eager", "--compile"])
def test_a_confined_run_trains_on_the_gpu(tmp_path, how):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(SCRIPT)
    done = tmp_path / "out" / "done"
    subject = children.Subject("train.py", (str(done), how), folder=tmp_path / "work")
    with children.Children(subject, tmp_path / "out", threads=1) as runs:
        child = runs.start("baseline", {})
        runs.wait(until=time.monotonic() + 900)
    said = (child.folder / children.OUTPUT).read_text()
    assert done.exists(), said
    assert done.read_text() == "True", said
