"""Models that mix the rows of a batch by mistake, and models that do so on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery

LOSS = "loss_of = F.cross_entropy"
IMAGES = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 1, 6, 6)
y = x.flatten(1)[:, :3].argmax(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(288, 3)

    def forward(self, images):
        hidden = F.relu(self.conv(images))
        return self.head(FLAT)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""
WORDS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randint(20, (256, LENGTH))
y = (x[:, 0] + x[:, 3] > 19).long()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Parameter(torch.randn(LENGTH, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 2, 48, dropout=0.0, batch_first=FIRST)
        self.body, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 2)

    def forward(self, ids):
        hidden = self.words(ids) + self.places
        return self.head(BODY)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
"""
PLAIN, TURNED = "self.body(hidden).mean(1)", "self.body(hidden.transpose(0, 1)).transpose(0, 1).mean(1)"


def words(body: str, first: bool, length: int = 10) -> str:
    return WORDS.replace("BODY", body).replace("FIRST", str(first)).replace("LENGTH", str(length))


@pytest.mark.parametrize(
    "flat", ["hidden.permute(1, 0, 2, 3).reshape(32, -1)", "hidden.transpose(0, 1).contiguous().view(32, 288)"]
)
def test_a_reshape_across_rows_is_named_with_its_line(watch: Nursery, flat: str) -> None:
    run = watch(IMAGES.replace("FLAT", flat), LOSS, LOOP)
    found = run.names_first("model.mixes-rows", step=1, at="|return self.head(", evidence={"calls", "from_others"})
    assert found.evidence["rows"] == 32
    assert found.evidence["from_others"] > 0.3 * found.evidence["from_own"]
    assert "`.flatten(1)`" in found.fixes[0]


SEQUENCES = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 7, 4)
y = (x[:, :, 0].sum(1) > 0).long()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(4, 12, batch_first=True), nn.Linear(12, 2)

    def forward(self, given):
        hidden = self.body(given)[0]
        return self.head(LAST)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


def test_a_reshape_that_takes_rows_for_time_steps_is_named(watch: Nursery) -> None:
    run = watch(SEQUENCES.replace("LAST", "hidden.reshape(7, 32, 12)[-1]"), LOSS, LOOP)
    found = run.names_first("model.mixes-rows", step=1, at="|return self.head(", evidence={"calls"})
    assert found.evidence["calls"] == ["reshape", "getitem"]
    assert found.summary.startswith("`reshape` at ")


BOTH_WAYS = (
    SEQUENCES.replace("nn.GRU(4, 12, batch_first=True)", "nn.LSTM(4, 6, batch_first=True, bidirectional=True)")
    .replace("hidden = self.body(given)[0]", "states = self.body(given)[1][0]")
)  # fmt: skip


def test_last_states_that_a_view_puts_into_other_rows_are_named_by_their_shapes(watch: Nursery) -> None:
    """The input of the layer has no gradient, so that nothing before the view can be measured."""
    run = watch(BOTH_WAYS.replace("LAST", "states.view(32, 12)"), LOSS, LOOP)
    found = run.names_first("model.mixes-rows", step=1, at="|return self.head(", evidence={"calls", "shapes"})
    assert found.evidence["shapes"] == [[2, 32, 6], [32, 12]]
    assert "`.transpose(0, 1)`" in found.fixes[0]


@pytest.mark.parametrize(
    "last",
    [
        "torch.cat([*states], 1)",
        "states.transpose(0, 1).reshape(32, 12)",
        "states.view(1, 2, 32, 6)[-1].sum(0).repeat(1, 2)",
    ],
)
def test_last_states_that_stay_in_their_rows_are_fine(watch: Nursery, last: str) -> None:
    assert "model.mixes-rows" not in watch(BOTH_WAYS.replace("LAST", last), LOSS, LOOP).causes


def test_a_reshape_of_the_data_that_stands_for_a_transposition_is_named(watch: Nursery) -> None:
    net = SEQUENCES.replace(", batch_first=True", "").replace("self.body(given)", "self.body(given.reshape(7, 32, 4))")
    run = watch(net.replace("LAST", "hidden[-1]"), LOSS, LOOP)
    found = run.names_first("model.mixes-rows", step=1, at="|given.reshape(7, 32, 4)", evidence={"shapes"})
    assert found.evidence["shapes"] == [[32, 7, 4], [7, 32, 4]]
    turned = net.replace("given.reshape(7, 32, 4)", "given.transpose(0, 1)").replace("LAST", "hidden[-1]")
    assert "model.mixes-rows" not in watch(turned, LOSS, LOOP).causes


def test_features_as_many_as_rows_are_not_taken_for_rows(watch: Nursery) -> None:
    """Each of 4 parts of a row gets 32 features, and a batch has 32 rows."""
    net = NET.replace("nn.Linear(8, 32)", "nn.Unflatten(1, (4, 2)), nn.Flatten(0, 1), nn.Linear(2, 32)")
    net = net.replace("nn.Linear(32, 3)", "nn.Unflatten(0, (32, 4)), nn.Flatten(1), nn.Linear(128, 3)")
    assert watch(CLASSES, net, LOSS, LOOP).causes == []
    assert watch(CLASSES, net.replace("nn.Unflatten(0, (32, 4)), nn.Flatten(1)", "Rows()").replace(
        "model =", "class Rows(nn.Module):\n    def forward(self, x):\n        return x.view(32, 128)\n\nmodel ="
    ), LOSS, LOOP).causes == []  # fmt: skip


@pytest.mark.parametrize("last", ["hidden[:, -1]", "hidden.transpose(0, 1)[-1]"])
def test_the_last_time_step_of_each_row_is_fine(watch: Nursery, last: str) -> None:
    assert "model.mixes-rows" not in watch(SEQUENCES.replace("LAST", last), LOSS, LOOP).causes


def test_a_reshape_that_keeps_the_rows_is_fine(watch: Nursery) -> None:
    assert watch(IMAGES.replace("FLAT", "hidden.permute(0, 2, 3, 1).reshape(32, -1)"), LOSS, LOOP).causes == []


def test_a_softmax_over_the_rows_is_named_and_not_called_raw_scores(watch: Nursery) -> None:
    net = NET.replace("nn.Linear(32, 3))", "nn.Linear(32, 3), nn.LogSoftmax(dim=0))").replace("8, 32", "8, 24")
    run = watch(CLASSES, net.replace("Linear(32, 3)", "Linear(24, 3)"), "loss_of = F.nll_loss", LOOP)
    found = run.names_first("model.mixes-rows", step=1, at="|loss = loss_of(", evidence={"calls"})
    assert found.evidence["calls"] == ["log_softmax"]
    assert "`dim=-1`" in found.fixes[0]
    assert "loss.logits-into-probability-loss" not in run.causes


def test_a_softmax_over_as_many_rows_as_a_layer_has_units_is_named_by_its_values(watch: Nursery) -> None:
    net = NET.replace("nn.Linear(32, 3))", "nn.Linear(32, 3), nn.LogSoftmax(dim=0))")
    data = CLASSES.replace("256, 8", "256, 32")
    run = watch(data, net.replace("8, 32", "32, 32"), "loss_of = F.nll_loss", LOOP)
    found = run.names_first("model.mixes-rows", step=0, at="|loss = loss_of(", evidence={"column_error", "rows"})
    assert found.evidence["column_error"] < 1e-3 < found.evidence["log_sum_error"]
    assert "loss.logits-into-probability-loss" not in run.causes


def test_both_directions_of_a_similarity_matrix_are_fine(watch: Nursery) -> None:
    pairs = """
        left, right = nn.Linear(8, 16), nn.Linear(8, 16)
        optimizer = torch.optim.Adam([*left.parameters(), *right.parameters()], lr=1e-2)
        for step in range(60):
            rows = torch.randint(len(x), (32,))
            scores = F.normalize(left(x[rows])) @ F.normalize(right(x[rows] + 0.1)).T * 10
            loss = F.nll_loss(scores.log_softmax(0), torch.arange(32))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """
    assert "model.mixes-rows" not in watch(CLASSES, pairs).causes


def test_attention_over_the_rows_is_named(watch: Nursery) -> None:
    run = watch(words(PLAIN, first=False), LOSS, LOOP)
    found = run.names_first("model.mixes-rows", step=1, at="|return self.head(", evidence={"calls", "has_positions"})
    assert "batch_first=True" in found.fixes[0]


def test_attention_over_the_rows_is_named_although_no_word_reaches_the_output(watch: Nursery) -> None:
    run = watch(words("self.body(torch.cat([0 * hidden[:, :1] + self.places[0], hidden], 1))[:, 0]", False), LOSS, LOOP)
    assert run.first.cause == "model.mixes-rows"


@pytest.mark.parametrize(("body", "first", "length"), [(PLAIN, True, 10), (TURNED, False, 10), (PLAIN, True, 32)])
def test_attention_over_positions_is_fine(watch: Nursery, body: str, first: bool, length: int) -> None:
    assert "model.mixes-rows" not in watch(words(body, first, length), LOSS, LOOP).causes


TWO_LAYERS = """
near = (torch.rand(32, 32) < 0.1).float() + torch.eye(32)
near = near / near.sum(1, keepdim=True)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 3)

    def forward(self, given):
        hidden = F.relu(self.first(given))
        return self.second(COMBINED)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""
ON_PURPOSE = {
    "batch norm": NET.replace("nn.ReLU()", "nn.BatchNorm1d(32), nn.ReLU()"),
    "graph": TWO_LAYERS.replace("COMBINED", "near @ hidden"),
    "rows shuffled": TWO_LAYERS.replace("COMBINED", "hidden[torch.randperm(len(hidden))]"),
    "shuffled rows mixed in": TWO_LAYERS.replace(
        "COMBINED", "0.8 * hidden + 0.2 * hidden[torch.randperm(len(hidden))]"
    ),
}


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_rows_that_are_combined_on_purpose_are_fine(watch: Nursery, name: str) -> None:
    assert "model.mixes-rows" not in watch(CLASSES, ON_PURPOSE[name], LOSS, LOOP).causes


WINDOWS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(120):
    signals = torch.randn(16, 64)
    windows = signals.reshape(-1, 16)  # four windows of each signal
    optimizer.zero_grad()
    F.mse_loss(model(windows), windows.mean(1, keepdim=True)).backward()
    optimizer.step()
"""


def test_signals_that_are_cut_into_windows_are_fine(watch: Nursery) -> None:
    assert watch(WINDOWS).causes == []
