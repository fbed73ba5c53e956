"""Out of memory: the same batch in smaller pieces has the same gradient."""

from __future__ import annotations

import copy

import pytest
import torch

import surefoot as sf
from scarce import assert_close, assert_equal, gradients, loss_of, net, rows, stabilized, whole_gradients


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(("count", "fits"), [(8, 8), (8, 4), (8, 3), (7, 3), (10, 1), (13, 12), (1, 1), (9, 4)])
def test_the_gradient_and_the_loss_are_those_of_the_whole_batch(when, count, fits):
    model, batch = net(fits, when), rows(count)
    stabilizer = stabilized(model)
    loss = stabilizer.run_microbatches(loss_of(model), batch)
    assert_close(gradients(model), whole_gradients(batch))
    torch.testing.assert_close(loss, loss_of(net())(batch).detach(), rtol=1e-12, atol=0)
    assert sum(model[2].done) == count
    assert max(model[2].done) <= fits
    assert stabilizer.step().applied
    assert stabilizer.steps == 1


def test_a_batch_that_fits_is_bitwise_the_bare_loop():
    ours, bare = net(), net()
    stabilizer, other = stabilized(ours, accumulate=2), stabilized(bare, accumulate=2)
    for step in range(6):
        loss = stabilizer.run_microbatches(loss_of(ours), rows(8, step))
        bare_loss = loss_of(bare)(rows(8, step))
        other.backward(bare_loss)
        assert torch.equal(loss, bare_loss)
        assert_equal(gradients(ours), gradients(bare))
        stabilizer.step()
        other.step()
    assert_equal(list(ours.parameters()), list(bare.parameters()))
    assert stabilizer.incidents == []


def test_pieces_add_up_bitwise_as_autograd_adds_them():
    model, plain, batch = net(fits=4), net(), rows(8)
    stabilized(model).run_microbatches(loss_of(model), batch)
    for part in (slice(0, 4), slice(4, 8)):
        (loss_of(plain)(batch | {"x": batch["x"][part], "y": batch["y"][part]}) * 0.5).backward()
    assert_equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("fits", [100, 3])
def test_a_call_is_one_microbatch_of_a_window(fits):
    model = net(fits)
    stabilizer = stabilized(model, accumulate=4)
    batches = [rows(8, seed) for seed in range(4)]
    for i, batch in enumerate(batches):
        stabilizer.run_microbatches(loss_of(model), batch)
        if i < 3:
            assert stabilizer.step().accumulating
    assert_close(gradients(model), whole_gradients(*batches))
    assert stabilizer.step().applied


def tokens(count, seed):
    batch = rows(count, seed)
    batch["y"][torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.5] = -100
    batch["y"][:2] = -100  # a piece of two rows has no token at all: its mean is NaN
    batch["y"][-1] = 0
    return batch


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_token_means_are_weighted_by_tokens_over_pieces_and_windows(accumulate, as_tensor):
    def weight(part):
        count = (part["y"] != -100).sum()
        return count if as_tensor else int(count)

    model = net(fits=2)
    start = copy.deepcopy(model)
    stabilizer = stabilized(model, accumulate=accumulate)
    batches = [tokens(8, seed) for seed in range(accumulate)]
    for batch in batches:
        stabilizer.run_microbatches(loss_of(model), batch, weight=weight)
        outcome = stabilizer.step()
    together = {key: torch.cat([batch[key] for batch in batches]) for key in ("x", "y")} | {"scale": 2.0}
    expected = whole_gradients(together)
    assert_close([a - b for a, b in zip(start.parameters(), model.parameters(), strict=True)], expected, rtol=1e-6)
    assert outcome.loss == pytest.approx(float(loss_of(net())(together).detach()), rel=1e-6)


@pytest.mark.parametrize("weight", [lambda part: part["x"].mean(), lambda part: 1, lambda part: -len(part["x"])])
def test_a_weight_that_does_not_count_is_refused(weight):
    model = net(fits=2)
    with pytest.raises(sf.UsageError, match="weight"):
        stabilized(model).run_microbatches(loss_of(model), rows(8), weight=weight)


def test_fp16_loss_scaling_sees_the_same_gradient():
    def update(fits):
        model = net(fits, dtype=torch.float32)
        start = copy.deepcopy(model)
        stabilizer = stabilized(model, precision="fp16", accumulate=2)

        def loss(part):
            with stabilizer.autocast():
                return loss_of(model)(part)

        for seed in range(2):
            stabilizer.run_microbatches(loss, rows(8, seed, torch.float32))
            outcome = stabilizer.step()
        assert outcome.applied
        assert stabilizer.incidents == [] or [i.kind for i in stabilizer.incidents] == ["memory.split"]
        return [(a - b).detach() for a, b in zip(start.parameters(), model.parameters(), strict=True)]

    assert_close(update(3), update(100), rtol=2e-3)
