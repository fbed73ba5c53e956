"""Batches of any nesting can be measured, cut and moved, and taking them moves no loader."""

import collections

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doctor_probing import context_of
from surefoot.core.random_state import loader_generators
from surefoot.doctor.batches import (
    MOST_BATCHES,
    Part,
    byte_count,
    first_rows,
    is_iterator,
    leaves,
    map_leaves,
    row_count,
    take,
    target_part,
    to_device,
    token_parts,
)

Pair = collections.namedtuple("Pair", "x y")


def test_paths_lead_to_the_tensors():
    batch = {"x": torch.ones(2), "more": [torch.zeros(2)]}
    assert [path for path, _ in leaves(batch)] == ["['x']", "['more'][0]"]
    assert [path for path, _ in leaves(torch.ones(1))] == ["batch"]


def test_arrays_of_numbers_become_tensors_and_words_stay():
    changed = map_leaves([np.ones(2), np.array(["a"]), "text"], lambda tensor: tensor + 1)
    assert changed[0].tolist() == [2, 2]
    assert changed[1].tolist() == ["a"]
    assert changed[2] == "text"


def test_rows_are_counted_where_all_tensors_agree():
    assert row_count(Pair(torch.ones(4, 2), torch.ones(4))) == 4
    assert row_count([torch.ones(4), torch.ones(3)]) is None


def test_the_first_rows_are_cut_from_every_tensor():
    cut = first_rows(Pair(torch.arange(4), {"y": torch.arange(4), "scale": torch.tensor(2.0)}), 2)
    assert type(cut) is Pair
    assert cut.x.tolist() == cut.y["y"].tolist() == [0, 1]
    assert float(cut.y["scale"]) == 2.0
    odd = [torch.ones(4), torch.ones(3)]
    assert first_rows(odd, 2) is odd


def test_a_copy_on_a_device_shares_no_memory():
    batch = {"x": torch.zeros(2)}
    moved = to_device(batch, torch.device("cpu"))
    moved["x"].add_(1)
    assert batch["x"].tolist() == [0, 0]


def test_an_object_of_another_library_moves_itself():
    class Graph:
        device = None

        def to(self, device):
            self.device = device
            return self

    graph = Graph()
    assert to_device(graph, torch.device("cpu")).device == torch.device("cpu")
    assert graph.device is None


def test_bytes_are_those_of_the_tensors():
    assert byte_count([torch.ones(4), torch.ones(2, dtype=torch.int64)]) == 32


def test_few_batches_are_taken_and_fewer_from_an_iterator():
    batches = [torch.full((1,), float(i)) for i in range(100)]
    assert len(take(batches)) == MOST_BATCHES
    iterator = iter(batches)
    assert is_iterator(iterator)
    assert not is_iterator(batches)
    taken = take(iterator)
    assert len(taken) < MOST_BATCHES
    assert float(next(iterator)) == len(taken)


def test_workers_are_not_started_and_the_order_is_the_loaders():
    data = TensorDataset(torch.arange(6.0))
    loader = DataLoader(data, batch_size=2, num_workers=2, generator=torch.Generator().manual_seed(1), shuffle=True)
    plain = DataLoader(data, batch_size=2, generator=torch.Generator().manual_seed(1), shuffle=True)
    assert [batch[0].tolist() for batch in take(loader)] == [batch[0].tolist() for batch in plain]
    assert loader_generators(loader) == [loader.generator]


def test_a_loader_with_state_gets_it_back():
    class Stateful:
        place = 3

        def __iter__(self):
            for _ in range(2):
                self.place += 1
                yield torch.ones(1)

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.place = state["place"]

    loader = Stateful()
    take(loader)
    assert loader.place == 3


def test_a_tensor_is_no_loader():
    with pytest.raises(TypeError, match="iterable over batches"):
        take(torch.ones(3))


def test_the_target_is_found_wherever_it_lies():
    y = torch.randint(3, (8,))
    batches = [{"weights": torch.rand(8), "answer": y, "features": torch.randn(8, 4)}]

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["features"]), batch["answer"])

    part, call = target_part(context_of(nn.Linear(4, 3), batches, loss_of=loss_of))
    assert part == Part("['answer']")
    assert call.kind == "cross_entropy"
    assert part.of(batches[0]) is y
    assert part.of({"other": y}) is None


def test_token_ids_are_found_with_their_table():
    ids = torch.randint(5, (4, 6))
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(12, 3))
    found = token_parts(context_of(model, [(ids, torch.randint(3, (4,)))], nn.CrossEntropyLoss()))
    assert [(part.path, lookup.table_rows) for part, lookup in found] == [("[0]", 5)]


def test_a_target_that_is_made_on_the_way_is_in_no_part():
    context = context_of(nn.Linear(4, 3), [torch.randn(8, 4)], loss_of=lambda m, b: F.mse_loss(m(b), torch.zeros(8, 3)))
    assert target_part(context) is None
