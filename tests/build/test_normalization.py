import pytest
import torch
from torch import nn

from surefoot.build import advise_normalization


def test_batch_norm_with_two_samples_is_named_with_a_replacement():
    model = nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    (advice,) = advise_normalization(model, batch_size=2)
    assert (advice.where, advice.severity) == ("1", "error")
    assert "from 2 samples" in advice.problem
    assert "nn.GroupNorm(8, 32)" in advice.advice
    assert advise_normalization(model, batch_size=64) == []


def test_batch_norm_1d_on_one_sample_really_fails_as_advised():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    (advice,) = advise_normalization(model, batch_size=1)
    assert advice.severity == "error"
    with pytest.raises(ValueError, match="more than 1 value"):
        model(torch.randn(1, 4))


def test_norms_that_do_not_look_at_the_batch_are_never_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8))
    assert advise_normalization(model, batch_size=1) == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)), "dropout"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "bias"),
        (nn.Sequential(nn.GroupNorm(4, 4)), "InstanceNorm"),
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "running statistics"),
        (nn.Sequential(nn.BatchNorm1d(4).requires_grad_(False)), "frozen"),
        (nn.ModuleList(nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(6)), "post-norm"),
    ],
)
def test_each_known_trap_is_named(model, words):
    assert [words in advice.problem for advice in advise_normalization(model, batch_size=64)] == [True]


def test_pre_norm_layers_and_shallow_post_norm_are_fine():
    pre = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, norm_first=True, batch_first=True) for _ in range(12))
    post = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(2))
    assert advise_normalization(pre, 4) + advise_normalization(post, 4) == []


def test_advice_takes_a_lazy_batch_norm_that_has_no_width_yet():
    (advice,) = advise_normalization(nn.Sequential(nn.LazyBatchNorm2d()), batch_size=2)
    assert advice.severity == "error"
    assert "`nn.GroupNorm`" in advice.advice


def test_a_frozen_batch_norm_in_eval_mode_is_good_at_any_batch_size():
    norm = nn.BatchNorm2d(8).requires_grad_(False).eval()
    assert advise_normalization(nn.Sequential(norm), batch_size=1) == []
    assert advise_normalization(nn.Sequential(norm.train()), batch_size=1) != []


def convolutions(count, norm=None):
    layers = []
    for _ in range(count):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=norm is None), *([norm()] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers)


def test_a_deep_cnn_without_a_norm_gets_one_that_suits_its_batches():
    (large,) = advise_normalization(convolutions(8), batch_size=64)
    assert (large.where, large.severity) == ("0", "info")
    assert "8 convolutions and no norm layer" in large.problem
    assert "`nn.BatchNorm2d(16)`" in large.advice
    (small,) = advise_normalization(convolutions(8), batch_size=4)
    assert "`nn.GroupNorm(8, 16)`" in small.advice
    assert "too few for BatchNorm" in small.advice
    assert advise_normalization(convolutions(3), 64) == []
    assert advise_normalization(convolutions(8, lambda: nn.BatchNorm2d(16)), 64) == []


def test_a_recurrent_model_and_a_deep_mlp_without_a_norm_are_named():
    (lstm,) = advise_normalization(nn.ModuleDict({"body": nn.LSTM(8, 32), "head": nn.Linear(32, 2)}), 64)
    assert (lstm.where, lstm.severity) == ("body", "info")
    assert "`nn.LayerNorm(32)`" in lstm.advice
    assert advise_normalization(nn.Sequential(nn.LSTM(8, 32), nn.LayerNorm(32)), 64) == []
    (mlp,) = advise_normalization(nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), 64)
    assert "9 linear layers" in mlp.problem
    assert advise_normalization(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), 64) == []


def test_style_transfer_keeps_the_contrast_of_each_image():
    model = convolutions(2, lambda: nn.BatchNorm2d(16))
    assert advise_normalization(model, 64) == []
    found = advise_normalization(model, 64, task="style-transfer")
    assert [advice.where for advice in found] == ["1", "4"]
    assert all("`nn.InstanceNorm2d(16, affine=True)`" in advice.advice for advice in found)
    assert advise_normalization(convolutions(2, lambda: nn.InstanceNorm2d(16)), 64, task="style-transfer") == []
    with pytest.raises(ValueError, match="'style-transfer' or None; got 'gan'"):
        advise_normalization(model, 64, task="gan")


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(
    "model", [nn.LSTM(4, 8), nn.LSTM(4, 8, bidirectional=True), nn.LSTM(4, 8, proj_size=3), nn.GRU(4, 8)]
)
def test_the_norm_for_a_recurrent_model_can_be_applied_as_written(model):
    (advice,) = advise_normalization(model, batch_size=16)
    layer = eval(advice.advice.split("`")[1], {"nn": nn})
    assert layer(model(torch.randn(3, 2, 4))[0]).isfinite().all()


def test_layer_norms_of_a_transformer_are_left_alone_in_style_transfer():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    assert not [
        each for each in advise_normalization(model, batch_size=16, task="style-transfer") if "Instance" in str(each)
    ]
