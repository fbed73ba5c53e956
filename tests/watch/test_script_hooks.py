"""Function modes of the script are told from the default device."""

import torch
from torch.overrides import TorchFunctionMode

from surefoot.watch.script_hooks import has_modes_of_its_own


def test_a_mode_and_a_device_block_are_the_scripts_own():
    assert not has_modes_of_its_own()
    with TorchFunctionMode():
        assert has_modes_of_its_own()
    with torch.device("cpu"):
        assert has_modes_of_its_own()


def test_a_default_device_is_not():
    torch.set_default_device("cpu")
    try:
        assert not has_modes_of_its_own()
        with torch.device("meta"):
            assert has_modes_of_its_own()
    finally:
        torch.set_default_device(None)
