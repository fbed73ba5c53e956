"""Step rules run on numpy for floats and on torch for device signals, by the same functions."""

import numpy as np
import pytest
import torch

from surefoot import Signals
from surefoot.detect.step_rules import Library, library_of, limited

LIBRARIES = [Library(None), Library(torch.device("cpu"))]
ROWS = [[3.0, float("nan"), 1.0], [2.0, 0.0, float("inf")]]


def made(library, values):
    return library.own(np.array(values))


def test_floats_are_judged_by_numpy_and_tensors_by_torch():
    assert library_of(Signals(0, loss=1.0)).device is None
    assert library_of(Signals(0, loss=torch.tensor(1.0))).device == torch.device("cpu")


@pytest.mark.parametrize("library", LIBRARIES, ids=["numpy", "torch"])
def test_both_libraries_give_the_same(library):
    rows = made(library, ROWS)
    assert library.is_finite(rows).tolist() == [[True, False, True], [True, True, False]]
    ordered = library.sort_rows(rows)
    assert np.array_equal(np.asarray(ordered.tolist()), [[1, 3, np.nan], [0, 2, np.inf]], equal_nan=True)
    places = made(library, [[0.4], [0.6]])
    assert np.array_equal(np.asarray(library.pick(ordered, places).tolist()), [[1.0], [2.0]])
    assert library.quarters().tolist() == [0.25, 0.5, 0.75]
    assert library.where(rows > 2, 1.0, 0.0).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("library", LIBRARIES, ids=["numpy", "torch"])
def test_both_libraries_limit_values_as_clip_does(library):
    values = made(library, [-1.0, 0.5, 7.0, float("nan")])
    for limits in ((0.0,), (0.0, 2.0)):
        expected = np.clip([-1.0, 0.5, 7.0, np.nan], *limits, *([None] * (2 - len(limits))))
        np.testing.assert_array_equal(np.asarray(limited(values, *limits).tolist()), expected)


@pytest.mark.parametrize("library", LIBRARIES, ids=["numpy", "torch"])
def test_what_was_not_measured_is_nan(library):
    assert np.isnan(float(library.scalar(None)))
    assert float(library.scalar(2.5)) == 2.5


def test_a_state_moves_between_the_libraries():
    state = np.array([1.0, 2.0])
    on_device = LIBRARIES[1].own(state)
    assert isinstance(on_device, torch.Tensor)
    assert LIBRARIES[1].own(on_device) is on_device
    assert isinstance(LIBRARIES[0].own(on_device), np.ndarray)
    assert LIBRARIES[0].own(state) is state
