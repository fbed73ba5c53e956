"""Copies that do not wait: memory is used again, and what had arrived is read although the device has failed."""

import pytest
import torch

from surefoot.core import device, device_copies

CPU = torch.device("cpu")
FAILURE = ("AcceleratorError", "CUDA error: device-side assert triggered")


def test_a_copy_is_read_after_a_failure_if_it_had_arrived_and_else_refused(monkeypatch):
    monkeypatch.setattr(device, "_failure", [FAILURE])
    buffer = device_copies._Buffers().take(64, CPU)
    buffer.clear()
    memory = buffer.memory
    host = memory[:24].view(torch.float64)
    copy = device_copies.AsyncCopy(host, buffer, CPU)
    with pytest.raises(device.DeviceFailed):
        copy.wait()
    host[:2] = torch.tensor([1.5, torch.nan])
    with pytest.raises(device.DeviceFailed):  # one number is still missing
        copy.wait()
    host[2] = 0.0
    found = copy.wait()
    assert found[[0, 2]].tolist() == [1.5, 0.0]
    memory.zero_()
    assert copy.wait()[0] == 1.5


def test_memory_for_copies_is_used_again_and_is_never_smaller_than_asked_for():
    buffers = device_copies._Buffers()
    first = buffers.take(300, CPU)
    assert len(first.memory) == 512
    first.memory.zero_()
    buffers.give_back(first, CPU)
    assert buffers.take(200, CPU) is not first
    again = buffers.take(512, CPU)
    assert again is first
    again.clear()
    assert (again.memory == device_copies._ABSENT).all()


def test_views_of_a_buffer_share_its_memory():
    buffer = device_copies._Buffers().take(64, CPU)
    numbers = buffer.view(torch.int64, 3)
    numbers.numpy()[:] = (5, -1, 1 << 40)
    assert buffer.view(torch.int64, 3) is numbers
    assert buffer.view(torch.int64, 2).tolist() == [5, -1]
    assert buffer.memory[:24].view(torch.int64).tolist() == [5, -1, 1 << 40]
    buffer.clear()
    assert numbers.view(torch.uint8).tolist() == [device_copies._ABSENT] * 24


@pytest.mark.parametrize("dtype", list(device_copies._WORDS))
def test_a_number_has_arrived_when_its_memory_says_so(dtype):
    slots = device_copies._NumberSlots(dtype, CPU)
    slot = slots.take()
    number = device_copies.ArrivingNumber(slot, CPU)
    assert not number.has_arrived()
    assert not number.has_arrived(within=1e-4)
    slot.place.fill_(-0.75)
    assert number.has_arrived()
    assert number.wait() == number.wait() == -0.75
    left = len(slots.free)
    other = device_copies.ArrivingNumber(slots.take(), CPU)
    assert len(slots.free) == left - 1
    other._slot.place.fill_(torch.nan)
    assert other.has_arrived()  # the NaN of an operation is a number like others
    assert other.wait() != other.wait()


def test_slots_are_used_again_and_more_are_made_when_all_are_under_way():
    slots = device_copies._NumberSlots(torch.float32, CPU)
    taken = [slots.take() for _ in range(device_copies._SLOTS + 1)]
    assert len({id(each) for each in taken}) == device_copies._SLOTS + 1
    places = {each.place.data_ptr() for each in taken}
    assert len(places) == device_copies._SLOTS + 1


def test_the_slot_of_a_number_nobody_waits_for_is_used_again_once_it_has_arrived():
    slots = device_copies._NumberSlots(torch.float32, CPU)
    number = device_copies.ArrivingNumber(slots.take(), CPU)
    slot = number._slot
    del number
    others = [slots.take() for _ in range(device_copies._SLOTS)]
    assert slot not in others
    slot.place.fill_(1.0)
    for each in others:
        each.place.fill_(1.0)
    assert slot in [slots.take() for _ in range(device_copies._SLOTS)]


def test_a_number_that_a_failed_device_has_not_sent_is_refused(monkeypatch):
    monkeypatch.setattr(device, "_failure", [FAILURE])
    slots = device_copies._NumberSlots(torch.float32, CPU)
    slot = slots.take()
    number = device_copies.ArrivingNumber(slot, CPU)
    with pytest.raises(device.DeviceFailed):
        number.wait()
    slot.place.fill_(2.5)
    assert number.wait() == 2.5


def test_a_number_on_the_host_is_known_at_once_whatever_its_shape():
    for value in (torch.tensor(1.5), torch.tensor([[1.5]]), torch.nn.Parameter(torch.tensor([1.5]))):
        number = device_copies.begin_reading_number(value)
        assert number.has_arrived()
        assert number.wait() == 1.5
    assert device_copies.begin_reading_number(torch.tensor([True])).wait() == 1.0
