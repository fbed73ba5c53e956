"""A script for the CPU runs on the default device: generators, NumPy, mixed precision. CUDA itself is in tests/gpu."""

import torch

import forked
from surefoot.watch.script_hooks import has_modes_of_its_own
from surefoot.zoo.on_device import DefaultDevice

PREPARED = """
import numpy as np, torch
from surefoot.zoo.on_device import use_device
before = torch.Tensor.__dict__.copy(), torch.Generator
use_device(torch.device("{device}"))
assert before == (torch.Tensor.__dict__, torch.Generator)
"""


def test_a_generator_of_the_cpu_draws_there_and_the_numbers_are_moved():
    expected = torch.Generator().manual_seed(3)
    first, order = torch.randn(4, generator=expected), torch.randperm(9, generator=expected)
    with DefaultDevice(torch.device("meta")):
        generator = torch.Generator().manual_seed(3)
        assert torch.randn(4, generator=generator).is_meta
        assert torch.equal(torch.randperm(9, generator=generator, device="cpu"), order)
        weights = torch.ones(4, device="cpu").uniform_(generator=generator)
        assert not torch.multinomial(weights, 2, generator=generator).is_meta
        assert torch.randn(4).is_meta
        assert not torch.nn.init.normal_(weights, generator=generator).is_meta
    assert torch.randn(4).device == first.device


def test_what_comes_from_numpy_is_moved_unless_modes_are_off():
    code = """
array = np.ones(3)
assert torch.from_numpy(array).is_meta
with torch._C.DisableTorchFunction():
    assert not torch.from_numpy(array).is_meta
"""
    assert forked.run(["-c", PREPARED.format(device="meta") + code]).stderr == ""


def test_mixed_precision_is_made_for_the_device_whatever_the_script_names():
    code = """
assert torch.autocast("cuda", dtype=torch.bfloat16).device == "cpu"
assert torch.autocast(device_type="cuda", dtype=torch.bfloat16).device == "cpu"
for scaler in (torch.amp.GradScaler(), torch.amp.GradScaler("cuda", 8.0), torch.amp.GradScaler(device="cuda")):
    assert scaler._device == "cpu"
assert torch.amp.GradScaler("cuda", 8.0)._init_scale == 8.0
assert np.asarray(torch.ones(2)).sum() == torch.ones(2).numpy().sum() == 2
"""
    assert forked.run(["-c", PREPARED.format(device="cpu") + code]).stderr == ""


def test_it_is_a_default_device_to_surefoot_and_no_mode_of_the_script():
    code = "from surefoot.watch.script_hooks import has_modes_of_its_own\nassert not has_modes_of_its_own()"
    assert forked.run(["-c", PREPARED.format(device="cpu") + code]).stderr == ""
    with DefaultDevice(torch.device("cpu")):
        assert has_modes_of_its_own()
