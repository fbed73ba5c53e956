import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.build import PreNormMLP, ScaledResidual, init_for
from surefoot.build.init.apply import entries_of, refuse_lazy, rescale, selected


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(before, after):
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


class Functional(nn.Module):
    """Its activations are function calls, which no list of modules shows."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(64)
        self.activation = activation

    def forward(self, x):
        return self.head(self.activation(self.second(self.drop(self.activation(self.norm(self.first(x)))))))


class Residual(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_the_trace_sees_a_functional_activation():
    for activation, recipe in ((F.relu, "he"), (torch.tanh, "xavier"), (F.gelu, "critical")):
        report = init_for(Functional(activation), torch.randn(8, 64))
        assert report["second.weight"].recipe == recipe
        assert report["head.weight"].why == "no activation follows"


def test_the_standard_deviation_asked_for_is_the_one_written():
    model = Functional(F.relu)
    report = init_for(model, torch.randn(8, 64))
    assert report["second.weight"].std == pytest.approx((2 / 64) ** 0.5)
    assert float(model.second.weight.detach().std()) == pytest.approx((2 / 64) ** 0.5, rel=0.05)


def test_the_trace_leaves_model_and_random_streams_bitwise_untouched():
    model = Functional(F.relu).train()
    model.norm.eval()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    streams = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    before = state(model)
    init_for(model, torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), dry_run=True)
    assert same(before, state(model))
    assert model.training
    assert not model.norm.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == streams[:2]
    assert torch.equal(torch.get_rng_state(), streams[2])


def test_a_dry_run_prints_the_same_table_and_writes_nothing(capsys):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    before = state(model)
    planned = init_for(model, dry_run=True)
    printed = capsys.readouterr().out
    assert same(before, state(model))
    assert "0.weight" in printed
    assert "followed by relu" in printed
    assert init_for(model) == planned
    assert capsys.readouterr().out == ""


def test_the_last_layer_of_each_residual_branch_is_scaled_by_the_number_of_branches():
    report = init_for(Residual(depth=5), torch.randn(2, 32))
    for block in range(5):
        row = report[f"blocks.{block}.3.weight"]
        assert row.std == pytest.approx((2 / (64 + 32)) ** 0.5 / 5**0.5)
        assert "residual" in row.why
        assert "residual" not in report[f"blocks.{block}.1.weight"].why


def test_a_branch_that_scales_itself_is_not_scaled_again():
    model = nn.Sequential(*(ScaledResidual(nn.Linear(8, 8), 0.1, learnable_features=8) for _ in range(3)))
    report = init_for(model, torch.randn(2, 8))
    assert report["0.branch.weight"].recipe == "xavier"
    assert report["0.gain"].recipe == "left"


def test_an_addition_that_is_no_residual_is_not_taken_for_one():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.left(x) + self.right(x)

    assert "residual" not in str(init_for(Towers(), torch.randn(2, 8)))


def test_norm_layers_keep_gain_one_and_shift_zero():
    for norm in (nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)):
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.ReLU(), nn.Linear(8, 8))
        init_for(model)
        assert torch.equal(norm.weight, torch.ones(8))
        assert getattr(norm, "bias", None) is None or torch.equal(norm.bias, torch.zeros(8))


def test_tied_weights_stay_tied_and_are_written_once_as_an_embedding():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 100, bias=False)  # registered before the embedding on purpose
            self.words = nn.Embedding(100, 64)
            self.head.weight = self.words.weight

        def forward(self, tokens):
            return self.head(self.words(tokens))

    for example in (None, torch.zeros(1, 3, dtype=torch.long)):
        model = Language()
        report = init_for(model, example)
        assert model.head.weight is model.words.weight
        assert len(report.rows) == 1
        assert report.rows[0].std == pytest.approx(1 / 8)
        assert "tied" in report.rows[0].why
        assert float(model.words.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)


def test_the_padding_row_of_an_embedding_stays_zero():
    model = nn.Embedding(10, 4, padding_idx=3)
    init_for(model, overwrite=True)
    assert torch.equal(model.weight[3], torch.zeros(4))


def test_loaded_weights_are_kept_and_the_fresh_head_is_initialised():
    pretrained = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(pretrained.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        pretrained(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
    model = nn.Sequential(*copy.deepcopy(pretrained)[:-1], nn.Linear(32, 10))
    before = state(model)
    report = init_for(model)
    assert {row.name for row in report.written} == {"4.weight", "4.bias"}
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before if not name.startswith("4."))
    assert "overwrite=True" in report["0.weight"].why


def test_a_small_trained_layer_is_not_wiped_out_beside_larger_trained_ones():
    model = nn.ModuleDict({"words": nn.Embedding(1000, 8), "body": nn.Linear(64, 64), "small": nn.Linear(4, 2)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    assert init_for(model).written == ()
    assert {row.name for row in init_for(model, only="small", dry_run=True).written} <= {"small.weight", "small.bias"}


def test_a_second_call_changes_nothing_and_overwrite_does():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    init_for(model)
    before = state(model)
    assert not {row.name for row in init_for(model).written} & {"0.weight", "2.weight"}
    assert same(before, state(model))
    init_for(model, overwrite=True)
    assert not same(before, state(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fresh_weights_of_every_known_layer_are_recognised_as_fresh(dtype):
    model = nn.ModuleList(
        [
            nn.Linear(300, 200),
            nn.Conv2d(8, 16, 3, groups=2),
            nn.ConvTranspose2d(8, 16, 3),
            nn.Embedding(300, 64),
            nn.LSTM(32, 64, num_layers=2, proj_size=16),
            nn.GRU(32, 64, bidirectional=True),
            nn.MultiheadAttention(64, 4),
            nn.MultiheadAttention(64, 4, kdim=32, vdim=16),
            nn.Transformer(32, 4, 1, 1, 64, batch_first=True),
            nn.BatchNorm2d(4),
        ]
    ).to(dtype)
    assert init_for(model).left == ()


def test_only_and_skip_choose_by_module_or_pattern_and_a_misspelling_is_refused():
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    assert {row.name for row in init_for(model, only="head", dry_run=True).written} == {"head.weight", "head.bias"}
    assert {row.name for row in init_for(model, skip=["*.bias", "body"], dry_run=True).written} == {"head.weight"}
    with pytest.raises(ValueError, match="'haed', which matches no parameter"):
        init_for(model, only="haed")


def test_frozen_parameters_are_left():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    before = state(model)
    report = init_for(model, torch.randn(2, 8))
    assert "frozen" in report["0.weight"].why
    assert torch.equal(before["0.weight"], model[0].weight)


def test_packed_attention_is_drawn_with_the_fan_of_one_projection():
    model = nn.MultiheadAttention(256, 4)
    init_for(model)
    for part in model.in_proj_weight.detach().chunk(3):
        assert float(part.std()) == pytest.approx((2 / (5 * 256)) ** 0.5, rel=0.02)
    assert torch.equal(model.in_proj_bias, torch.zeros(768))


def test_transformer_layers_are_known_with_and_without_an_example():
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True, dropout=0.1)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    for example in (None, torch.randn(2, 5, 32)):
        report = init_for(model, example, dry_run=True)
        assert report["layers.1.linear2.weight"].std == pytest.approx((2 / (5 * 64)) ** 0.5 / 6**0.5)
        assert report["layers.2.self_attn.out_proj.weight"].std == pytest.approx((2 / (5 * 32)) ** 0.5 / 6**0.5)
        assert report["layers.0.linear1.weight"].recipe == "small normal"


def test_recurrent_gates_are_orthogonal_one_by_one_and_the_state_is_kept():
    lstm, gru = nn.LSTM(8, 16), nn.GRU(8, 16)
    init_for(lstm), init_for(gru)
    for weight, gates in ((lstm.weight_hh_l0, 4), (gru.weight_hh_l0, 3)):
        for block in weight.detach().chunk(gates):
            torch.testing.assert_close(block @ block.T, torch.eye(16), atol=1e-5, rtol=0)
    expected = torch.zeros(64)
    expected[16:32] = 1.0  # PyTorch's order: input, forget, cell, output
    assert torch.equal(lstm.bias_ih_l0, expected)
    assert torch.equal(lstm.bias_hh_l0, torch.zeros(64))
    assert torch.equal(gru.bias_ih_l0[16:32], torch.ones(16))


def test_an_example_sequence_spreads_how_long_an_lstm_remembers():
    model = nn.LSTM(8, 16, batch_first=True)
    init_for(model, torch.randn(2, 40, 8))
    forget = model.bias_ih_l0.detach()[16:32]
    times = forget.exp()
    assert float(times.min()) == pytest.approx(1.0)
    assert float(times.max()) == pytest.approx(120.0, rel=1e-5)
    assert torch.equal(model.bias_ih_l0.detach()[:16], -forget)


def test_a_lazy_module_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"weight.*Run one forward"):
        init_for(nn.Sequential(nn.LazyLinear(4)))


def test_meta_tensors_are_planned_but_not_written():
    model = nn.Linear(8, 8, device="meta")
    assert init_for(model, dry_run=True)["weight"].recipe == "xavier"
    with pytest.raises(ValueError, match="to_empty"):
        init_for(model)


def test_weight_norm_is_written_through_and_other_parametrizations_are_left():
    weight_norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(weight_norm(nn.Linear(64, 64)), nn.ReLU(), weight_norm(nn.Conv1d(64, 64, 1)))
    report = init_for(model)
    assert report["0.parametrizations.weight.original1"].recipe == "he"
    assert float(model[0].weight.detach().std()) == pytest.approx((2 / 64) ** 0.5, rel=0.05)
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    before = orthogonal.weight.detach().clone()
    assert init_for(orthogonal)["parametrizations.weight.original"].recipe == "left"
    assert torch.equal(before, orthogonal.weight)


def test_parameters_of_unknown_modules_are_left_and_named():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(3.0))

    report = init_for(Gate())
    assert report["temperature"].why == "no rule for the parameters of Gate"


def test_without_an_example_an_unseen_activation_is_said_and_not_guessed_silently():
    assert "not seen" in init_for(Functional(F.relu))["first.weight"].why


def test_the_fan_of_grouped_and_transposed_convolutions_counts_what_feeds_one_output():
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, groups=64, padding=1), nn.ReLU(), nn.ConvTranspose2d(64, 64, 4, stride=2), nn.ReLU()
    )
    init_for(model)
    x = torch.randn(4, 64, 32, 32)
    first = model[0](x)[..., 2:-2, 2:-2]
    assert float(first.detach().var()) == pytest.approx(2.0, rel=0.15)
    second = model[2](x)[..., 4:-4, 4:-4]
    assert float(second.detach().var()) == pytest.approx(2.0, rel=0.15)


def test_inputs_may_be_a_tuple_or_keywords_and_outputs_a_dict():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a, b):
            return {"hidden": [F.relu(self.layer(a + b))]}

    x = torch.randn(2, 4)
    for example in ((x, x), {"a": x, "b": x}):
        assert init_for(Two(), example, dry_run=True)["layer.weight"].recipe == "he"


def test_an_output_without_gradient_is_refused():
    class Hard(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    with pytest.raises(ValueError, match="differentiable"):
        init_for(Hard(4, 4), torch.randn(2, 4))


def test_a_generator_makes_the_draw_repeatable_and_spares_the_global_stream():
    before = torch.get_rng_state()
    models = [nn.utils.skip_init(nn.Linear, 16, 16) for _ in range(2)]
    for model in models:
        init_for(model, overwrite=True, generator=torch.Generator().manual_seed(3))
    assert torch.equal(models[0].weight, models[1].weight)
    assert torch.equal(before, torch.get_rng_state())


def test_half_precision_parameters_get_the_same_distribution():
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)).bfloat16()
    init_for(model)
    assert model[0].weight.dtype == torch.bfloat16
    assert float(model[0].weight.detach().float().std()) == pytest.approx(((3.5616 - 0.1729) / 128) ** 0.5, rel=0.05)


def test_calibration_holds_each_layer_to_its_aim_on_the_example():
    model = nn.Sequential(*(part for _ in range(10) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())))
    x = torch.randn(4, 8, 8, 8)
    init_for(model, x, calibrate=True)
    with torch.no_grad():
        for part in model:
            x = part(x)
            if isinstance(part, nn.Conv2d):
                assert float(x.square().mean()) == pytest.approx(2.0, rel=1e-4)
    with pytest.raises(ValueError, match="example"):
        init_for(model, calibrate=True)


def test_our_own_pre_norm_blocks_are_recognised_as_residual():
    model = nn.Sequential(PreNormMLP(16), PreNormMLP(16))
    assert "2 residual branches" in init_for(model, torch.randn(2, 16))["1.mlp.2.weight"].why


def test_a_model_that_changes_its_input_in_place_can_be_traced_and_the_example_is_unharmed():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    example = torch.randn(4, 8)
    before = example.clone()
    assert init_for(model, example)["1.weight"].recipe == "he"
    assert torch.equal(example, before)
    assert not example.requires_grad


def test_a_layer_the_forward_never_uses_is_said_to_be_unseen():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    assert "not seen" in init_for(Spare(), torch.randn(2, 8))["spare.weight"].why


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        self.embedding = nn.Embedding(6, 4)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_is_one_entry_with_every_name_and_belongs_to_the_embedding():
    model = Tied()
    (entry,) = entries_of(model)
    assert set(entry.names) == {"head.weight", "embedding.weight"}
    assert entry.module is model.embedding
    assert entry.tied_embedding


def test_only_and_skip_take_parameters_modules_and_patterns():
    entries = entries_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert selected(entries, None, ()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert selected(entries, "1", "1.bias") == {"1.weight"}
    assert selected(entries, ["*.weight"], ["0"]) == {"1.weight"}


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"`skip` has 'hed'.*'0.weight'"):
        selected(entries_of(nn.Sequential(nn.Linear(2, 2))), None, "hed")


def test_a_lazy_parameter_is_named():
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias have no shape yet"):
        refuse_lazy(nn.Sequential(nn.LazyLinear(3)))


@torch.no_grad()
def test_every_layer_has_the_second_moment_it_aims_at():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    data = torch.randn(64, 8)
    biases = [model[0].bias.clone(), model[2].bias.clone()]
    rescale(model, data, {model[0].weight: 2.0, model[2].weight: 0.5})
    first = model[0](data)
    assert float(first.square().mean()) == pytest.approx(2.0, rel=0.1)  # the bias correlates with nothing
    assert float((model[2](first.relu()) - model[2].bias).square().mean()) == pytest.approx(
        0.5 - float(model[2].bias.square().mean()), rel=1e-4
    )
    assert torch.equal(model[0].bias, biases[0])
    assert torch.equal(model[2].bias, biases[1])


def test_a_layer_that_gives_zeros_is_left_as_it_is():
    layer = nn.Linear(4, 4, bias=False)
    before = layer.weight.clone()
    rescale(layer, torch.zeros(2, 4), {layer.weight: 1.0})
    assert torch.equal(layer.weight, before)


def test_no_hook_stays_behind_even_if_the_forward_raises():
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        rescale(layer, torch.zeros(2, 5), {layer.weight: 1.0})
    assert not layer._forward_hooks
