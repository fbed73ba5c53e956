"""Targets at the wrong offset from the inputs, and padding that counts in the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recorded import SITE, look, run
from surefoot.diagnose.rules.tokens import target_offset

if TYPE_CHECKING:
    from watched import Nursery

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
VOCAB, LENGTH = 17, 12
walks = (torch.randint(VOCAB, (300, 1)) + torch.randint(1, 5, (300, LENGTH + 3)).cumsum(1)) % VOCAB

class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCAB, 16), nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, VOCAB)
    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])

model = Lm()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""

LOOP = """
for step in range(40):
    rows = walks[torch.randint(len(walks), (16,))]
    loss = loss_of(rows)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def loss_of(goals: str, given: str = "rows[:, :LENGTH]") -> str:
    return f"""
def loss_of(rows):
    ids, goals = {given}, {goals}
    return F.cross_entropy(model(ids)[:, :goals.shape[1]].reshape(-1, VOCAB), goals.reshape(-1))
"""


def test_targets_that_are_the_inputs_of_a_causal_model_are_not_shifted(watch: Nursery) -> None:
    run = watch(MODEL, loss_of("rows[:, :LENGTH]"), LOOP)
    first = run.names_first("loss.target-offset", step=0, at="|return F.cross_entropy", evidence={"same", "following"})
    assert first.evidence["same"] == 1.0
    assert "`ids[:, 1:]`" in first.fixes[0]


@pytest.mark.parametrize("goals", ["rows[:, 2:LENGTH + 2]", "rows[:, 2:LENGTH + 1]"])
def test_targets_two_tokens_later_are_shifted_twice(watch: Nursery, goals: str) -> None:
    run = watch(MODEL, loss_of(goals), LOOP)
    first = run.names_first("loss.target-offset", step=0, at="|return F.cross_entropy", evidence={"second"})
    assert first.evidence["second"] == 1.0


@pytest.mark.parametrize("goals", ["rows[:, 1:LENGTH + 1]", "rows[:, 1:LENGTH]"])
def test_targets_one_token_later_are_right(watch: Nursery, goals: str) -> None:
    run = watch(MODEL, loss_of(goals), LOOP)
    assert run.causes == []
    assert run.loaded[0].sampled_steps[0].calls.losses[0].tokens is not None


def test_a_model_that_sees_the_whole_row_may_have_its_inputs_as_targets(watch: Nursery) -> None:
    """An autoencoder, or one that fills masked tokens."""
    both_ways = MODEL.replace("batch_first=True", "batch_first=True, bidirectional=True").replace(
        "nn.Linear(32", "nn.Linear(64"
    )
    assert watch(both_ways, loss_of("rows[:, :LENGTH]"), LOOP).causes == []


def test_a_second_head_may_look_two_tokens_ahead(watch: Nursery) -> None:
    two_heads = """
second = nn.Linear(32, VOCAB)
optimizer.add_param_group({"params": second.parameters()})
def loss_of(rows):
    hidden = model.rnn(model.embed(rows[:, :LENGTH]))[0]
    one = F.cross_entropy(model.out(hidden).reshape(-1, VOCAB), rows[:, 1:LENGTH + 1].reshape(-1))
    two = F.cross_entropy(second(hidden).reshape(-1, VOCAB), rows[:, 2:LENGTH + 2].reshape(-1))
    return one + two
"""
    assert "loss.target-offset" not in watch(MODEL, two_heads, LOOP).causes


# ── padding ──────────────────────────────────────────────────────────────────────────────────────────────────────────

PADDED = """
lengths = torch.randint(3, 9, (300, 1))
walks = torch.where(torch.arange(LENGTH + 3) < lengths, walks.clamp_min(1), 0)
"""


def padded_loss(call: str) -> str:
    return f"""
def loss_of(rows):
    logits, goals = model(rows[:, :-1]).reshape(-1, VOCAB), rows[:, 1:].reshape(-1)
    return {call}
"""


def test_padding_at_the_end_of_the_rows_that_counts_is_named_with_its_share(watch: Nursery) -> None:
    run = watch(MODEL, PADDED, padded_loss("F.cross_entropy(logits, goals)"), LOOP)
    first = run.names_first("loss.padding-counted", step=0, at="|return F.cross_entropy", evidence={"share"})
    assert 0.4 < float(str(first.evidence["share"])) < 0.8
    assert "`ignore_index=0`" in first.fixes[0]


SHIFTED = """
def loss_of(rows):
    labels = LABELS
    goals = F.pad(labels, (0, 1), value=-100)[:, 1:]  # as models of transformers shift them
    return F.cross_entropy(model(rows).reshape(-1, VOCAB), goals.reshape(-1))
"""


def test_padding_before_the_label_that_a_shift_appends_is_named(watch: Nursery) -> None:
    run = watch(MODEL, PADDED, SHIFTED.replace("LABELS", "rows"), LOOP)
    first = run.names_first("loss.padding-counted", step=0, at="|return F.cross_entropy", evidence={"share"})
    assert 0.4 < float(str(first.evidence["share"])) < 0.8
    assert first.evidence["tail_label"] == 0
    assert watch(MODEL, PADDED, SHIFTED.replace("LABELS", "torch.where(rows == 0, -100, rows)"), LOOP).causes == []


def test_an_ignore_index_that_matches_nothing_is_named(watch: Nursery) -> None:
    run = watch(MODEL, PADDED, padded_loss("F.cross_entropy(logits, goals, ignore_index=-1)"), LOOP)
    assert run.first.cause == "loss.padding-counted"
    assert "the ignore index (-1) matches nothing" in run.first.summary


@pytest.mark.parametrize(
    "call",
    [
        "F.cross_entropy(logits, goals, ignore_index=0)",
        "(F.cross_entropy(logits, goals, reduction='none') * (goals != 0)).sum() / (goals != 0).sum()",
        "F.cross_entropy(logits[goals != 0], goals[goals != 0])",
        "F.cross_entropy(logits, goals, weight=torch.tensor([0.0] + [1.0] * (VOCAB - 1)))",
    ],
)
def test_padding_that_does_not_count_is_no_fault(watch: Nursery, call: str) -> None:
    assert watch(MODEL, PADDED, padded_loss(call), LOOP).causes == []


def test_rows_that_end_in_one_label_while_the_inputs_go_on_are_no_padding(watch: Nursery) -> None:
    """The label says whether something has happened: it stays, once it has."""
    happened = """
def loss_of(rows):
    ids = rows[:, :LENGTH]
    goals = (ids == 3).long().cummax(1).values
    return F.cross_entropy(model(ids).reshape(-1, VOCAB), goals.reshape(-1))
"""
    assert "loss.padding-counted" not in watch(MODEL, happened, LOOP).causes


TIME_FIRST = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
VOCAB = 17
walks = (torch.randint(VOCAB, (16, 1)) + torch.randint(1, 5, (16, 600)).cumsum(1)) % VOCAB
source = walks.t().contiguous()

class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(VOCAB, 16), nn.LSTM(16, 32), nn.Linear(32, VOCAB)
    def forward(self, ids, hidden):
        output, hidden = self.rnn(self.embed(ids), hidden)
        return F.log_softmax(self.out(output).view(-1, VOCAB), dim=1), hidden

model = Lm()
hidden = (torch.zeros(1, 16, 32), torch.zeros(1, 16, 32))
for at in range(0, 480, 12):
    ids, goals = source[at : at + 12], source[at + OFFSET : at + 12 + OFFSET].view(-1)
    model.zero_grad()
    output, hidden = model(ids, tuple(each.detach() for each in hidden))
    loss = F.nll_loss(output, goals)
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-2.0)
"""
"""A model of words with time first, flattened outputs, log-probabilities, and no optimizer."""


@pytest.mark.parametrize(("offset", "causes"), [("0", ["loss.target-offset"]), ("1", [])])
def test_flattened_outputs_with_time_first_are_compared_with_their_inputs(
    watch: Nursery, offset: str, causes: list[str]
) -> None:
    run = watch(TIME_FIRST.replace("OFFSET", offset))
    assert run.causes == causes
    look = next(look for look in run.loaded[0].sampled_steps if look.backward_calls[0].causality is not None)
    assert look.backward_calls[0].causality.from_past > 0 == look.backward_calls[0].causality.from_future


def test_ids_of_an_evaluation_before_the_step_are_not_those_of_its_loss(watch: Nursery) -> None:
    evaluated = LOOP.replace(
        "    loss = loss_of(rows)\n",
        "    with torch.no_grad(): model(walks[:16, :LENGTH])\n    loss = loss_of(rows)\n",
    )
    run = watch(MODEL, loss_of("rows[:, 2:LENGTH + 2]"), evaluated)
    assert len(run.loaded[0].sampled_steps[0].calls.losses[0].tokens or []) == 2
    assert run.causes == ["loss.target-offset"]


@pytest.mark.parametrize(
    ("same", "left_out", "elsewhere", "named"),
    [(1.0, 0.8, 0.7, True), (0.1, 0.8, 0.7, False), (1.0, 0.0, 0.0, False), (1.0, 0.5, 0.0, False)],
    ids=["not masked", "masked", "an autoencoder", "an autoencoder with padding"],
)
def test_targets_of_masked_tokens_must_not_be_in_the_input(
    same: float, left_out: float, elsewhere: float, named: bool
) -> None:
    tokens = {"site": SITE, "index": 1, "positions": 16, "same": same, "following": 0.05, "second": 0.05}
    tails = {"tail_label": -100, "tail_share": 0.0, "tail_elsewhere": elsewhere, "tail_lengths": 4, "tail_padded": 0.0}
    loss = {"op": "cross_entropy", "grad": True, "site": SITE, "reduction": "mean", "ignore_index": -100}
    counts = {"valid": round(768 * (1 - left_out)), "targets": 768, "tokens": [tokens | tails]}
    looks = [look(step, notes={"losses": [loss | counts]}) for step in range(5)]
    assert (target_offset(run(sampled_steps=looks)) is not None) == named


STEP_BY_STEP = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(VOCAB, 16), nn.GRUCell(16, 32), nn.Linear(32, VOCAB)
    def forward(self, ids, state):
        state = self.cell(self.embed(ids), state)
        return self.out(state), state

model = Cell()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

def loss_of(rows):
    state, loss = torch.zeros(len(rows), 32), 0.0
    for t in range(LENGTH):
        output, state = model(rows[:, t], state)
        loss = loss + F.cross_entropy(output, rows[:, t + OFFSET])
    return loss / LENGTH
"""


def test_targets_that_are_the_inputs_of_the_same_time_step_are_not_shifted(watch: Nursery) -> None:
    run = watch(MODEL, STEP_BY_STEP.replace("OFFSET", "0"), LOOP)
    assert run.first.cause == "loss.target-offset"
    assert run.at("|loss = loss + F.cross_entropy") in run.first.where
    assert watch(MODEL, STEP_BY_STEP.replace("OFFSET", "1"), LOOP).causes == []


PLACED = """
class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 16), nn.Embedding(LENGTH, 16)
        self.rnn, self.out = nn.GRU(16, 32, batch_first=True), nn.Linear(32, VOCAB)
    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids) + self.place(torch.arange(ids.shape[1])))[0])

model = Placed()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


def test_targets_are_compared_with_the_tokens_where_positions_are_embedded_too(watch: Nursery) -> None:
    run = watch(MODEL, PLACED, loss_of("rows[:, 2:LENGTH + 2]"), LOOP)
    assert run.first.cause == "loss.target-offset"
    assert watch(MODEL, PLACED, loss_of("rows[:, 1:LENGTH + 1]"), LOOP).causes == []


ONE_BY_ONE = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
text = torch.cat([torch.tensor([3, 1, 4, 1, 5, 0, 2, 6])] * 40)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(7, 16), nn.GRUCell(16, 32), nn.Linear(32, 7)

    def forward(self, token, state):
        state = self.rnn(self.embed(token.view(1)), state)
        return self.out(state), state


model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    state, loss, start = torch.zeros(1, 32), 0, int(torch.randint(300, ()))
    for t in range(start, start + 15):
        scores, state = model(text[t], state)
        loss = loss + F.cross_entropy(scores, text[t + OFFSET].view(1))
    optimizer.zero_grad()
    (loss / 15).backward()
    optimizer.step()
"""


def test_targets_that_are_the_inputs_of_a_sequence_read_one_by_one_are_not_shifted(watch: Nursery) -> None:
    run = watch(ONE_BY_ONE.replace("OFFSET", "0"))
    assert run.first.cause == "loss.target-offset"
    assert run.at("|loss = loss + F.cross_entropy") in run.first.where
    assert watch(ONE_BY_ONE.replace("OFFSET", "1")).causes == []
