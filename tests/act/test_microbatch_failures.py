"""Out of memory: nothing is left of the failed try, and what cannot be helped is said."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import surefoot as sf
from scarce import Scarce, assert_close, assert_equal, gradients, loss_of, net, rows, stabilized, whole_gradients


def test_a_backward_that_fails_half_way_leaves_nothing_behind():
    model = net(fits=0)
    stabilizer = stabilized(model, accumulate=2)
    model[2].fits = 100
    stabilizer.run_microbatches(loss_of(model), rows(8))
    stabilizer.step()
    before = gradients(model)
    model[2].fits = 0
    with pytest.raises(torch.OutOfMemoryError) as caught:
        stabilizer.run_microbatches(loss_of(model), rows(8, 1))
    assert_equal(gradients(model), before)
    assert model[2].tried[-4:] == [8, 4, 2, 1]
    assert "divided down to one row" in "".join(getattr(caught.value, "__notes__", ["divided down to one row"]))
    assert stabilizer.steps == 0
    model[2].fits = 100
    stabilizer.run_microbatches(loss_of(model), rows(8, 1))  # the window goes on as if nothing had been
    assert_close(gradients(model), whole_gradients(rows(8), rows(8, 1)))
    assert model[2].tried[-1] == 8  # a batch that never went through taught nothing


def test_other_errors_pass_with_gradients_as_autograd_left_them():
    error = ValueError("a bug of the user's")
    model, bare = net(fits=3, error=error), net(fits=3, error=error)
    stabilizer = stabilized(model)
    with pytest.raises(ValueError, match="a bug") as caught:
        stabilizer.run_microbatches(loss_of(model), rows(8))
    assert caught.value is error
    assert model[2].tried == [8]
    with pytest.raises(ValueError, match="a bug"):
        loss_of(bare)(rows(8)).backward()
    assert_equal(gradients(model), gradients(bare))


def test_an_interrupt_in_a_later_piece_loses_no_earlier_gradient():
    model = net(fits=4)
    calls = []

    def loss(part):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss_of(model)(part)

    with pytest.raises(KeyboardInterrupt):
        stabilized(model).run_microbatches(loss, rows(8))
    first = net()
    (loss_of(first)(rows(8) | {"x": rows(8)["x"][:4], "y": rows(8)["y"][:4]}) * 0.5).backward()
    assert_equal(gradients(model), gradients(first))


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_activations_are_gone_before_the_next_try(when):
    model = net(fits=4, when=when)
    activations, alive = [], []

    def loss(part):
        alive.append(sum(reference() is not None for reference in activations))
        hidden = model[0](part["x"])
        activations.append(weakref.ref(hidden))
        kept = {"in": hidden}
        kept["itself"] = kept  # a cycle, as frames and errors make them
        return model[1:](kept["in"]).square().mean()

    gc.disable()
    try:
        stabilized(model).run_microbatches(loss, rows(8))
    finally:
        gc.enable()
    assert alive[:2] == [0, 0]


def test_running_statistics_and_random_streams_are_those_of_the_pieces_alone():
    def run(fits, split):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5), Scarce(fits, "forward"), nn.Linear(5, 3))
        stabilizer = stabilized(model)
        torch.manual_seed(1)
        for part in split:
            stabilizer.run_microbatches(lambda x: model(x).square().mean(), part)
        return [p.grad * len(split[0]) for p in model.parameters()], model.state_dict(), torch.rand(1)

    x = torch.randn(8, 5)
    found, statistics, drawn = run(4, [x])
    expected, wanted, next_drawn = run(4, [x[:4], x[4:]])
    assert torch.equal(drawn, next_drawn)
    assert all(torch.equal(statistics[key], wanted[key]) for key in wanted)
    assert_close(found, expected, rtol=1e-5)


def test_batch_norm_in_pieces_is_warned_about_once(caplog):
    model = nn.Sequential(nn.BatchNorm1d(5), Scarce(4), nn.Linear(5, 3))
    stabilizer = stabilized(model)
    with caplog.at_level(logging.INFO, "surefoot"):
        for seed in range(3):
            stabilizer.run_microbatches(lambda part: model(part["x"]).mean(), rows(8, seed, torch.float32))
            stabilizer.step()
    assert [i.kind for i in stabilizer.incidents] == ["memory.split", "memory.split-batch-norm"]
    assert len(caplog.records) == 2
    assert "8 rows run in 2 pieces of at most 4" in caplog.text
    evaluated = nn.Sequential(nn.BatchNorm1d(5), Scarce(4), nn.Linear(5, 3))
    evaluated[0].eval()
    stabilizer = stabilized(evaluated)
    stabilizer.run_microbatches(lambda part: evaluated(part["x"]).mean(), rows(8, 0, torch.float32))
    assert [i.kind for i in stabilizer.incidents] == ["memory.split"]


def test_the_size_that_fits_is_remembered_also_by_a_resumed_run():
    model = net(fits=4)
    stabilizer = stabilized(model)
    stabilizer.run_microbatches(loss_of(model), rows(16))
    assert model[2].tried == [16, 8, 4, 4, 4, 4]
    stabilizer.step()
    other = net(fits=4)
    resumed = stabilized(other)
    resumed.load_state_dict(stabilizer.state_dict())
    resumed.run_microbatches(loss_of(other), rows(10))
    assert other[2].tried == [4, 3, 3]


def test_pieces_that_are_done_stay_done():
    model = net(fits=8)
    calls = []

    def loss(part):
        calls.append(len(part["x"]))
        model[2].fits = 2 if len(calls) >= 3 else 8  # memory gets scarce on the way
        return loss_of(model)(part)

    stabilized(model).run_microbatches(loss, rows(16))
    assert calls == [16, 8, 8, 4, 2, 2, 2, 2]
    assert_close(gradients(model), whole_gradients(rows(16)))


def test_a_real_allocation_that_fails_is_cut_down():
    model = nn.Linear(4, 4)

    def loss(part):
        torch.empty(2**46 if len(part) > 2 else 1)  # 256 TiB: no machine has it
        return model(part).square().mean()

    stabilizer = stabilized(model)
    stabilizer.run_microbatches(loss, torch.ones(8, 4))
    assert stabilizer.step().applied
    assert "4 pieces of at most 2" in stabilizer.incidents[0].summary


def test_a_batch_changed_in_place_is_not_run_twice():
    model = net(fits=4)

    def loss(part):
        part["x"].div_(255)
        return loss_of(model)(part)

    with pytest.raises(sf.UsageError, match="in place"):
        stabilized(model).run_microbatches(loss, rows(8))
    assert gradients(model) == [None] * 4


def test_a_loss_that_takes_entries_out_of_its_batch_leaves_the_batch():
    model, batch = net(fits=4), rows(8)

    def loss(part):
        return nn.functional.cross_entropy(model(part.pop("x")), part.pop("y")) * part["scale"]

    stabilized(model).run_microbatches(loss, batch)
    assert set(batch) == {"x", "y", "name", "scale"}
    assert_close(gradients(model), whole_gradients(batch))


def test_an_input_that_wants_a_gradient_gets_the_one_of_the_whole_batch():
    model, batch, other = net(fits=3), rows(8), rows(8)
    for each in (batch, other):
        each["x"].requires_grad_()
    stabilized(model).run_microbatches(loss_of(model), batch)
    loss_of(net())(other).backward()
    torch.testing.assert_close(batch["x"].grad, other["x"].grad)


def test_sparse_gradients_add_up():
    def run(fits):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), Scarce(fits), nn.Linear(4, 2)).double()
        stabilized(model).run_microbatches(lambda x: model(x).square().mean(), torch.tensor([1, 2, 2, 3, 9, 1, 1, 0]))
        return [p.grad.to_dense() for p in model.parameters()]

    assert_close(run(3), run(100))


class Queue(nn.Module):
    """A memory of features, larger than what is copied unasked, that the forward writes into or replaces."""

    def __init__(self, replaces):
        super().__init__()
        self.replaces = replaces
        self.register_buffer("seen", torch.zeros(1_000_001))

    def forward(self, x):
        if self.replaces:
            self.seen = torch.cat([self.seen[len(x) :], x[:, 0].detach().float()])
        else:
            self.seen[: len(x)] += 1
        return x


@pytest.mark.parametrize("replaces", [False, True])
def test_a_large_buffer_that_a_forward_changes_is_put_back_and_never_piles_up(replaces):
    model = nn.Sequential(Queue(replaces), Scarce(100, "forward"), nn.Linear(5, 3)).double()
    model[0].seen = model[0].seen.float()
    stabilizer = stabilized(model)
    first = weakref.ref(model[0].seen)
    for seed in range(2):  # from here on it is known to change
        stabilizer.run_microbatches(lambda part: model(part["x"]).mean(), rows(4, seed))
        stabilizer.step()
    assert (first() is None) == replaces
    before = model[0].seen.clone()
    model[1].fits = 0
    with pytest.raises(torch.OutOfMemoryError):
        stabilizer.run_microbatches(lambda part: model(part["x"]).mean(), rows(4, 2))
    assert torch.equal(model[0].seen, before)


def test_a_piece_without_targets_may_have_a_constant_loss():
    model, batch = net(fits=2), rows(8) | {"use": torch.tensor([0, 0, 1, 1, 1, 0, 0, 0], dtype=torch.bool)}

    def loss(part):
        if not part["use"].any():
            return torch.zeros((), dtype=torch.float64)
        return (model(part["x"]).square().sum(1) * part["use"]).mean()

    stabilized(model).run_microbatches(loss, batch)
    whole = net()
    (whole(batch["x"]).square().sum(1) * batch["use"]).mean().backward()
    assert_close(gradients(model), gradients(whole))
