"""What one forward shows about the surroundings of each weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.build.init.trace import call, trace


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = x + self.second(F.gelu(self.first(x)))
        return self.head(x)


def test_activation_source_and_branch_of_each_weight_are_seen():
    model = Residual()
    found = trace(model, torch.randn(3, 4))
    assert found.roles[model.first.weight].activation == "gelu"
    assert found.roles[model.second.weight].fed_by == "activation"
    assert found.roles[model.second.weight].ends_branch
    assert not found.roles[model.head.weight].ends_branch
    assert (found.branches, found.attention) == (1, False)


def test_attention_and_the_length_of_sequences_are_seen():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.attention = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            states, _ = self.rnn(x)
            return self.attention(states, states, states)[0]

    found = trace(Model(), torch.randn(2, 7, 4))
    assert (found.attention, found.sequence_steps) == (True, 7)


def test_an_output_that_depends_on_no_parameter_is_refused():
    with pytest.raises(ValueError, match="depends on a trainable parameter"):
        trace(nn.Embedding(2, 2).requires_grad_(False), torch.tensor([0, 1]))


@pytest.mark.parametrize("example", [torch.ones(2), (torch.ones(2),), {"input": torch.ones(2)}])
def test_an_example_is_a_tensor_arguments_or_keywords(example):
    assert call(nn.Linear(2, 3), example).shape == (3,)


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4), (2, 1, 7, 4)], ids=["unbatched", "one head", "heads"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_seen_whatever_the_number_of_dimensions(shape, causal):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(F.scaled_dot_product_attention(self.query(x), x, x, is_causal=causal))

    model = Model()
    found = trace(model, torch.randn(shape))
    assert found.attention
    assert found.roles[model.query.weight].activation != "unknown"
