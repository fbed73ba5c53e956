"""The target and the token ids of a batch are found by value."""

import torch
import torch.nn.functional as F
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.batch_parts import Part, target_part, token_parts


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
