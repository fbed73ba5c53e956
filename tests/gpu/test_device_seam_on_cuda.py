"""The device seam on CUDA: each function gives what `torch.cuda` gives."""

from collections import deque

import pytest
import torch

from surefoot.core import device, device_copies
from surefoot.keep.snapshots import SHARE_OF_DEVICE, SHARE_OF_UNRESERVED, bytes_for_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def home():
    return torch.zeros(1, device="cuda").device


def test_numbers_arrive_in_pinned_memory_without_a_sync(home):
    vector = torch.arange(1000.0, device=home)
    torch.cuda.set_sync_debug_mode("error")
    try:
        reading = device_copies.begin_reading(vector)
        table = device_copies.upload([3, 1, 2], home)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reading.wait().tolist() == vector.tolist()
    assert table.tolist() == [3, 1, 2]


def test_the_memory_of_copies_is_used_again_also_of_those_nobody_waited_for(home):
    for number in range(200):
        reading = device_copies.begin_reading(torch.full((10,), float(number), device=home))
        if number % 3:
            assert reading.wait().tolist() == [float(number)] * 10
    del reading
    torch.cuda.synchronize()
    held = len(device_copies._buffers._free[256, home])
    kept = [device_copies.begin_reading(torch.full((10,), float(number), device=home)) for number in range(held)]
    assert device_copies._buffers._free[256, home] == deque()
    assert [each.wait()[0].item() for each in kept] == list(map(float, range(held)))
    assert held < 200


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_single_numbers_arrive_without_a_sync(home, dtype):
    values = [torch.full(shape, number, dtype=dtype, device=home) for number, shape in ((3, ()), (-2, (1, 1)))]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers = [device_copies.begin_reading_number(value) for _ in range(400) for value in values]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [number.wait() for number in numbers] == [3.0, -2.0] * 400
    assert device_copies.begin_reading_number(torch.tensor(torch.nan, device=home)).wait() != 0.0


def test_streams_and_events_are_those_of_torch(home):
    stream, event = device.new_stream(home), device.new_event(home, blocking=True)
    assert isinstance(stream, torch.cuda.Stream)
    assert isinstance(event, torch.cuda.Event)
    assert device.current_stream(home) == device.current_stream() == torch.cuda.current_stream()
    with device.device_context(home), device.on_stream(stream):
        assert torch.cuda.current_stream() == stream
        event.record(stream)
    event.synchronize()


def test_a_recorded_graph_runs_again(home):
    total, one = torch.zeros(1, device=home), torch.ones(1, device=home)
    assert device.can_record(home)
    with device.recorded_graph(home) as graph:
        assert device.is_capturing()
        assert device.is_capturing(home)
        assert not device.can_record(home)
        total += one
    assert not device.is_capturing()
    for _ in range(3):
        graph.replay()
    assert total.item() == 3.0


def test_memory_is_what_torch_counts(home):
    kept = torch.zeros(1 << 20, device=home)
    assert device.is_in_use()
    assert home in device.devices_in_use()
    assert device.visible_devices()[0] == "cuda:0"
    assert device.allocated_and_reserved() == (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    assert device.memory_counters(home)["allocated"] == torch.cuda.memory_allocated()
    assert 0 < device.free_bytes() <= device.total_bytes(home)
    assert device.uuid_of(home) == str(torch.cuda.get_device_properties(home).uuid)
    assert device.name_of(home) == torch.cuda.get_device_name(home)
    assert kept.numel()


def test_random_states_continue_where_they_were_read(home):
    (index, generator), *_ = device.generators_of([home, torch.device("cpu")])
    assert generator is torch.cuda.default_generators[index]
    states = device.random_states()
    first = torch.rand(4, device=home)
    device.set_random_states(states)
    assert torch.equal(torch.rand(4, device=home), first)
    noted = generator.get_state()
    second = torch.rand(4, device=home)
    states = device.random_states()
    device.replace_random_states(states, [(index, noted)])
    device.set_random_states(states)
    assert torch.equal(torch.rand(4, device=home), second)


def test_copies_of_weights_take_no_more_than_half_of_what_is_free(home):
    free = device.unreserved_bytes(home)
    assert 0 < free <= device.total_bytes(home)
    assert bytes_for_copies([home]) <= min(
        SHARE_OF_DEVICE * device.total_bytes(home), 1.01 * SHARE_OF_UNRESERVED * free
    )
