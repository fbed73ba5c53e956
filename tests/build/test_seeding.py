import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import forked
from surefoot.build import NondeterministicOperationError, seed_everything


@pytest.fixture(autouse=True)
def settings_put_back():
    with seed_everything(0):  # as a context it restores the process-wide settings the tests change
        yield


class Draws(Dataset):
    """What a worker draws from each stream, for each item."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_every_stream_repeats_after_the_same_seed():
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first


def test_another_seed_gives_other_numbers_in_every_stream():
    seed_everything(7)
    first = draw()
    seed_everything(8)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_it_returns_what_it_set():
    seeding = seed_everything(7)
    assert seeding.seed == 7
    assert {"python", "numpy", "torch:cpu"} <= set(seeding.streams)
    assert seeding.settings == {}
    deterministic = seed_everything(7, deterministic=True)
    assert deterministic.deterministic
    assert deterministic.settings["torch.use_deterministic_algorithms"] is True
    assert deterministic.settings["CUBLAS_WORKSPACE_CONFIG"] == os.environ["CUBLAS_WORKSPACE_CONFIG"]


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, None])
def test_a_seed_out_of_numpys_range_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        seed_everything(seed)


def epochs(seed, count=2):
    loader = DataLoader(Draws(), batch_size=2, shuffle=True, num_workers=2, **seed_everything(seed).for_loader())
    return [torch.cat(list(loader)) for _ in range(count)]


def test_loader_workers_repeat_differ_from_each_other_and_differ_by_epoch():
    first, again = epochs(3), epochs(3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    numbers = torch.cat(first)
    for stream in numbers.T:
        assert len(stream.unique()) == len(stream), "a number drawn twice: two workers or epochs share a stream"


def test_the_loader_does_not_depend_on_the_global_stream():
    torch.manual_seed(1)
    seeding = seed_everything(3)
    first = [batch.tolist() for batch in DataLoader(range(8), shuffle=True, **seeding.for_loader())]
    torch.rand(100)
    second = [batch.tolist() for batch in DataLoader(range(8), shuffle=True, **seeding.for_loader())]
    assert first == second


def test_deterministic_runs_are_bitwise_equal_in_two_processes():
    script = """
import torch; torch.set_num_threads(2)
from surefoot.build import seed_everything
seed_everything(5, deterministic=True)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4))
x = torch.randn(16, 3, 12, 12); model(x)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(x).square().mean().backward(); optimizer.step()
print([p.double().sum().item().hex() for p in model.parameters()])
"""
    runs = [forked.run(["-c", script], check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert "0x" in runs[0].stdout


def test_an_operation_without_a_deterministic_form_is_named_with_the_ways_out():
    with (
        pytest.raises(NondeterministicOperationError, match=r"`put_`.*warn_only") as caught,
        seed_everything(0, deterministic=True),
    ):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    assert caught.value.operation == "put_"
    assert not torch.are_deterministic_algorithms_enabled()


def test_without_the_context_torch_names_the_operation_itself():
    seed_everything(0, deterministic=True)
    with pytest.raises(RuntimeError, match="put_"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_the_context_puts_the_settings_back_and_lets_other_errors_through():
    before = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, dict(os.environ))
    with seed_everything(0, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError), seed_everything(0, deterministic=True):
        raise ZeroDivisionError
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, dict(os.environ))


def test_a_numpy_integer_is_a_seed_like_any_other():
    seeding = seed_everything(np.int64(3))
    assert type(seeding.seed) is int
    first = torch.rand(3)
    seed_everything(3)
    assert torch.equal(torch.rand(3), first)
