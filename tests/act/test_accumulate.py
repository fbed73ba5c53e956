import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import surefoot as sf
from surefoot.act.accumulate import AccumulationWindow


def taken(window, loss, weight):
    """One microbatch of one loss; gives what backward was run on."""
    scaled = window.scaled(loss, weight)
    window.add(loss, weight)
    window.close()
    return scaled


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def model_and_data(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (rows,), generator=generator)
    return model, inputs, targets


def updates(model, start):
    return [(before - now).detach().numpy() for now, before in zip(model.parameters(), start, strict=True)]


def copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def full_batch_update(rows, loss_of):
    """What plain SGD with learning rate 1 does on the whole batch: the gradient itself."""
    model, inputs, targets = model_and_data(rows)
    loss_of(model(inputs), targets).backward()
    return [parameter.grad.numpy() for parameter in model.parameters()]


def accumulated_update(parts, loss_of, weight_of=None, accumulate=None, **settings):
    """The same, by microbatches of the given sizes, as the stabilizer applies it."""
    model, inputs, targets = model_and_data(sum(parts))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stabilizer = sf.TrainingStabilizer(model, optimizer, accumulate=accumulate or len(parts), **settings)
    start = copies(model)
    for x, y in zip(inputs.split(parts), targets.split(parts), strict=True):
        weight = None if weight_of is None else weight_of(y)
        stabilizer.backward(loss_of(model(x), y), weight=weight)
        stabilizer.step()
    stabilizer.flush()
    assert stabilizer.steps == 1
    return updates(model, start), stabilizer.history[0]


def assert_equal_to_full_batch(found, rows, loss_of, rtol=1e-6):
    for ours, full in zip(found, full_batch_update(rows, loss_of), strict=True):
        np.testing.assert_allclose(ours, full, rtol=rtol, atol=rtol * np.abs(full).max())


mean_loss = torch.nn.functional.cross_entropy
IGNORED = 2


def token_loss(logits, targets):
    """The mean over those targets that count, as with padding."""
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED)


def tokens(targets):
    return int((targets != IGNORED).sum())


# ---- through the stabilizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_even_microbatches_equal_the_full_batch(count):
    found, _ = accumulated_update([4] * count, mean_loss)
    assert_equal_to_full_batch(found, 4 * count, mean_loss)


@given(sizes)
def test_uneven_microbatches_equal_the_full_batch(parts):
    found, record = accumulated_update(parts, mean_loss, weight_of=len)
    assert_equal_to_full_batch(found, sum(parts), mean_loss)
    model, inputs, targets = model_and_data(sum(parts))
    assert record.signals.loss == pytest.approx(mean_loss(model(inputs), targets).item(), rel=1e-6)


@given(st.lists(st.integers(3, 9), min_size=1, max_size=6))
def test_token_weighted_losses_equal_the_full_batch(parts):
    _, _, targets = model_and_data(sum(parts))
    assume(all(tokens(part) for part in targets.split(parts)))
    found, _ = accumulated_update(parts, token_loss, weight_of=tokens)
    assert_equal_to_full_batch(found, sum(parts), token_loss)


def test_weights_may_be_tensors():
    found, _ = accumulated_update([2, 7, 3], mean_loss, weight_of=lambda y: torch.tensor(len(y)))
    assert_equal_to_full_batch(found, 12, mean_loss)


@pytest.mark.parametrize("settings", [{}, {"decide_on": "device"}, {"clip": sf.CentralizeGradients()}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("number", [int, torch.tensor], ids=["number", "tensor"])
def test_weights_are_exact_in_the_precision_of_the_model(number, fused, settings):
    model, inputs, targets = model_and_data(12)
    before, shapes = copies(model), settings.get("clip")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    stabilizer = sf.TrainingStabilizer(model, optimizer, accumulate=3, **settings)
    for x, y in zip(inputs.split([3, 7, 2]), targets.split([3, 7, 2]), strict=True):
        stabilizer.backward(mean_loss(model(x), y), weight=number(len(y)))
        stabilizer.step()
    full = [torch.from_numpy(each) for each in full_batch_update(12, mean_loss)]
    if shapes is not None:
        full = [each - each.mean(dim=1, keepdim=True) if each.ndim > 1 else each for each in full]
    for now, start, expected in zip(model.parameters(), before, full, strict=True):
        torch.testing.assert_close(start - now.detach(), expected, rtol=1e-13, atol=1e-15)


def mean_by_hand(logits, targets):
    """The mean over those targets that count, divided by hand: without any it is 0/0, and so is its gradient."""
    counts = targets != IGNORED
    return (mean_loss(logits, targets, reduction="none") * counts).sum() / counts.sum()


@pytest.mark.parametrize("loss_of", [token_loss, mean_by_hand])
@pytest.mark.parametrize("empty", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("number", [int, float, torch.tensor], ids=["int", "float", "tensor"])
def test_a_microbatch_whose_targets_are_all_ignored_counts_for_nothing(number, empty, loss_of):
    model, inputs, _ = model_and_data(9)
    targets = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 1])
    targets[3 * empty : 3 * empty + 3] = IGNORED
    before = copies(model)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate=3)
    for x, y in zip(inputs.split(3), targets.split(3), strict=True):
        stabilizer.backward(loss_of(model(x), y), weight=number(tokens(y)))
        stabilizer.step()
    record = stabilizer.history[0]
    assert not record.skipped
    other, _, _ = model_and_data(9)
    full = token_loss(other(inputs), targets)
    full.backward()
    assert record.signals.loss == pytest.approx(full.item(), rel=1e-6)
    assert stabilizer.incidents == []
    for ours, parameter in zip(updates(model, before), other.parameters(), strict=True):
        np.testing.assert_allclose(ours, parameter.grad.numpy(), rtol=1e-6)


def test_a_window_of_ignored_targets_alone_changes_nothing_and_the_next_one_counts():
    model, inputs, targets = model_and_data(4)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate=2)
    before = copies(model)
    for _ in range(2):
        stabilizer.backward(token_loss(model(inputs), torch.full((4,), IGNORED)), weight=0)
        outcome = stabilizer.step()
    assert not outcome.skipped
    assert all(torch.equal(ours, start) for ours, start in zip(model.parameters(), before, strict=True))
    for _ in range(2):
        stabilizer.backward(mean_loss(model(inputs), targets), weight=4)
        outcome = stabilizer.step()
    assert outcome.applied
    assert_equal_to_full_batch(updates(model, before), 4, mean_loss)


def test_the_plain_average_of_uneven_microbatches_is_not_the_full_batch():
    found, _ = accumulated_update([1, 9], mean_loss)
    with pytest.raises(AssertionError):
        assert_equal_to_full_batch(found, 10, mean_loss, rtol=1e-3)


@pytest.mark.parametrize("weight_of", [None, len], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("parts", [[4], [4, 4], [4, 4, 4]], ids=len)
def test_a_last_partial_window_steps_on_flush_with_the_mean_of_what_it_has(parts, weight_of):
    found, record = accumulated_update(parts, mean_loss, weight_of, accumulate=5)
    assert_equal_to_full_batch(found, sum(parts), mean_loss)
    assert not record.skipped


@pytest.mark.parametrize("scaler", [sf.DynamicLossScaler(2.0**12), sf.DynamicLossScaler(1000.0)], ids=["2^12", "1000"])
def test_loss_scaling_and_weights_cancel_out_together(scaler):
    found, record = accumulated_update([2, 7, 3], mean_loss, weight_of=len, scaler=scaler)
    assert_equal_to_full_batch(found, 12, mean_loss)
    full = np.sqrt(sum(np.square(g).sum() for g in full_batch_update(12, mean_loss)))
    assert record.signals.grad_norm == pytest.approx(full, rel=1e-6)


def test_the_limit_of_a_clipper_is_for_the_mean_gradient():
    full = full_batch_update(12, mean_loss)
    norm = np.sqrt(sum(np.square(g).sum() for g in full))
    found, _ = accumulated_update([2, 7, 3], mean_loss, weight_of=len, clip=sf.ClipByNorm(norm / 2))
    for ours, whole in zip(found, full, strict=True):
        np.testing.assert_allclose(ours, whole / 2, rtol=1e-5)


def test_unweighted_microbatches_are_divided_bit_for_bit_as_by_hand():
    model, inputs, targets = model_and_data(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    stabilizer = sf.TrainingStabilizer(model, optimizer, accumulate=3)
    other, _, _ = model_and_data(12)
    bare = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    for _ in range(4):
        for x, y in zip(inputs.split(4), targets.split(4), strict=True):
            stabilizer.backward(mean_loss(model(x), y))
            stabilizer.step()
            (mean_loss(other(x), y) / 3).backward()
        bare.step()
        bare.zero_grad()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_scheduler_steps_once_per_optimizer_step():
    model, inputs, targets = model_and_data(24)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    stabilizer = sf.TrainingStabilizer(model, optimizer, scheduler=scheduler, accumulate=4)
    accumulating = []
    for x, y in zip(inputs.split(4), targets.split(4), strict=True):
        stabilizer.backward(mean_loss(model(x), y))
        accumulating.append(stabilizer.step().accumulating)
    assert accumulating == [True, True, True, False, True, True]
    assert scheduler.last_epoch == 1
    stabilizer.flush()
    assert scheduler.last_epoch == 2
    assert stabilizer.flush() is None
    assert stabilizer.steps == 2


# ---- the arithmetic -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 1_000)), min_size=1, max_size=8))
def test_the_mean_loss_is_the_weighted_mean(microbatches):
    window = AccumulationWindow(len(microbatches))
    for loss, weight in microbatches:
        taken(window, torch.tensor(loss, dtype=torch.float64), weight)
    losses, weights = zip(*microbatches, strict=True)
    assert window.full
    assert window.mean_loss.item() == pytest.approx(np.average(losses, weights=weights), rel=1e-5, abs=1e-5)


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=8))
def test_what_backward_gets_over_the_divisor_adds_up_to_the_mean(weights):
    window = AccumulationWindow(len(weights))
    scaled = [taken(window, torch.ones((), dtype=torch.float64), weight).item() for weight in weights]
    np.testing.assert_allclose(np.array(scaled) / window.divisor, np.array(weights) / sum(weights), rtol=1e-12)
    assert scaled[0] == 1.0


@given(st.integers(1, 8), st.data())
def test_a_window_that_ends_early_is_divided_by_what_it_holds(length, data):
    count = data.draw(st.integers(1, length))
    window = AccumulationWindow(length)
    scaled = [taken(window, torch.ones((), dtype=torch.float64), None).item() for _ in range(count)]
    assert sum(scaled) / window.divisor == pytest.approx(1.0, rel=1e-12)
    assert window.full == (count == length)


@pytest.mark.parametrize("weights", [(5, 2, 9), (None, None, None)], ids=["weighted", "plain"])
def test_a_window_that_was_saved_in_the_middle_continues_as_if_it_never_had_been(weights):
    whole, first, second = (AccumulationWindow(3) for _ in range(3))
    expected = [taken(whole, torch.tensor(1.0 + number), weight) for number, weight in enumerate(weights)]
    assert taken(first, torch.tensor(1.0), weights[0]) == expected[0]
    second.load_state_dict(first.state_dict())
    assert [taken(second, torch.tensor(1.0 + number), weights[number]) for number in (1, 2)] == expected[1:]
    assert (second.full, second.mean_loss, second.divisor) == (True, whole.mean_loss, whole.divisor)


def test_a_cleared_window_is_empty_and_of_the_same_kind():
    window = AccumulationWindow(3, across_ranks=True)
    taken(window, torch.tensor(1.0), 5)
    assert window.cleared() == AccumulationWindow(3, across_ranks=True)
    assert window.cleared().mean_loss is None


def test_ranks_share_one_unit_so_that_their_weights_can_be_added():
    window = AccumulationWindow(2, across_ranks=True)
    assert taken(window, torch.tensor(1.0), 4).item() == 4.0
    assert taken(window, torch.tensor(1.0), 6).item() == 6.0
    assert window.divisor == 10.0


@pytest.mark.parametrize("weight", [-3, -0.5, float("nan"), float("inf"), torch.tensor(-3)])
def test_a_weight_that_is_negative_or_not_finite_is_refused_with_the_way_out(weight):
    with pytest.raises(sf.UsageError, match=f"finite number of at least 0; got {float(weight):g}.*has weight 0"):
        taken(AccumulationWindow(2), torch.tensor(1.0), weight)


@pytest.mark.parametrize("weights", [(3, None), (None, 3)])
def test_a_window_half_weighted_is_refused(weights):
    window = AccumulationWindow(2)
    taken(window, torch.tensor(1.0), weights[0])
    with pytest.raises(sf.UsageError, match="pass it for all of them or for none"):
        taken(window, torch.tensor(1.0), weights[1])


def test_two_losses_of_one_microbatch_add_up_as_their_gradients_do():
    def update(guard):
        model, inputs, targets = model_and_data(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        stabilizer = sf.TrainingStabilizer(model, optimizer) if guard else None
        start = copies(model)
        losses = [mean_loss(model(inputs[:4]), targets[:4]), mean_loss(model(inputs[4:]), targets[4:]) * 3]
        for loss in losses:
            stabilizer.backward(loss) if guard else loss.backward()
        if guard:
            assert stabilizer.step().loss == pytest.approx(float(sum(losses).detach()))
        else:
            optimizer.step()
        return updates(model, start)

    for ours, bare in zip(update(True), update(False), strict=True):
        np.testing.assert_array_equal(ours, bare)


def test_a_microbatch_is_what_lies_between_two_steps_however_many_losses_it_has():
    model, inputs, targets = model_and_data(8)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate=2)
    for part in range(4):
        for _ in range(3):
            stabilizer.backward(mean_loss(model(inputs[2 * part : 2 * part + 2]), targets[2 * part : 2 * part + 2]))
        assert stabilizer.step().accumulating == (part % 2 == 0)
    assert stabilizer.steps == 2


def test_a_backward_that_raised_is_not_counted():
    model, inputs, targets = model_and_data(4)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = mean_loss(model(inputs), targets)
    loss.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stabilizer.backward(loss)
    stabilizer.backward(mean_loss(model(inputs), targets))
    assert stabilizer.step().loss == pytest.approx(float(loss.detach()))
