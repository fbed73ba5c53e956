"""From the call of an embedding or a loss to the finding. The CPU stands in for a device; see `tests/gpu`, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from watched import Nursery

TRAIN = """
import torch
import torch.nn.functional as F
from torch import nn
from surefoot.watch.patches import indexing

indexing.has_streams = lambda device: True  # as if the CPU ran behind the host

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        return self.head(self.wte(tokens))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    tokens, labels = torch.randint(50, (8, 16)), torch.randint(10, (128,))
    if step == 25:
        FAULT
    try:
        loss = LOSS(model(tokens).view(-1, 10), labels)
    except IndexError:  # a device reports it later
        raise torch.AcceleratorError("CUDA error: device-side assert triggered") from None
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOSSES = {
    "cross_entropy": "F.cross_entropy",
    "nll_loss": "(lambda scores, labels: F.nll_loss(scores.log_softmax(1), labels))",
    "a module": "nn.CrossEntropyLoss(ignore_index=-1)",
}


def test_an_id_is_named_with_its_table_step_and_line(watch: Nursery) -> None:
    run = watch(TRAIN.replace("FAULT", "tokens[3, 5] = 50").replace("LOSS", "F.cross_entropy"))
    assert run.facts["problems"] == {}
    assert (run.first.cause, run.first.step) == ("data.token-mismatch", 25)
    assert " to 50 at train.py:15, but the embedding has 50 rows" in run.first.summary
    assert "at step 25 (`tokens` in `wte.weight`), and was reported at train.py:27." in run.first.summary


@pytest.mark.parametrize("loss", LOSSES)
def test_a_label_is_named_with_its_classes_step_and_line(watch: Nursery, loss: str) -> None:
    run = watch(
        TRAIN.replace("FAULT", "labels[7] = 10; labels[8] = -1 if 'ignore' in 'LOSS' else 0").replace(
            "LOSS", LOSSES[loss]
        )
    )
    assert run.facts["problems"] == {}
    assert (run.first.cause, run.first.step) == ("data.label-out-of-range", 25)
    assert "Labels run from 0 to 10 at train.py:25" in run.first.summary
    assert "10 outputs" in run.first.summary


def test_where_the_cpu_is_the_cpu_nothing_is_observed(watch: Nursery) -> None:
    text = TRAIN.replace("FAULT", "assert type(F.embedding.__code__.co_consts) is tuple")
    hooked = "print(any('Hook' in type(each).__name__ for each in F.embedding.__code__.co_consts))\n"
    text = text.replace("LOSS", "F.cross_entropy") + hooked
    assert watch(text).output.split() == ["True"]
    assert watch(text.replace("indexing.has_streams", "unused")).output.split() == ["False"]
