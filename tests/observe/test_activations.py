"""Hooks that see what layers put out, and that nobody notices."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from surefoot.observe.activations import MOST_CALLS, ActivationWatch, is_relu_like, watched_modules


def seen_in(model, *inputs, run=None):
    """What is seen in one call of a model."""
    watch = ActivationWatch([model])
    watch.begin()
    (run or model)(*inputs)
    seen = watch.end()
    assert watch.error is None
    return seen


def hooks_on(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def dead_shares(model, x):
    return {each.name: float(each.dead) / each.units for each in seen_in(model, x) if each.dead is not None}


def test_every_leaf_that_computes_is_seen_under_its_name():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 2))
    seen = seen_in(model, torch.randn(32, 4))
    assert [each.name for each in seen] == ["0", "1", "4"]
    assert seen[0].sample.values.numel() == 32 * 8
    assert hooks_on(model) == 0


def test_names_are_those_of_the_users_code():
    model = nn.Sequential()
    model.add_module("module", nn.Sequential(nn.Linear(2, 2)))
    assert [name for name, _ in watched_modules([model])] == ["0"]
    assert [name for name, _ in watched_modules([nn.Linear(2, 2), nn.Sequential(nn.ReLU())])] == ["0", "1.0"]
    weighted = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    assert [name for name, _ in watched_modules([weighted])] == ["0"]


def test_dead_units_of_a_linear_layer_are_features():
    torch.manual_seed(0)  # a unit of random weights may be dead, too
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with torch.no_grad():
        model[0].bias[:3] = -1e6
    assert dead_shares(model, torch.randn(64, 4)) == {"1": 3 / 8}
    assert dead_shares(model, torch.randn(4, 64, 4)) == {"1": 3 / 8}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dead_units_of_a_convolution_are_channels(dims):
    torch.manual_seed(0)  # a channel of random weights may be dead on a single short image
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(conv(2, 4, 3), nn.ReLU(inplace=True))
    with torch.no_grad():
        model[0].bias[0] = -1e6
    assert dead_shares(model, torch.randn(8, 2, *(6,) * dims)) == {"1": 1 / 4}
    assert dead_shares(model, torch.randn(2, *(20,) * dims)) == {"1": 1 / 4}, "a single image, without a batch"


def test_an_activation_after_a_reshape_has_its_units_where_is_customary():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 8, 2), nn.ReLU()

        def forward(self, x):
            return self.relu(self.conv(x).flatten(2).transpose(1, 2))

    model = Patches()
    with torch.no_grad():
        model.conv.bias[:4] = -1e6
    assert dead_shares(model, torch.randn(4, 3, 8, 8)) == {"relu": 0.5}


def test_a_small_batch_is_not_called_dead():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    assert dead_shares(model, torch.randn(4, 4)) == {}


def test_a_broken_unit_is_not_a_dead_one():
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    with torch.no_grad():
        model[0].bias[:] = torch.tensor([float("nan"), -1e6])
    assert dead_shares(model, torch.randn(64, 4)) == {"1": 0.5}


def test_a_module_that_is_called_often_is_looked_at_a_few_times():
    relu = nn.ReLU()
    model = nn.Sequential(*[part for _ in range(9) for part in (nn.Linear(4, 4), relu)])
    calls = [each.name for each in seen_in(model, torch.randn(32, 4))]
    assert calls.count("1") == MOST_CALLS
    assert len(calls) == 9 + MOST_CALLS


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.ReLU(), True),
        (nn.ReLU6(), True),
        (type("SquaredReLU", (nn.Module,), {})(), True),
        (nn.LeakyReLU(), False),
        (nn.PReLU(), False),
        (nn.RReLU(), False),
        (nn.GELU(), False),
        (nn.Linear(1, 1), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_can_get_stuck_at_zero_can_be_dead(module, expected):
    assert is_relu_like(module) is expected


class Odd(nn.Module):
    """Returns whatever it is told to."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer(x)


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (lambda x: None, 0),
        (lambda x: "text", 0),
        (lambda x: object(), 0),
        (lambda x: (None, x), 1),
        (lambda x: [x, x], 1),
        (lambda x: {"out": x}, 1),
        (lambda x: (), 0),
        (lambda x: x.long(), 0),
        (lambda x: x.to("meta"), 0),
        (lambda x: x[:0], 1),
        (lambda x: x.to_sparse(), 1),
    ],
)
def test_whatever_a_module_returns_comes_through_as_it_is(answer, seen):
    model, x = Odd(answer), torch.randn(4, 4)
    watch = ActivationWatch([model])
    watch.begin()
    out = model(x)
    assert type(out) is type(answer(x))
    assert len(watch.end()) == seen
    assert watch.error is None


def test_an_lstm_returns_a_tuple_and_is_seen():
    (seen,) = seen_in(nn.LSTM(3, 5), torch.randn(7, 2, 3))
    assert seen.sample.values.numel() == 7 * 2 * 5


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_part_is_seen_once(reentrant):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())

    def run(x):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    assert [each.name for each in seen_in(model, torch.randn(32, 4, requires_grad=True), run=run)] == ["0", "1"]


def test_evaluation_and_other_threads_are_not_looked_at():
    model = nn.Sequential(nn.Linear(4, 8))

    def evaluate(x):
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    def elsewhere(x):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()

    x = torch.randn(32, 4)
    assert seen_in(model, x, run=evaluate) == []
    assert seen_in(model, x, run=elsewhere) == []
    assert len(seen_in(model, x)) == 1


def test_transforms_and_tracing_go_on_unseen():
    model = nn.Sequential(nn.Linear(4, 8))
    x = torch.randn(32, 4)
    assert seen_in(model, x, run=lambda x: torch.func.vmap(model)(x)) == []
    assert seen_in(model, x, run=lambda x: torch.func.grad(lambda y: model(y).sum())(x)) == []


def test_hooks_of_the_users_own_see_what_they_saw_before():
    model, calls = nn.Sequential(nn.Linear(4, 8)), []
    model[0].register_forward_hook(lambda module, args, out: calls.append(1) or out * 2)
    x = torch.randn(32, 4)
    expected = model(x)
    watch = ActivationWatch([model])
    watch.begin()
    assert torch.equal(model(x), expected)
    assert len(model[0]._forward_hooks) == 2
    watch.end()
    assert (len(calls), len(model[0]._forward_hooks)) == (2, 1)


def test_a_copy_made_meanwhile_works_and_is_not_looked_at():
    model = nn.Sequential(nn.Linear(4, 8))
    watch = ActivationWatch([model])
    watch.begin()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin, loaded = copy.deepcopy(model), torch.load(file, weights_only=False)
    for each in (twin, loaded):
        assert torch.equal(each(torch.ones(1, 4)), nn.functional.linear(torch.ones(1, 4), *model[0].parameters()))
    assert hooks_on(twin) == 0
    assert b"surefoot" not in file.getvalue(), "whoever loads the file need not have surefoot"
    assert watch.end() == []


def test_torchs_own_encoders_keep_their_fast_path():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    assert list(watched_modules([model])) == []


def test_an_error_inside_is_kept_from_the_model():
    class Strange(torch.Tensor):
        @property
        def is_nested(self):
            raise RuntimeError("strange")

    model = Odd(lambda x: x.as_subclass(Strange))
    watch = ActivationWatch([model])
    watch.begin()
    assert type(model(torch.ones(3))) is Strange
    assert hooks_on(model) == 0
    assert str(watch.error) == "strange"


class TestCompiled:
    """A compiled model is neither compiled again nor given other bits."""

    def compile(self, model):
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager")

    def frames(self):
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    @pytest.mark.parametrize("first", [True, False], ids=["hooks before compiling", "hooks after compiling"])
    def test_hooks_on_the_original_change_nothing(self, first):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        compiled, x = self.compile(model), torch.randn(32, 4)
        watch = ActivationWatch([model])
        before = self.frames()
        if not first:
            compiled(x)
        for _ in range(3):
            watch.begin()
            out = compiled(x)
            assert watch.end() == []
            assert torch.equal(out, compiled(x))
        assert self.frames() <= before + (2 if first else 1), "with hooks on, the first is compiled apart"
        assert watch.error is None

    def test_a_step_compiled_as_a_function_is_left_alone_too(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        step = self.compile(lambda x: model(x).sum())
        x = torch.randn(32, 4)
        expected, before = step(x), self.frames()
        for _ in range(3):
            assert seen_in(model, x, run=step) == []
        assert torch.equal(step(x), expected)
        assert self.frames() == before

    def test_compiled_parts_get_no_hooks(self):
        torch._dynamo.reset()
        inner = nn.Sequential(nn.Linear(4, 4))
        model = nn.Sequential(nn.Linear(4, 4), torch.compile(inner, backend="aot_eager"), nn.Sequential(nn.ReLU()))
        model[2].compile(backend="aot_eager")
        assert [name for name, _ in watched_modules([model])] == ["0"]
        with torch.no_grad():  # torch warns about the gradient of what it compiles for
            assert [each.name for each in seen_in(model, torch.randn(32, 4))] == ["0"]
