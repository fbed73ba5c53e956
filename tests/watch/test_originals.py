"""Which changes of torch's classes are the script's, and which modules keep their names; see `test_replaced.py`."""

import contextlib
import functools
import gc
import sys
import types
import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot.guard.step_decision  # noqa: F401 — calls `Tensor.sum`
from surefoot.watch.originals import (
    LOOK_EVERY_CALLS,
    Originals,
    _Class,
    _has_kernels,
    _is_torchs,
    _Owner,
    names_used_in,
    replaced_methods,
)


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


def test_names_are_found_in_a_module_that_grows_while_it_is_read():
    module = types.ModuleType("surefoot.some_lazy_module")

    class Lazy:
        @property
        def __module__(self):
            module.loaded_on_first_use = 1
            return "elsewhere"

    def own():
        return torch.relu

    own.__module__ = module.__name__
    module.lazy, module.own = Lazy(), own
    assert names_used_in(module) == {"torch", "relu"}


def test_modules_that_are_imported_while_all_are_searched_end_nothing(monkeypatch):
    def imports(phase, info):
        name = f"imported_{len(sys.modules)}"
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    monkeypatch.setattr(Tensor, "sum", lambda tensor: None)  # modules are searched only if a method was replaced
    threshold = gc.get_threshold()
    gc.callbacks.append(imports)  # as another thread may import at any point
    gc.set_threshold(1)
    try:
        assert replaced_methods() == ["Tensor.sum"]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(imports)


def test_only_what_the_script_has_put_in_place_of_a_function_stands_for_it(monkeypatch):
    originals, relu, einsum = Originals(), F.relu, torch.functional.einsum
    originals._handed_on = [_Owner(torch.functional), _Owner(F)]
    originals._names_of_tensors = set(vars(Tensor))
    assert originals.original_of(relu) is relu
    monkeypatch.setattr(F, "relu", own := lambda x: x)
    monkeypatch.setattr(F, "gelu", einsum)
    assert originals.original_of(own) is relu
    assert originals.original_of(einsum) is einsum, "it still is where torch has put it"
    monkeypatch.delattr(torch.functional, "norm")
    assert originals.original_of(own) is relu


def test_a_function_that_torch_itself_replaces_is_not_the_script_s(monkeypatch):
    owner = _Owner(torch)
    monkeypatch.setattr(torch, "manual_seed", torch._dynamo.disable(torch.manual_seed))
    assert owner.is_same()
    assert owner.functions["manual_seed"] is torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    assert not owner.is_same()


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


def with_two_methods():
    """Compares nothing but two methods of two classes."""
    originals = Originals()
    originals._used = {"mean", "sum"}
    originals._classes = [_Class(kind, {"mean", "sum"}) for kind in (Tensor, nn.Parameter)]
    return originals


def test_a_method_that_is_added_to_a_subclass_of_tensors_later_is_not_called():
    class Own(Tensor):
        def mean(self):
            return torch.tensor(-1.0)

    originals = with_two_methods()
    value = torch.ones(3).as_subclass(Own)
    originals._has_threads = lambda: False  # the workers of the tests have threads
    with torch._C.DisableTorchFunctionSubclass():
        for _ in range(3):
            assert originals.call(lambda: float(value.sum())) == 3
        Own.sum = lambda self: torch.tensor(-1.0)
        assert float(value.sum()) == -1
        for _ in range(3):
            assert originals.call(lambda: float(value.sum())) == 3
        assert float(value.sum()) == -1


def test_a_check_that_repeats_the_last_one_searches_for_no_subclasses(monkeypatch):
    class Own(Tensor):
        def sum(self):
            return torch.tensor(-1.0)

    originals = with_two_methods()
    originals.call(int)
    monkeypatch.setattr("surefoot.watch.originals._below", None)
    for _ in range(10):
        assert originals.call(lambda: 5) == 5
    assert Own.sum(None) == -1


def test_subclasses_of_an_installed_library_stay_as_they_are_and_one_derived_from_them_does_not(monkeypatch):
    library = types.ModuleType("library_of_test")
    library.__file__ = "/usr/lib/python3/site-packages/library_of_test/__init__.py"
    monkeypatch.setitem(sys.modules, "library_of_test", library)
    made = type("OfLibrary", (Tensor,), {"sum": lambda self: torch.tensor(-1.0), "__module__": "library_of_test"})
    originals = with_two_methods()
    originals._has_threads = lambda: False
    value = torch.ones(3).as_subclass(made)
    with torch._C.DisableTorchFunctionSubclass():
        assert originals.call(lambda: float(value.sum())) == -1
        derived = type("OfScript", (made,), {"sum": lambda self: torch.tensor(-2.0), "__module__": __name__})
        value = torch.ones(3).as_subclass(derived)
        for _ in range(LOOK_EVERY_CALLS + 1):
            originals.call(int)
        assert originals.call(lambda: float(value.sum())) == -1, "the library's method, not the script's"
        assert float(value.sum()) == -2


def test_only_surefoots_own_code_is_hidden_from_the_compiler():
    codes = set(Originals().codes())
    assert Originals.codes.__code__ in codes
    helper = contextlib.contextmanager(int).__code__  # shared by everything that it decorates
    assert helper not in codes
    assert {code.co_filename for code in codes if not code.co_filename.startswith("<")} <= set(_own_files())


def _own_files():
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("surefoot"):
            yield module.__file__
