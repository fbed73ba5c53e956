"""Which changes of torch's classes are the script's, and which modules keep their names; see `test_replaced.py`."""

import functools
import gc
import types
import weakref

from torch import nn

from surefoot.watch.originals import Originals, _has_kernels, _is_torchs


def test_functions_are_torch_s_by_where_they_were_written():
    @functools.wraps(nn.Module.eval)
    def own(self):
        return self

    assert own.__module__.startswith("torch.")
    assert not _is_torchs(own)
    assert _is_torchs(nn.Module.eval)
    assert not _is_torchs(False)


def test_modules_with_kernels_keep_their_names():
    module = types.ModuleType("surefoot.some_kernels")
    assert not _has_kernels(module)
    module.tl = types.ModuleType("triton.language")
    assert _has_kernels(module)


def test_asking_for_other_threads_keeps_no_variable_of_the_script_alive():
    class Activation:
        pass

    def forward():
        held = Activation()
        Originals()._has_threads()
        return weakref.ref(held)

    gc.disable()
    try:
        assert forward()() is None
    finally:
        gc.enable()
