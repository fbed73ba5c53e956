import io
from typing import NamedTuple

import numpy as np
import pytest
import torch

from streams import NAN, same
from surefoot import LayerStats, Signals
from surefoot.core.state_tree import choose, on_device, pack, pack_record, unpack, unpack_record
from surefoot.types import StepRecord


class Inner(NamedTuple):
    """A state such as a detector has."""

    level: np.ndarray | torch.Tensor = np.zeros(())
    window: tuple[float, ...] = ()
    status: str = "fresh"
    best: float | None = None


def saved(packed):
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


STATES = [
    ((), ()),
    (0, 7),
    (Inner(), Inner(np.float64(0.1), (1.0, 2.0, 0.1), "stable", 3.5)),
    (Inner(), Inner(np.array(NAN), (), "fresh", None)),
    ((Inner(), (), 0), (Inner(np.float64(2.5), (1.0,)), (), 4)),
    ((torch.zeros(3), torch.zeros(())), (torch.tensor([1.0, NAN, 3.0]), torch.tensor(2.0))),
    (np.zeros((2, 2)), np.array([[0.1, 0.2], [0.3, NAN]])),
]


@pytest.mark.parametrize(("fresh", "state"), STATES)
def test_what_is_packed_is_unpacked_bit_for_bit_without_pickle(fresh, state):
    again = unpack(fresh, saved(pack(state)))
    assert same(pack(again), pack(state))
    assert type(again) is type(state) or isinstance(again, (np.ndarray, np.generic))


def test_packing_copies_so_that_later_steps_do_not_change_it():
    tensor, array = torch.zeros(2), np.zeros(2)
    packed = pack((tensor, array))
    tensor += 1
    array += 1
    assert packed[0].tolist() == packed[1].tolist() == [0.0, 0.0]


def test_on_device_turns_arrays_into_float32_tensors():
    state = on_device((Inner(np.float64(0.5), (1.0,)), 3), torch.device("cpu"))
    assert state[0].level.dtype == torch.float32
    assert state[0].window == (1.0,)
    assert state[1] == 3


@pytest.mark.parametrize("keep", [True, False])
def test_choose_selects_and_never_blends(keep):
    old, new = (torch.tensor(1.0), Inner(torch.tensor(2.0))), (torch.tensor(NAN), Inner(torch.tensor(NAN)))
    wanted = old if keep else new
    for flag in (keep, torch.tensor(keep)):
        assert same(pack(choose(flag, old, new)), pack(wanted))
    assert same(pack(choose(torch.tensor(not keep), new, old)), pack(wanted))


def test_a_record_comes_back_with_its_layers():
    layers = LayerStats(
        ("a",), (2,), torch.tensor([1.0]), torch.tensor([NAN]), torch.tensor([2.0]), param_norm=torch.ones(1)
    )
    signals = Signals(9, 1.5, NAN, 2.0, 0.5, 1e-3, 64.0, layers, {"kl": 0.25})
    record = StepRecord(signals, True, ("nonfinite",), overflow=True)
    again = unpack_record(saved(pack_record(record)))
    assert same(pack_record(again), pack_record(record))
    assert (again.signals.layers.names, again.signals.layers.ranks) == (("a",), (2,))
    assert again.signals.layers.update_norm is None
    assert again.signals.extra == {"kl": 0.25}
    assert again.reasons == ("nonfinite",)


def test_a_record_without_layers_comes_back_too():
    record = StepRecord(Signals(0, loss=1.0), False)
    assert unpack_record(saved(pack_record(record))) == record
