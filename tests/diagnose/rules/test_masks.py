"""Masks of attention, on real scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recorded import run
from surefoot.diagnose.rules import masks

if TYPE_CHECKING:
    from watched import Nursery


ATTENTION = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 16), nn.Embedding(10, 16)
        self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 12)

    def forward(self, ids):
        given = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        query, key, value = self.mix(given).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / 4
        MASK
        return self.head(given + scores.softmax(-1) @ value)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    ids = (torch.randint(12, (16, 1)) + torch.arange(11) * torch.randint(1, 3, (16, 1))) % 12
    if step == PAD:
        ids[:2] = 0
    given, target = GIVEN
    optimizer.zero_grad()
    loss = F.cross_entropy(model(given).transpose(1, 2), target)
    loss.backward()
    optimizer.step()
"""
NEXT = "ids[:, :-1], ids[:, 1:]"
CAUSAL = "scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)"


def attention(mask: str, given: str = NEXT, pad: int = -1) -> str:
    return ATTENTION.replace("MASK", mask).replace("GIVEN", given).replace("PAD", str(pad))


def test_rows_with_every_key_masked_are_counted_at_their_step(watch: Nursery) -> None:
    strict = f"{CAUSAL}; scores = scores.masked_fill((ids == 0).all(1)[:, None, None], -torch.inf)"
    run = watch(attention(strict, pad=20))
    found = run.names_first("mask.fully-masked-row", step=20, at="|scores.softmax(", evidence={"masked_rows"})
    assert found.evidence["masked_rows"] == 20


def test_a_causal_mask_is_fine(watch: Nursery) -> None:
    assert watch(attention(CAUSAL)).causes == []


def test_a_row_masked_with_large_finite_numbers_is_fine(watch: Nursery) -> None:
    finite = f"{CAUSAL}; scores = scores.masked_fill((ids == 0).all(1)[:, None, None], -1e9)"
    run = watch(attention(finite, pad=20))
    assert not {"mask.fully-masked-row", "loss.undefined-op"} & set(run.causes)


def test_a_next_token_model_without_a_mask_sees_the_future(watch: Nursery) -> None:
    run = watch(attention("pass"))
    found = run.names_first(
        "mask.leaks-future", step=1, at="model", evidence={"from_future", "from_past", "positions", "model"}
    )
    assert found.evidence["from_future"] > 0


def test_a_tagger_may_look_both_ways(watch: Nursery) -> None:
    run = watch(attention("pass", given="ids[:, :-1], ids[:, :-1] // 2"))
    assert "mask.leaks-future" not in run.causes


def test_a_masked_language_model_may_look_both_ways(watch: Nursery) -> None:
    given = "ids[:, 1:].where(torch.rand(16, 10) > 0.15, 11), ids[:, 1:]"
    run = watch(attention("pass", given=given))
    assert "mask.leaks-future" not in run.causes


@pytest.mark.parametrize(("below", "is_masked"), [("Baddbmm", True), ("Addmm", False)])
def test_a_layer_that_overflows_to_minus_infinity_is_not_a_mask(below: str, is_masked: bool) -> None:
    bad = {"event": "nonfinite-loss", "step": 2, "value": "nan", "kind": "operation", "op": "LogSoftmax"}
    event = bad | {"inputs": {}, "masked_rows": 16, "below": [below]}
    claim = masks.fully_masked_row(run([1.0, 1.0, float("nan")], events=[event]))
    assert (claim is not None) == is_masked
