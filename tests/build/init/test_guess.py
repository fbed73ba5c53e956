"""What is read off the modules when there is no example to trace."""

from torch import nn

from surefoot.build.init.guess import guess
from surefoot.build.init.trace import Role


def test_in_a_sequential_each_weight_sees_the_activation_that_follows_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LeakyReLU(0.3), nn.Linear(4, 2))
    roles = guess(model).roles
    assert roles[model[0].weight] == Role("tanh")
    assert roles[model[2].weight] == Role("leaky_relu", 0.3, "activation")
    assert roles[model[4].weight].activation == "none"


def test_the_only_activation_of_a_model_is_taken_for_weights_elsewhere():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)

    model = Model()
    assert guess(model).roles[model.first.weight].activation == "gelu"


def test_two_activations_outside_a_sequential_are_not_guessed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu, self.tanh, self.last = nn.Linear(2, 2), nn.ReLU(), nn.Tanh(), nn.Linear(2, 2)

    model = Model()
    assert guess(model).roles[model.first.weight].activation == "unknown"


def test_the_ends_of_torchs_transformer_layers_are_residual_branches():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    found = guess(layer)
    assert found.attention
    assert found.branches == 2
    assert found.roles[layer.linear2.weight].ends_branch
    assert found.roles[layer.self_attn.out_proj.weight].ends_branch
