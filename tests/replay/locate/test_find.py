"""`find_nonfinite` names the right operation and line, says why, keeps still about healthy steps, leaves no trace."""

import copy
import random
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from locate import judge_ours
from nonfinite_faults import FAULTS, HEALTHY
from torch import nn

import surefoot
from surefoot import find_nonfinite
from surefoot.replay.locate.find import find_loss, was_run

BY_NAME = {fault.name: fault for fault in FAULTS}


def search(name):
    torch.manual_seed(0)
    step = BY_NAME[name].build()
    return find_nonfinite(step, model=step.model)


def test_there_are_faults_enough():
    assert len(FAULTS) >= 24
    assert len(HEALTHY) >= 15
    assert {fault.phase for fault in FAULTS} >= {"forward", "backward", "optimizer", "input"}


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize("name", BY_NAME)
def test_the_operation_and_the_line_are_named(name):
    found = search(name)
    judged = judge_ours(BY_NAME[name], found)
    assert (judged.found, judged.op, judged.line) == (True, True, True), found
    assert BY_NAME[name].module in ("", found.module), found
    assert found.outcomes, found


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_is_left_in_peace(name):
    for seed in range(3):
        torch.manual_seed(seed)
        step = HEALTHY[name]()
        assert find_nonfinite(step, model=step.model) is None


# ---- what it says -----------------------------------------------------------------------------------------------


def test_the_sentence_says_where_what_and_which_way():
    said = str(search("log_of_zero"))
    assert said.startswith("aten.log.default in `Net` (forward) made 24 -Inf of 24 values at ")
    assert "nonfinite_faults.py:" in said
    assert "score = probability.log()" in said
    assert "arg 0 float32 [8, 3] 0 (24 zeros)" in said
    assert "Passed on by: log -> mul -> mean -> neg -> loss" in said


def test_backward_is_reported_with_its_node_and_its_forward():
    found = search("sqrt_at_zero")
    assert found.op == "SqrtBackward0 -> aten.div.Tensor"
    assert found.forward_op == "aten.sqrt.default"
    assert found.path[0] == "SqrtBackward0"
    assert set(found.outcomes) == {"the gradient of `head.weight`", "the gradient of `head.bias`"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fully_masked_softmax", "1 row of arg 0 all -Inf: 3"),
        ("fp16_overflow_in_a_matmul", "float16 ends at 65,504"),
        ("embedding_row_with_inf", "the parameter `table.weight` has 1 Inf before any operation"),
        ("embedding_row_with_inf", "in row 17"),
        ("batch_with_nan", "the input `batch[0]` has 4 NaN"),
        ("loss_scale_too_large", "the loss had been multiplied by 1024"),
        ("mean_of_nothing", "arg 0 is empty"),
        ("division_of_integers", "first at [1] of arg 0 = 0, arg 1 = 0"),
    ],
)
def test_the_evidence_is_there(name, words):
    assert words in str(search(name))


def test_numbers_of_the_inputs_are_those_of_the_inputs():
    values = torch.tensor([0.0, -2.0, 3.0, 1e-40, 0.0, float("nan")])
    (described,) = find_nonfinite(lambda: torch.nan_to_num(values).reciprocal().sum()).inputs
    assert (described.low, described.high, described.zeros, described.subnormals) == (-2.0, 3.0, 3, 1)
    assert (described.dtype, described.shape, described.nan) == ("float32", (6,), 0)


def test_what_an_in_place_operation_overwrote_is_described_as_it_was():
    found = find_nonfinite(lambda: torch.full((4,), 8.0).div_(torch.zeros(4)).sum())
    assert found.op == "aten.div_.Tensor"
    assert (found.inputs[0].low, found.inputs[0].inf) == (8.0, 0)


# ---- no trace ---------------------------------------------------------------------------------------------------


class Whole:
    """A whole training step that writes to everything it can reach."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x, self.seen = torch.randn(6, 4), torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.model(self.x).mean().backward()

    def step(self, factor=0.0, error=None):
        self.optimizer.zero_grad()
        self.seen.add_(1)
        self.x.mul_(1.5 + random.random() + torch.rand((), generator=self.generator))
        loss = (self.model(self.x).square() * factor).log().mean()
        loss.backward()
        self.optimizer.step()
        self.model.eval()
        if error is not None:
            raise error
        return loss

    def state(self):
        tensors = [*self.model.parameters(), *self.model.buffers(), *(p.grad for p in self.model.parameters())]
        tensors += [self.x, self.seen, torch.get_rng_state(), self.generator.get_state()]
        rest = (random.getstate(), [m.training for m in self.model.modules()], str(self.optimizer.state_dict()))
        return copy.deepcopy([tensor.detach() for tensor in tensors]), rest


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("factor", "error"), [(0.0, None), (1.0, None), (1.0, KeyError("theirs"))])
def test_nothing_is_left_behind(given, factor, error):
    whole = Whole()
    tensors, rest = whole.state()
    model = whole.model if given else None
    if error is None:
        found = find_nonfinite(lambda: whole.step(factor), model=model)
        assert (found is None) == (factor == 1.0)
    else:
        with pytest.raises(KeyError, match="theirs"):
            find_nonfinite(lambda: whole.step(factor, error), model=model)
    after, rest_after = whole.state()
    assert all(torch.equal(one, other) for one, other in zip(tensors, after, strict=True))
    assert rest == rest_after


def test_an_optimizer_that_is_only_met_on_the_way_is_put_back():
    parameter = nn.Parameter(torch.zeros(3))
    made = []

    def step():
        made.append(torch.optim.Adam([parameter], lr=1.0))
        parameter.sum().backward()
        made[-1].step()

    assert find_nonfinite(step) is None
    assert parameter.tolist() == [0.0, 0.0, 0.0]
    assert parameter.grad is None
    assert not made[0].state


def test_activations_are_not_kept_alive():
    alive = []

    def step():
        x = torch.zeros(8)
        for _ in range(10):
            x = x + 1
            alive.append(weakref.ref(x.untyped_storage()))
            assert sum(ref() is not None for ref in alive) <= 2
        return x.sum()

    assert find_nonfinite(step) is None


def test_a_step_that_is_no_function_is_refused():
    with pytest.raises(surefoot.SettingError, match="must be a function that runs one step; got Tensor"):
        find_nonfinite(torch.zeros(()))


LOSS = torch.tensor(1.0, requires_grad=True) * 2
OTHER = torch.ones(3)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


@pytest.mark.parametrize(
    "returned",
    [
        LOSS,
        (OTHER, LOSS),
        {"accuracy": torch.tensor(0.5), "loss": LOSS},
        Output(OTHER, LOSS),
        SimpleNamespace(total=LOSS),
    ],
)
def test_the_loss_is_found_by_name_or_by_its_graph(returned):
    assert find_loss(returned) is LOSS


def test_without_a_single_number_there_is_none():
    assert find_loss(OTHER) is None
    assert find_loss(None) is None
    assert find_loss(3.0) is None


def test_a_graph_that_backward_went_through_is_known():
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    numbers = {int(loss.grad_fn._sequence_nr())}
    assert was_run(loss, numbers)
    assert not was_run(loss, set())
