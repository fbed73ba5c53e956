"""Close looks at sampled steps: what they give, and that training is bitwise what it was without them."""

from __future__ import annotations

import gc
import itertools
import logging
import math

import pytest
import torch
from torch import nn

from counted import Operations, calls
from surefoot.errors import SettingError
from surefoot.guard.model_sampling import ArrivingHistograms, ModelSampler, Sampling
from surefoot.observe.parameters import named_parameters
from surefoot.record.bins import COUNT, ZERO
from surefoot.record.messages import Histogram, LayerRows
from surefoot.types import NamedParameter

ALWAYS = Sampling(every_steps=1)


def built():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 10)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(steps, portraits=None, prepare=None, forward=None):
    """A bare loop; what it leaves, and all that the portraits had to say."""
    model, optimizer = built()
    run = forward(model) if forward else model
    if prepare is not None:
        prepare(model)
    looks = portraits(model) if portraits else None
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        run(torch.randn(32, 3, 8, 8)).square().mean().backward()
        if looks is not None:
            looks.before_update(step, named_parameters([model]))
        optimizer.step()
        if looks is not None:
            looks.after_update(step)
            looks.before_forward(step + 1)
            found += looks.arrived(step)
    state = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    return state, torch.get_rng_state(), found + (looks.arrived() if looks else [])


def always(model):
    return ModelSampler([model], ALWAYS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_looking_at_every_step_is_bitwise_the_bare_run(dtype):
    def cast(model):
        return lambda x: model.to(dtype)(x.to(dtype))

    bare, random, _ = train(20, forward=cast)
    watched, random_after, found = train(20, always, forward=cast)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert torch.equal(random, random_after)
    assert len(found) > 20 * 10


def test_a_compiled_model_is_left_alone_and_its_parameters_are_not():
    def compiled(model):
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager")

    bare, random, _ = train(6, forward=compiled)
    watched, random_after, found = train(6, always, forward=compiled)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert torch.equal(random, random_after)
    assert {each.kind for each in found if isinstance(each, Histogram)} == {"weight", "gradient"}


def test_every_kind_of_histogram_arrives_with_its_name_and_step():
    found = train(3, always)[2]
    histograms = [each for each in found if isinstance(each, Histogram)]
    names = {kind: {each.layer for each in histograms if each.kind == kind} for kind in ("weight", "gradient")}
    assert names["weight"] == names["gradient"] == {"0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"}
    assert {(each.step, each.layer) for each in histograms if each.kind == "activation"} == {
        (step, layer) for step in (1, 2) for layer in ("0", "1", "2", "5")
    }
    assert all(len(each.counts) == COUNT and sum(each.counts) > 0 for each in histograms)
    relu = next(each for each in histograms if each.layer == "2")
    assert sum(relu.counts[:ZERO]) == 0 < relu.counts[ZERO]


def test_layer_rows_tell_the_norm_the_update_and_the_dead():
    model, optimizer = built()
    looks = ModelSampler([model], ALWAYS)
    with torch.no_grad():
        model[1].bias[:2] = -1e6
    for step in range(2):
        before = {name: parameter.detach().clone() for name, parameter in named_parameters([model])}
        model(torch.randn(32, 3, 8, 8)).square().mean().backward()
        looks.before_update(step, named_parameters([model]))
        optimizer.step()
        looks.after_update(step)
        looks.before_forward(step + 1)
    after = dict(named_parameters([model]))
    rows, outputs = [each for each in looks.arrived() if isinstance(each, LayerRows) and each.step == 1]
    for i, name in enumerate(rows.names):
        norm, moved = before[name].norm(), (after[name].detach() - before[name]).norm()
        assert float(rows.columns["param_norm"][i]) == pytest.approx(float(norm), rel=1e-5)
        assert float(rows.columns["update_ratio"][i]) == pytest.approx(float(moved / norm), rel=1e-4)
    dead = dict(zip(outputs.names, outputs.columns["dead_share"], strict=True))
    assert {name: share for name, share in dead.items() if share is not None} == {"2": 2 / 8}


def test_numbers_of_parameters_can_join_the_rows_of_their_step():
    model, _ = built()
    looks = ModelSampler([model], ALWAYS)
    model(torch.randn(32, 3, 8, 8)).sum().backward()
    looks.before_update(0, named_parameters([model]))
    looks.after_update(0)
    columns = looks.layer_columns(0, ["5.bias", "unknown", "0.weight"])
    assert set(columns) == {"param_norm", "update_ratio"}
    norms = columns["param_norm"].tolist()
    assert [norms[0], norms[2]] == pytest.approx(
        [float(part.detach().norm()) for part in (model[5].bias, model[0].weight)]
    )
    assert math.isnan(norms[1])
    assert looks.layer_columns(1, ["5.bias"]) == {}
    assert not any(isinstance(each, LayerRows) for each in looks.arrived()), "told once"


def test_what_arrives_is_handed_over_once_and_up_to_the_step_asked_for():
    model, optimizer = built()
    looks = ModelSampler([model], ALWAYS)
    steps = []
    for step in range(8):
        model(torch.randn(32, 3, 8, 8)).sum().backward()
        looks.before_update(step, named_parameters([model]))
        optimizer.step()
        looks.after_update(step)
        steps.append({each.step for each in looks.arrived(step - 3)})
    assert steps == [set(), set(), set(), {0}, {1}, {2}, {3}, {4}]
    assert (looks.has(4), looks.has(5)) == (False, True)
    assert {each.step for each in looks.arrived()} == {5, 6, 7}


def test_what_is_broken_is_counted():
    model, _ = built()
    model(torch.randn(32, 3, 8, 8)).sum().backward()
    model[5].weight.grad[0, :3] = math.nan
    model[5].weight.grad[1, :2] = -math.inf
    found = {(each.kind, each.layer): each for each in ArrivingHistograms(named_parameters([model]), step=7).messages()}
    broken = found["gradient", "5.weight"]
    assert (broken.step, broken.nan, broken.positive_inf, broken.negative_inf) == (7, 3, 0, 2)
    assert sum(broken.counts) == 2880 - 5
    assert found["weight", "5.weight"].nan == 0


def test_gradients_are_shown_without_the_loss_scale():
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 65536.0)
    looks = ModelSampler([nn.Identity()], ALWAYS)
    looks.before_update(0, named_parameters([nn.ParameterList([weight])]), divide=torch.tensor(65536.0))
    looks.after_update(0)
    weights, gradients = (each for each in looks.arrived() if isinstance(each, Histogram))
    assert weights.counts == gradients.counts


def test_a_parameter_without_a_gradient_is_no_trouble():
    frozen, _ = built()
    found = ArrivingHistograms(named_parameters([frozen]), step=0).messages()
    assert {each.kind for each in found} == {"weight"}
    assert ArrivingHistograms([], step=0).messages() == []


class Strange(torch.Tensor):
    @property
    def is_quantized(self):
        raise RuntimeError("cannot say")


def test_an_error_ends_the_looking_with_one_warning_and_training_continues(caplog):
    def strange(model):
        model[5].register_forward_hook(lambda module, args, out: out.as_subclass(Strange))

    bare = train(5, prepare=strange)[0]
    with caplog.at_level(logging.WARNING, "surefoot"):
        watched, _, found = train(5, always, prepare=strange)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert {each.step for each in found} == {0}
    (record,) = caplog.records
    assert "no longer recorded (RuntimeError: cannot say)" in record.getMessage()


def test_hooks_do_not_outlive_their_portraits():
    model, _ = built()
    looks = ModelSampler([model], ALWAYS)
    looks.before_forward(3)
    assert model[0]._forward_hooks
    del looks
    gc.collect()
    assert not model[0]._forward_hooks


def test_a_model_of_very_many_parameters_shows_some_of_their_histograms():
    parameters = [NamedParameter(f"p{i}", nn.Parameter(torch.ones(1))) for i in range(2_500)]
    portraits = ModelSampler([nn.Linear(1, 1)])
    portraits.before_update(0, parameters)
    portraits.after_update(0)
    *shown, rows = portraits.arrived()
    assert [each.layer for each in shown] == [f"p{i}" for i in range(0, 2_500, 3)]
    assert len(rows.names) == 2_500


def test_a_step_without_an_update_leaves_no_hooks():
    model, _ = built()
    looks = ModelSampler([model], ALWAYS)
    looks.before_forward(1)
    looks.after_update(1)
    assert not model[0]._forward_hooks


def test_steps_are_sampled_by_their_number_alone_and_ever_fewer():
    sampling = Sampling()
    looked = [step for step in range(1_000_000) if sampling.due(step)]
    assert looked[:12] == [0, 1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93]
    assert len(looked) < 230
    assert max(b - a for a, b in itertools.pairwise(looked)) <= sampling.every_steps
    assert [step for step in range(20) if Sampling(growth=2).due(step)] == [0, 1, 2, 4, 8, 16]


def test_a_step_that_is_not_sampled_costs_next_to_nothing():
    model, _ = built()
    looks, named = ModelSampler([model]), named_parameters([model])

    def step():
        looks.before_update(4, named)
        looks.after_update(4)
        looks.before_forward(6)
        looks.arrived(4)

    step()  # works out once which steps are sampled
    with Operations() as operations, calls() as made:
        step()
    assert operations.names == []
    assert len(made) < 30, made


def test_histograms_of_a_small_model_take_a_few_operations_per_tensor():
    model, _ = built()
    model(torch.randn(32, 3, 8, 8)).sum().backward()
    named = named_parameters([model])
    with Operations() as operations:
        found = ArrivingHistograms(named, step=0).messages()
    assert len(operations.names) < 20 * len(found)


# ---- which steps are sampled ----------------------------------------------------------------------------------------


def test_many_at_the_start_and_then_ever_fewer():
    due = [step for step in range(5_000) if Sampling().due(step)]
    assert due[:8] == [0, 1, 2, 3, 5, 8, 12, 18]
    assert len(due) == 22


def test_later_a_step_is_looked_at_every_so_often():
    sampling = Sampling(every_steps=100)
    assert [step for step in range(100, 500) if sampling.due(step)] == [100, 200, 300, 400]


def test_it_goes_by_the_step_alone_so_that_a_resumed_run_looks_at_the_same_steps():
    assert [Sampling().due(step) for step in range(300, 400)] == [Sampling().due(step) for step in range(300, 400)]


@pytest.mark.parametrize("settings", [{"growth": 1.0}, {"every_steps": 0}])
def test_settings_without_a_meaning_are_refused(settings):
    with pytest.raises(SettingError):
        Sampling(**settings)
