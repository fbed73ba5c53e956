import pytest
import torch
from torch import nn

from surefoot.build import ScaledResidual, decay_groups


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.lstm = nn.LSTM(8, 8)
        self.block = ScaledResidual(nn.Linear(8, 8), 0.1, learnable_features=8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.places = nn.Parameter(torch.zeros(1, 5, 8))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.regression = nn.Linear(8, 1)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight


def names(model, groups):
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: {by_id[id(parameter)] for parameter in group["params"]} for group in groups}


def test_no_parameter_is_twice_or_lost():
    model = Everything()
    model.conv.requires_grad_(False)
    grouped = [parameter for group in decay_groups(model, 0.1) for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(model.parameters())


def test_matrices_decay_and_norms_biases_embeddings_and_gains_do_not():
    model = Everything()
    found = names(model, decay_groups(model, 0.1))
    assert found["decay"] == {
        "conv.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "block.branch.weight",
        "normed.parametrizations.weight.original1",
        "places",
        "regression.weight",
    }


def test_a_weight_tied_to_an_embedding_is_spared_whatever_comes_first():
    model = nn.ModuleDict({"head": nn.Linear(8, 10, bias=False), "words": nn.Embedding(10, 8)})
    model["head"].weight = model["words"].weight
    (group,) = decay_groups(model, 0.1)
    assert (group["name"], group["weight_decay"], len(group["params"])) == ("no_decay", 0.0, 1)


def test_patterns_spare_more_and_a_misspelling_is_refused():
    model = Everything()
    found = names(model, decay_groups(model, 0.1, no_decay=["places", "lstm"]))
    assert {"places", "lstm.weight_ih_l0", "lstm.weight_hh_l0"} <= found["no_decay"]
    with pytest.raises(ValueError, match="'plaecs'"):
        decay_groups(model, 0.1, no_decay="plaecs")


def test_frozen_parameters_can_be_left_out():
    model = Everything()
    model.conv.requires_grad_(False)
    grouped = [p for group in decay_groups(model, 0.1, include_frozen=False) for p in group["params"]]
    assert set(grouped) == {parameter for parameter in model.parameters() if parameter.requires_grad}


def test_an_optimizer_decays_exactly_the_first_group():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(decay_groups(model, 0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before["0.weight"] * 0.95)
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(dict(model.named_parameters())[name], before[name])


def test_lazy_modules_and_negative_decay_are_refused():
    with pytest.raises(ValueError, match="forward first"):
        decay_groups(nn.LazyLinear(4), 0.1)
    with pytest.raises(ValueError, match="negative"):
        decay_groups(nn.Linear(2, 2), -0.1)


def test_a_parametrized_weight_is_judged_by_the_layer_it_belongs_to():
    spectral, length = nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm
    model = nn.Sequential(spectral(nn.Embedding(5, 4)), spectral(nn.Linear(4, 1)), length(nn.Linear(4, 3)))
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed = {names[parameter] for parameter in decay_groups(model, 0.1)[0]["params"]}
    assert decayed == {"1.parametrizations.weight.original", "2.parametrizations.weight.original1"}


@pytest.mark.parametrize("name", ["pos", "pos_emb", "position", "positional_encoding", "rel_pos", "pe", "Emb"])
def test_positions_of_a_modules_own_are_spared_by_a_word_of_their_name(name):
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.zeros(1, 5, 8)))
    model.register_parameter("composition", nn.Parameter(torch.zeros(1, 5, 8)))
    assert names(model, decay_groups(model, 0.1)) == {"no_decay": {name}, "decay": {"composition"}}
