"""Labels that say nothing, and classes that are never predicted, from recorded facts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from recorded import SITE, completed, described, facts_of, look, moves, run
from surefoot.diagnose.rules import data_labels, not_learning
from surefoot.diagnose.run import RecordedRun
from surefoot.record.facts import LayerCall

if TYPE_CHECKING:
    from watched import Nursery


def class_loss(step: int, labels: dict[str, int], predicted: dict[str, int], value: float = 0.7) -> dict[str, Any]:
    base = {"step": step, "op": "cross_entropy", "grad": True, "site": SITE, "reduction": "mean", "value": value}
    return base | {"labels": labels, "predicted": predicted, "unit_spread": 0.3, "target": described(0, 1)}


def test_a_rare_class_that_is_never_predicted_has_collapsed() -> None:
    notes = [class_loss(s, {"0": 58, "1": 6}, {"0": 64}) for s in (10, 40, 60, 90)]
    claim = data_labels.class_collapse(run(sampled_steps=[look(n["step"], notes={"losses": [n]}) for n in notes]))
    assert claim is not None
    assert claim.severity == "error"


def test_a_rare_class_that_is_predicted_about_as_often_as_it_occurs_is_fine() -> None:
    notes = [class_loss(s, {"0": 58, "1": 6}, {"0": 60, "1": 4}) for s in (10, 40, 60, 90)]
    assert (
        data_labels.class_collapse(run(sampled_steps=[look(n["step"], notes={"losses": [n]}) for n in notes])) is None
    )


def paired_run(shuffled: bool, ratio: float = 0.01) -> Any:
    chooser = random.Random(3)
    looks = []
    for step in range(8):
        x = [[chooser.gauss(0, 1) for _ in range(4)] for _ in range(32)]
        y = [int(chooser.random() < 0.5) if shuffled else int(row[0] + row[1] > 0) for row in x]
        counts = {"0": y.count(0), "1": y.count(1)}
        root = {"value": 0.69, "parameters": [0], "site": SITE, "pairs": {"x": x, "y": y}}
        note = class_loss(step * 10, counts, counts, value=0.69)
        looks.append(look(step * 10, roots=[root], notes={"losses": [note]}, steps=moves(ratio)))
    return run([0.69] * 100, sampled_steps=looks)


def test_of_rows_of_different_lengths_those_of_the_most_frequent_one_are_compared() -> None:
    inputs = [[[float(step), float(i)] if i % 3 else [float(i)] * 5 for i in range(30)] for step in range(4)]
    roots = [{"value": 0.69, "site": SITE, "pairs": {"x": x, "y": [0] * 30}} for x in inputs]
    found = data_labels.known_pairs(run(sampled_steps=[look(i, roots=[root]) for i, root in enumerate(roots)]))
    assert len(found) == 80
    assert {len(row) for row, _ in found} == {2}


def test_labels_that_do_not_follow_from_the_inputs_are_uninformative() -> None:
    assert data_labels.labels_uninformative(paired_run(shuffled=True)) is not None


def test_a_run_stuck_at_chance_on_labels_that_do_follow_has_another_cause() -> None:
    assert data_labels.labels_uninformative(paired_run(shuffled=False)) is None


def test_weights_that_hardly_move_say_nothing_about_the_labels() -> None:
    assert data_labels.labels_uninformative(paired_run(shuffled=True, ratio=1e-6)) is None


def test_labels_that_are_positions_in_the_batch_belong_to_no_row() -> None:
    held = paired_run(shuffled=True)
    for seen in held.facts.sampled_steps:
        (loss,) = seen.calls.losses
        places = {"labels": {str(i): 1 for i in range(32)}, "valid": 32, "label_range": (0, 31)}
        seen.calls.losses[:] = [replace(loss, value=3.4, **places)]
        seen.backward_calls[:] = [replace(seen.backward_calls[0], value=3.4)]
    high = RecordedRun(replace(held.facts, optimizers=facts_of([3.4] * 100).optimizers))
    assert data_labels.at_chance(high) is not None
    assert data_labels.labels_uninformative(high) is None


def test_labels_that_the_model_foretells_are_informative() -> None:
    held = paired_run(shuffled=True)
    assert data_labels.labels_uninformative(held) is not None
    for seen in held.facts.sampled_steps:
        seen.calls.losses[:] = [replace(loss, accuracy=0.95) for loss in seen.calls.losses]
    assert data_labels.labels_uninformative(RecordedRun(held.facts)) is None


def test_a_recurrent_network_over_long_sequences_may_begin_to_learn_late() -> None:
    """The adding problem: two of 40 elements make the target, which comparing whole rows does not show."""
    layer = {"op": "gru", "module": "rnn", "site": SITE, "grad": True, "time_steps": 40, "sequences": 32}
    held = paired_run(shuffled=True)
    read = [completed(LayerCall, layer | {"step": seen.step, "index": 0}) for seen in held.facts.sampled_steps]
    for seen, call in zip(held.facts.sampled_steps, read, strict=True):
        seen.calls.layers[:] = [LayerCall.from_json(call | {"step": seen.step})]
        seen.calls.losses[:] = [replace(loss, target=replace(loss.target, shape=[32])) for loss in seen.calls.losses]
    assert data_labels.labels_uninformative(held) is None
    assert not_learning.not_learning(held) is None
    assert "can begin to learn late" in not_learning.why_unjudged(held)
    for seen in held.facts.sampled_steps:
        seen.calls.losses[:] = [
            replace(loss, target=replace(loss.target, shape=[32, 40])) for loss in seen.calls.losses
        ]
    at_each_step = RecordedRun(held.facts)
    assert not_learning.not_learning(at_each_step) is not None, "a language model has a target at every step"


TOKENS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
following = torch.randint(0, 12, (12, 2))
text = [0]
for _ in range(4000):
    text.append(int(following[text[-1], torch.randint(2, (1,))]))
text = torch.tensor(text)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.gru, self.head = nn.Embedding(12, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 12)

    def forward(self, ids):
        return self.head(self.gru(self.table(ids))[0])


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(120):
    start = torch.randint(len(text) - 20, (16, 1)) + torch.arange(16)
    x, y = text[start], text[start + 1]
    MIX
    loss = F.cross_entropy(model(x).flatten(0, 1), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("mix", ["y = y[torch.randperm(16)]", "y = y.t()"])
def test_labels_that_do_not_belong_to_their_sequences_are_named(watch: Nursery, mix: str) -> None:
    run = watch(TOKENS.replace("MIX", mix))
    assert run.first.cause == "data.labels-uninformative"
    assert abs(run.first.evidence["agreement"] - run.first.evidence["agreement_shuffled"]) < 0.05


def test_labels_that_follow_their_ids_are_not(watch: Nursery) -> None:
    assert watch(TOKENS.replace("MIX", "pass")).causes == []


PAIRS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
hidden = torch.randn(600, 6)
left, right = hidden @ torch.randn(6, 12), torch.tanh(hidden @ torch.randn(6, 10))
one = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
two = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=3e-3)
for step in range(150):
    rows = torch.randint(600, (32,))
    scores = F.normalize(one(left[rows]), dim=1) @ F.normalize(two(right[PARTNERS]), dim=1).t() / TEMPERATURE
    loss = F.cross_entropy(scores, torch.arange(32))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_pairs_that_do_not_belong_together_are_named(watch: Nursery) -> None:
    run = watch(PAIRS.replace("PARTNERS", "torch.randint(600, (32,))").replace("TEMPERATURE", "0.1"))
    assert run.first.cause == "data.labels-uninformative"
    assert run.first.evidence["matched_by_chance"] == 1 / 32


def test_pairs_that_belong_together_are_not(watch: Nursery) -> None:
    assert watch(PAIRS.replace("PARTNERS", "rows").replace("TEMPERATURE", "0.1")).causes == []


def test_similarities_divided_by_a_large_temperature_have_bounds(watch: Nursery) -> None:
    run = watch(PAIRS.replace("PARTNERS", "rows").replace("TEMPERATURE", "50.0"))
    assert run.first.cause == "loss.bounded-output"
    assert run.first.evidence["bound"] < 0.021


TEXT = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
following = torch.randint(0, 20, (20, 2))
text = torch.zeros(12, 4000, dtype=torch.long)
for at in range(1, 4000):
    text[:, at] = following[text[:, at - 1], torch.randint(0, 2, (12,))]
embedding, layer, head = nn.Embedding(20, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 20)
optimizer = torch.optim.Adam([*embedding.parameters(), *layer.parameters(), *head.parameters()], lr=3e-3)
for step in range(60):
    ids, labels = text[:, 16 * step : 16 * step + 16], text[:, 16 * step + 1 : 16 * step + 17]
    outputs = head(layer(embedding(ids))[0])
    loss = F.cross_entropy(OUTPUTS, LABELS)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ROWS, COLUMNS = "outputs.reshape(-1, 20)", "outputs.transpose(0, 1).reshape(-1, 20)"


def test_labels_in_another_order_than_the_outputs_are_named(watch: Nursery) -> None:
    run = watch(TEXT.replace("OUTPUTS", ROWS).replace("LABELS", "labels.t().reshape(-1)"))
    run.names_first("data.labels-uninformative", step=0, at="|F.cross_entropy", evidence={"crossed", "outputs_follow"})


@pytest.mark.parametrize(
    ("outputs", "labels"), [(ROWS, "labels.reshape(-1)"), (COLUMNS, "labels.t().reshape(-1)")], ids=["rows", "columns"]
)
def test_labels_in_the_order_of_the_outputs_are_fine(watch: Nursery, outputs: str, labels: str) -> None:
    assert watch(TEXT.replace("OUTPUTS", outputs).replace("LABELS", labels)).causes == []


def test_a_class_below_one_half_in_rows_that_are_distinguished_is_only_mentioned() -> None:
    def severity(value: float) -> str:
        notes = [class_loss(s, {"0": 52, "1": 12}, {"0": 64}, value) for s in (10, 40, 60, 90)]
        held = run(sampled_steps=[look(n["step"], notes={"losses": [n]}) for n in notes])
        claim = data_labels.class_collapse(held)
        assert claim is not None
        return claim.severity

    assert severity(0.48) == "error", "the entropy of the labels is 0.483: rows are not distinguished"
    assert severity(0.43) == "info"


RATINGS = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
users, items = torch.randint(60, (2000,)), torch.randint(50, (2000,))
taste, kind = torch.randn(60, 4), torch.randn(50, 4)
liked = ((taste[users] * kind[items]).sum(1) > 0).float()
rated = torch.stack([users, items], 1)
class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(60, 16), nn.Embedding(50, 16)
    def forward(self, ids): return (self.user(ids[:, 0]) * self.item(ids[:, 1])).sum(1) / 4
model = Factors()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(150):
    rows = torch.randint(2000, (64,))
    loss = F.binary_cross_entropy_with_logits(model(rated[rows]), liked[rows])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_ids_that_are_close_to_each_other_need_not_share_a_label(watch: Nursery) -> None:
    assert "data.labels-uninformative" not in watch(RATINGS).causes


COMPARED = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
kinds = torch.randint(4, (2, 2000))
first, second = (3 * torch.eye(4)[each].repeat(1, 3) + torch.randn(2000, 12) for each in kinds)
same = torch.where(torch.rand(2000) < 0.4, torch.randint(2, (2000,)).bool(), kinds[0] == kinds[1]).float()
class Compare(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(12, 8), nn.Linear(8, 1)
    def forward(self, one, other): return self.out((self.body(one) - self.body(other)).abs()).squeeze(1)
model = Compare()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    rows = torch.randint(2000, (64,))
    loss = F.binary_cross_entropy_with_logits(model(first[rows], second[rows]), same[rows])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_labels_of_pairs_are_not_looked_for_in_one_of_the_two(watch: Nursery) -> None:
    assert "data.labels-uninformative" not in watch(COMPARED).causes
