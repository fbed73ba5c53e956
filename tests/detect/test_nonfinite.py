import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, broken, flags, ordinary
from surefoot import Signals


def judged(**signals):
    return flags(sf.NonFinite(), [Signals(0, **signals)])[0]


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_broken_loss_is_anomalous_though_the_gradients_are_fine(loss):
    assert judged(loss=loss, grad_norm=1.0, nonfinite=0.0)


def test_one_broken_entry_is_anomalous_though_the_loss_is_fine():
    assert judged(loss=1.0, grad_norm=NAN, nonfinite=1.0)


def test_a_norm_that_overflowed_with_every_entry_finite_is_left_to_explosion():
    assert not judged(loss=1.0, grad_norm=INF, nonfinite=0.0)


def test_without_a_count_the_norm_decides():
    assert judged(loss=1.0, grad_norm=NAN)
    assert judged(grad_norm=INF)
    assert not judged(grad_norm=1e30)


def test_what_nobody_measured_is_healthy():
    assert not judged()


def test_it_is_an_error_not_a_warning():
    _, verdict = sf.NonFinite().update((), Signals(0, loss=NAN))
    assert verdict.severity == "error"


@given(st.lists(st.one_of(ordinary, broken), max_size=40))
def test_each_step_is_judged_by_itself_and_the_next_healthy_one_is_healthy(losses):
    found = flags(sf.NonFinite(), [Signals(i, loss=loss, nonfinite=0.0) for i, loss in enumerate(losses)])
    assert found == [abs(loss) == INF or loss != loss for loss in losses]


@given(st.lists(st.tuples(st.one_of(ordinary, broken), st.integers(0, 3)), max_size=20))
def test_floats_and_tensors_give_the_same_verdicts(rows):
    floats = [Signals(0, loss=loss, nonfinite=float(count)) for loss, count in rows]
    tensors = [Signals(0, loss=torch.tensor(loss), nonfinite=torch.tensor(float(count))) for loss, count in rows]
    assert flags(sf.NonFinite(), floats) == flags(sf.NonFinite(), tensors)
