"""`find_nonfinite` on steps that are put together in unusual ways."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from surefoot import find_nonfinite

INF = float("inf")


@pytest.fixture
def w():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(4, 4))


def test_an_error_raised_because_of_a_bad_value_is_part_of_the_answer(w):
    def step():
        scale = torch.log(w * 0).exp() * 0 / 0
        return torch.distributions.Normal(scale, 1.0, validate_args=True).log_prob(torch.ones(4, 4)).mean()

    found = find_nonfinite(step)
    assert found.op == "aten.div.Tensor"
    assert "the step then raised ValueError" in str(found)


def test_an_error_that_has_nothing_to_do_with_it_is_raised(w):
    def step():
        return torch.log(w.detach() * 0) @ torch.zeros(3)

    with pytest.raises(RuntimeError, match="size mismatch"):
        find_nonfinite(step)


def test_a_mask_that_covers_the_target_is_named_as_asked_for(w):
    def step():
        logits = (torch.ones(5, 4) @ w).masked_fill(torch.tensor([True, False, False, False]), -INF)
        return F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))

    found = find_nonfinite(step)
    assert found.op == "aten.masked_fill.Scalar"
    assert "the program requested this infinity" in str(found)


def test_reentrant_checkpointing_leads_to_the_line_in_the_block(w):
    def block(x):
        zero = x * 0
        return zero.sqrt()

    found = find_nonfinite(lambda: checkpoint(block, torch.ones(3, 4) @ w, use_reentrant=True).sum())
    assert (found.op, found.source) == ("SqrtBackward0 -> aten.div.Tensor", "return zero.sqrt()")
    assert found.outcomes[0] == "the gradient of `w`"


def test_functional_gradients_are_seen():
    layer = nn.Linear(4, 1)

    def step():
        def loss(parameters, x):
            out = torch.func.functional_call(layer, parameters, (x,))
            return torch.sqrt((out - out) ** 2).sum()

        gradient = torch.func.grad(loss)
        return torch.func.vmap(gradient, (None, 0))(dict(layer.named_parameters()), torch.ones(3, 4))["weight"].sum()

    found = find_nonfinite(step)
    assert found.forward_op == "aten.sqrt.default"
    assert found.source == "return torch.sqrt((out - out) ** 2).sum()"


def test_a_hook_is_blamed_by_its_own_line(w):
    def step():
        out = torch.ones(3, 4) @ w
        out.register_hook(lambda gradient: gradient / 0)
        return out.sum()

    found = find_nonfinite(step)
    assert (found.op, found.phase) == ("aten.div.Tensor", "backward")
    assert found.source == "out.register_hook(lambda gradient: gradient / 0)"


def test_sparse_gradients_are_followed():
    table = nn.Embedding(10, 4, sparse=True)

    def step():
        rows = table(torch.tensor([1, 2]))
        return (rows - rows).sum(1).sqrt().sum()

    found = find_nonfinite(step, model=table)
    assert found.outcomes == ("the gradient of `weight`",)


def test_out_and_index_add_and_views_are_followed(w):
    def with_out():
        log = torch.empty(4, 4)
        torch.log(torch.zeros(4, 4), out=log)
        return (log.T[1:] * w[1:]).sum()

    def scatter_mean():
        count = torch.zeros(3).index_add_(0, torch.tensor([0, 0, 1]), torch.ones(3))
        total = torch.zeros(3, 4).index_add(0, torch.tensor([0, 0, 1]), torch.ones(3, 4) @ w)
        return (total / count[:, None]).sum()

    assert find_nonfinite(with_out).op == "aten.log.out"
    assert find_nonfinite(scatter_mean).source == "return (total / count[:, None]).sum()"


def test_a_gradient_left_from_before_is_named(w):
    w.grad = torch.full((4, 4), INF)
    found = find_nonfinite(lambda: (w * 2).sum())
    assert "the gradient of `w`, left from before the step, has 16 Inf" in str(found)
    assert bool(w.grad.isinf().all())


def test_a_foreach_optimizer_is_seen_into():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([p], eps=0.0, foreach=True)

    def step():
        optimizer.zero_grad()
        (p * 0).sum().backward()
        optimizer.step()

    found = find_nonfinite(step)
    assert (found.op.split(".")[1], found.phase) == ("_foreach_addcdiv_", "optimizer")
    assert "the parameter `p`" in found.outcomes


def test_an_overflow_under_autocast_names_the_half_precision_operation(w):
    def step():
        with torch.autocast("cpu", torch.float16):
            return (torch.full((8, 4), 300.0) @ (w * 0 + 300)).float().mean()

    found = find_nonfinite(step)
    assert (found.op, found.inputs[0].dtype) == ("aten.mm.default", "float16")


def test_complex_numbers_are_looked_at(w):
    found = find_nonfinite(lambda: torch.complex(w * 0, w * 0).sqrt().real.sum())
    assert found.forward_op == "aten.sqrt.default"


def test_an_operation_that_refuses_bad_values_is_distinguished_from_one_that_would_fail_anyway(w):
    found = find_nonfinite(lambda: torch.linalg.eigvalsh(w @ w.T / torch.zeros(4, 4)).sum())
    assert found.op == "aten.div.Tensor"
    assert "the step then raised" in str(found)


def test_a_batch_from_an_iterator_is_taken_once_if_nothing_competes(w):
    batches = iter([torch.zeros(4, 4), torch.ones(4, 4)])
    found = find_nonfinite(lambda: (next(batches).log() * w).sum())
    assert found.op == "aten.log.default"
    assert len(list(batches)) == 1


def test_a_step_that_differs_when_it_runs_again_gets_the_earliest_candidate(w):
    batches = iter([torch.zeros(4, 4), *[torch.ones(4, 4)] * 20])

    def step():
        x = next(batches)
        return (x.log().mean() + x.reciprocal().mean()) * w.sum()

    assert find_nonfinite(step).op == "aten.log.default"


def test_inference_and_steps_without_gradients_are_searched():
    layer = nn.Linear(4, 4)

    def step():
        with torch.inference_mode():
            return layer(torch.ones(2, 4)).mul(0).log()

    found = find_nonfinite(step, model=layer)
    assert (found.op, found.path) == ("aten.log.default", ("log", "output"))


def test_a_second_backward_is_not_run_after_the_steps_own(w):
    def step():
        loss = (w * 2).sum() + 1
        loss.backward()
        return loss

    assert find_nonfinite(step) is None
    assert w.grad is None


def test_a_compiled_module_is_run_eagerly():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(layer)
    found = find_nonfinite(lambda: compiled(torch.ones(3, 4)).mul(0).log().mean(), model=compiled)
    assert found.op == "aten.log.default"
    batch = torch.full((3, 4), float("nan"))
    found = find_nonfinite(lambda: compiled(batch).mean(), model=compiled)
    assert (found.phase, found.tensor) == ("input", "batch")
