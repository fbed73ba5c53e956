"""Failures on a GPU: the script asks for one, and an index out of range while shrinking kills nothing."""

import pytest
import torch
from torch import nn

import surefoot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_backward_fails_alone_on_the_device(tmp_path):
    net, x = nn.Linear(8, 4).cuda(), torch.randn(16, 8, device="cuda")

    def step():
        with torch.autocast("cuda", torch.float16):
            return torch.sqrt(net(x) * 0).sum()

    made = surefoot.export_reproduction(step, tmp_path, model=net)
    assert made.checked.startswith("reproduced: the backward of torch.sqrt made ")
    assert 'device="cuda"' in made.script.read_text()


def test_a_table_is_cut_without_an_index_out_of_range(tmp_path):
    table, tokens = nn.Embedding(500, 32).cuda(), torch.tensor([[4, 499, 17]], device="cuda")
    with torch.no_grad():
        table.weight[499, 3] = torch.nan
    made = surefoot.export_reproduction(lambda: table(tokens).mean(), tmp_path, model=table)
    assert made.checked == "reproduced: F.embedding made 1 NaN of 1 values"
    assert float(torch.ones(3, device="cuda").sum()) == 3.0
