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


PADDED = """
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.attention = nn.Embedding(30, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 2)

    def forward(self, ids):
        x = self.tokens(ids)
        q, k, v = self.mix(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        x = x + (ATTENTION)
        return self.head(x[:, 0])

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(40):
    ids = torch.randint(1, 30, (24, 12))
    lengths = torch.randint(3, 11, (24, 1))
    ids[torch.arange(12) >= lengths] = 0
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids), (ids < 9).sum(1) % 2).backward()
    optimizer.step()
"""
MODULE = "self.attention(x, x, x, key_padding_mask=MASK)[0]"
FUNCTION = "nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(MASK)[:, None])"
BY_HAND = "scores.masked_fill((MASK)[:, None], -1e9).softmax(-1) @ v"


@pytest.mark.parametrize(
    ("attention", "inverted", "fix"),
    [
        (MODULE, "ids != 0", "pass `ids == 0`"),
        (FUNCTION, "ids == 0", "pass `ids != 0`"),
        (BY_HAND, "ids != 0", "minus infinity where `ids == 0`"),
    ],
    ids=["module", "function", "by hand"],
)
def test_a_padding_mask_with_the_wrong_polarity_is_named(
    watch: Nursery, attention: str, inverted: str, fix: str
) -> None:
    script = PADDED.replace("ATTENTION", attention.replace("MASK", inverted))
    found = watch(script).names_first("mask.inverted", step=0, at="|x = x + (", evidence={"kept", "ignored"})
    assert found.evidence["kept_id"] == 0
    assert fix in found.fixes[0]
    right = {"ids != 0": "ids == 0", "ids == 0": "ids != 0"}[inverted]
    assert "mask.inverted" not in watch(PADDED.replace("ATTENTION", attention.replace("MASK", right))).causes


def test_packed_documents_that_see_only_themselves_are_not_inverted(watch: Nursery) -> None:
    documents = "(ids == 0)[:, :, None] == (ids == 0)[:, None]"
    script = PADDED.replace("ATTENTION", FUNCTION.replace("(MASK)[:, None]", documents))
    assert "mask.inverted" not in watch(script).causes


def test_ids_of_one_kind_for_all_tokens_do_not_make_a_right_mask_look_inverted(watch: Nursery) -> None:
    """A language or speaker id is the same for all tokens, and 0 for padding: the mask keeps a single id of it."""
    script = PADDED.replace("ATTENTION", MODULE.replace("MASK", "ids == 0"))
    known = "        x = x + ("
    assert known in script
    language = "        x = x + nn.functional.embedding((ids != 0).long() * 7, torch.ones(8, x.shape[-1]))\n"
    assert "mask.inverted" not in watch(script.replace(known, language + known)).causes
