"""The data of every step, read off the graph of its loss; see `tests/gpu` for what a device changes."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from surefoot.watch.batch_numbers import LargestNumbers
from surefoot.watch.measuring_budget import MeasuringBudget
from surefoot.watch.step_data import StepData


def trained(data: StepData, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model = nn.Linear(3, 2)
    for number, (inputs, labels) in enumerate(batches):
        data.note(nn.functional.cross_entropy(model(inputs), labels), "line 1", number, number + 1)


def test_equal_batches_have_equal_fingerprints_and_labels_are_counted():
    inputs, labels = torch.randn(4, 3), torch.tensor([0, 1, 1, 1])
    data = StepData(MeasuringBudget())
    trained(data, [(inputs, labels), (inputs + 1, labels), (inputs.clone(), labels)])
    first, second, third = data.as_facts().batches
    assert first.input_print == third.input_print != second.input_print
    assert first.labels == {"0": 1, "1": 3}
    assert [each.step for each in (first, second, third)] == [0, 1, 2]
    (rows,) = data.as_facts().rows.values()
    assert len(rows.prints) == 8
    assert rows.whole


def test_once_not_every_step_is_measured_no_batch_is_noted_and_the_rows_are_not_all_known():
    budget = MeasuringBudget()
    data = StepData(budget)
    batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 1])
    trained(data, [batch])
    budget.measured_all = False
    trained(data, [batch])
    facts = data.as_facts()
    assert len(facts.batches) == 1
    assert not facts.rows["0"].whole


def test_the_largest_numbers_tell_what_is_not_finite():
    fine = LargestNumbers(torch.tensor([1.0, -3.0]), torch.tensor([1, 2]))
    assert fine.has_arrived()
    assert fine.are_finite()
    assert fine.as_fields() == {"input_largest": 3.0}
    assert fine.rows() == []
    for bad in (torch.nan, torch.inf):
        broken = LargestNumbers(torch.ones(2), torch.tensor([0.0, bad]))
        assert not broken.are_finite()
        assert broken.as_fields()["input_largest"] == 1.0
    assert LargestNumbers(None, None).are_finite()


class Reader(nn.Module):
    """A recurrent network over ids, whose initial state of zeros has more entries than a batch has ids."""

    def __init__(self, recurrent: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.recurrent = recurrent(8, 24, batch_first=True)
        self.out = nn.Linear(24, 2)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        states = self.recurrent(packed)[1]
        return self.out(states[0][0] if isinstance(states, tuple) else states[0])


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_state_that_a_recurrent_layer_starts_from_is_not_data(recurrent):
    data, model = StepData(MeasuringBudget()), Reader(recurrent)
    lengths, labels = torch.tensor([5, 3, 2, 5]), torch.tensor([0, 1, 1, 0])
    for step in range(2):
        ids = torch.randint(1, 20, (4, 5), generator=torch.Generator().manual_seed(step))
        data.note(nn.functional.cross_entropy(model(ids, lengths), labels), "line 1", step, step + 1)
    first, second = data.as_facts().batches
    assert first.input_print != second.input_print
    assert first.input_largest is second.input_largest is None  # ids, whose size means nothing


def test_data_that_pass_through_the_same_layer_twice_are_still_data():
    data, layer = StepData(MeasuringBudget()), nn.Linear(3, 3)
    inputs = torch.randn(4, 3)
    loss = nn.functional.cross_entropy(layer(layer(inputs).relu()), torch.tensor([0, 1, 2, 0]))
    data.note(loss, "line 1", 0, 1)
    (batch,) = data.as_facts().batches
    assert batch.input_largest == inputs.abs().max()


def test_a_graph_whose_tensors_are_freed_has_no_data():
    data = StepData(MeasuringBudget())
    loss = nn.functional.cross_entropy(nn.Linear(3, 2)(torch.randn(4, 3)), torch.tensor([0, 1, 1, 1]))
    loss.backward()
    data.note(2 * loss, "line 1", 0, 2)
    assert all(each.labels is None for each in data.as_facts().batches)
