"""Makes surefoot call the functions that existed before the script ran.

A script may replace anything: `torch.Tensor.to`, `torch.no_grad`, `float`, `time.monotonic`. Its replacements are for
its own calls, and may count, print or draw random numbers: surefoot must not call them. Two mechanisms ensure that.

- `Originals.bind` gives surefoot's modules their own names for builtins and for functions of other modules, taken right
  after torch was imported. Modules are replaced with a copy of the functions that surefoot uses; everything else,
  such as `sys.stderr`, is looked up in the module on access.
- Methods are found through the class, which is shared. `Originals.call` compares the classes of torch with their
  original state. Normally nothing has changed. Otherwise the original methods are restored during the call, and so are
  methods that a tensor subclass of the script overrides; subclasses of installed libraries stay as they are. Other
  threads of the script would see that: while any runs, methods of subclasses stay as they are, and with replaced
  methods of torch's own classes the call is not made at all.

Not covered: attributes set on single objects, and what the libraries that surefoot calls look up themselves.
"""

from __future__ import annotations

import builtins
import functools
import gc
import sys
import threading
import types
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.core.type_version import version_of
from surefoot.core.user_code import HERE, is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_UNBOUND = ("surefoot.watch.run_script", "surefoot.watch.torch_import", "surefoot.watch.process_exit",
            "surefoot.watch.patches.hooks", "surefoot.diagnose", "surefoot.doctor",
            "surefoot.replay", "surefoot.experiments", "surefoot.commands.zoo", "surefoot.cli", "surefoot.zoo",
            "surefoot.__main__")  # fmt: skip
"""Modules that replace functions, or that run before and after the script."""
_CLASSES = (Tensor, nn.Parameter, nn.Module, Optimizer)
_FREE = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__init__", "__new__",
                   "__init_subclass__", "__torch_function__", "__torch_dispatch__", "__slots__", "__qualname__",
                   "__static_attributes__", "__firstlineno__", "__slotnames__",
                   "___needs_generation_tag_patch"})  # fmt: skip
"""Names that are never called on an existing object, or that are disabled in another way, as `__torch_function__`.

`__slotnames__` is set by `copyreg` on a class when an object of it is pickled or copied; Dynamo sets the last one on
`Module` when it compiles."""
_OWNERS = (Tensor, torch, torch.functional, nn.functional)
"""Modules in which torch looks up functions that are written in Python and dispatched to a mode."""
_MISSING = object()
LOOK_EVERY_CALLS = 64
"""The number of calls between two searches for subclasses of tensors, once the script or a library has made one."""
_KINDS = (torch.dtype, torch.layout, float)
"""Types of constants, such as `math.inf`, which are copied: looking each up in the module would cost a call."""


class Unobservable(Exception):
    """Nothing can be observed now without a visible effect on the script."""


class Originals:
    """The functions and methods that existed before the script ran."""

    def __init__(self) -> None:
        self._builtins = dict(vars(builtins))
        self._frozen: dict[int, _Frozen] = {}
        self._bound: set[str] = set()
        self._used: set[str] = set()
        self._classes: list[_Class] = []
        self._subclasses: int = 0
        self._changes: list[tuple[type, str, Any]] = []
        """The methods that the script had replaced at the last check, with their originals."""
        self._last_seen: list[Any] = []
        """The number of subclasses of tensors at that check, and the replaced methods of torch's own classes."""
        self._sizes: list[tuple[type, int]] = []
        """The subclasses of tensors outside torch, and the number of names in each at that check."""
        self._calls_since = 0
        self._threads: tuple[set[int], list[threading.Thread]] = set(), []
        """The threads that existed at the last check."""
        self._others: set[int] = set()
        """The threads among them that are not surefoot's."""
        self._handed_on: list[_Owner] = []
        """Functions written in Python that torch looks up when a mode is active."""
        self._names_of_tensors: set[str] = set()
        """The attributes of the class of tensors itself."""
        self._inherited: set[str] = set()
        """Methods of tensors that are written in C; a replacement would shadow them."""
        self.is_bound = False
        """Whether `bind` was called. From then on, `call` can compare."""
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        """The names that `bind` has set in modules of surefoot, with their previous values."""

    def bind(self) -> None:
        """Give the modules of surefoot that are loaded their own names."""
        added = [module for name, module in sys.modules.copy().items() if self._is_added(name, module)]
        self._bound.update(module.__name__ for module in added)
        self._used.update(*map(names_used_in, added))
        used_builtins = self._used & self._builtins.keys()
        for module in added:
            held = vars(module)
            for name, value in list(held.items()):
                if type(value) is types.ModuleType and not value.__name__.startswith("surefoot"):
                    self._replaced.append((held, name, value))
                    held[name] = self._freeze(value)
            for name in used_builtins - held.keys():
                self._replaced.append((held, name, _MISSING))
                held[name] = self._builtins[name]
        if not self._classes:
            self._handed_on = [_Owner(owner) for owner in _OWNERS]
            self._names_of_tensors = set(vars(Tensor))
            self._inherited = set(dir(torch._C.TensorBase)) - self._names_of_tensors
            self._classes = [_Class(kind, self._used) for kind in _CLASSES]
            self.is_bound = True

    def unbind(self) -> None:
        """Restore the previous names in the modules of surefoot. Nothing is observed any more."""
        while self._replaced:
            held, name, value = self._replaced.pop()
            if value is _MISSING:
                held.pop(name, None)
            else:
                held[name] = value
        self._classes, self._bound, self.is_bound = [], set(), False

    def codes(self) -> Iterator[types.CodeType]:
        """All loaded code of surefoot, without that of decorators that others use too, such as `contextmanager`."""
        for name, module in sys.modules.copy().items():
            if name.startswith("surefoot.") and not name.startswith("surefoot.zoo") and module is not None:
                for code in _codes_of(module):
                    if code.co_filename.startswith((HERE, "<")):  # in angle brackets: the methods of a dataclass
                        yield code

    def _is_added(self, name: str, module: Any) -> bool:
        is_ours = name.startswith("surefoot.") and not name.startswith(_UNBOUND) and name not in self._bound
        return is_ours and bool(module) and not ("triton" in sys.modules and _has_kernels(module))

    def _freeze(self, module: types.ModuleType) -> _Frozen:
        known = self._frozen.get(id(module))
        if known is None:
            known = self._frozen[id(module)] = _Frozen(module)
            for name in self._used & vars(module).keys():
                value = vars(module)[name]
                if type(value) is types.ModuleType:
                    value = self._freeze(value)
                if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type, _Frozen, *_KINDS)):
                    vars(known)[name] = value
        return known

    def original_of(self, function: Any) -> Any:
        """The function of torch that the script has replaced with this one, or the function itself.

        Before it calls a mode, torch looks its functions up by name and finds the script's replacements. If the mode
        called the replacement, it would run twice: the script has just called it.
        """
        if not all(owner.is_same() for owner in self._handed_on):
            for owner in self._handed_on:
                for name, value in owner.functions.items():
                    if vars(owner.kind).get(name) is function:
                        return value
        if vars(Tensor).keys() == self._names_of_tensors:
            return function
        holder = getattr(function, "__self__", None)  # for the `__get__` of a property
        for name in self._inherited & vars(Tensor).keys():
            held = vars(Tensor)[name]
            if held is function:
                return getattr(torch._C.TensorBase, name)
            if held is holder:
                return getattr(getattr(torch._C.TensorBase, name), function.__name__)
        return function

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of surefoot with the original methods of torch's classes."""
        classes_are_same = True
        for held in self._classes:  # almost always the whole check, at each observation: without further calls
            if held.version.value != held.same_at:
                classes_are_same = self._classes_are_same()
                break
        count = len(Tensor.__subclasses__())
        if classes_are_same and count == self._subclasses and self._calls_since < LOOK_EVERY_CALLS:
            self._calls_since += 1
            return function(*args)
        if not self._seen_before(count, classes_are_same):
            self._changes = list(self._differences())
        if not self._changes:  # only names that surefoot never uses have changed
            self._accept()
            return function(*args)
        changed = [(kind, name, vars(kind).get(name, _MISSING), was) for kind, name, was in self._changes]
        if self._has_threads():
            if any(kind in _CLASSES for kind, *_ in changed):
                raise Unobservable("the script replaces methods of torch and has other threads, which would notice")
            return function(*args)
        try:
            for kind, name, _, was in changed:
                _put(kind, name, was)
            return function(*args)
        finally:
            for kind, name, now, _ in changed:
                _put(kind, name, now)

    def _has_threads(self) -> bool:
        """Whether there are threads other than this one and surefoot's own."""
        running, known = set(sys._current_frames()), threading.enumerate()  # do not hold the frames themselves
        if (running, known) != self._threads:
            own = {each.ident or 0 for each in known if each.name.startswith("surefoot-")}
            self._threads, self._others = (running, known), running - own
        return bool(self._others - {threading.get_ident()})

    def _classes_are_same(self) -> bool:
        """Whether no class of torch's has changed."""
        try:
            for held in self._classes:
                version = held.version.value
                if version == held.same_at:
                    continue
                if len(held.now) != held.length or held.pick(held.now) != held.picked:
                    return False
                held.same_at = version or None
        except KeyError:
            return False
        return True

    def _seen_before(self, count: int, classes_are_same: bool) -> bool:
        """Whether the classes have changed in the same way as at the last check.

        A new subclass of a subclass may be noticed some calls late: there may be hundreds of them.
        """
        now = [] if classes_are_same else [(len(held.now), held.picked_now()) for held in self._classes]
        seen, before = [count, now], self._last_seen
        self._last_seen, self._calls_since = seen, self._calls_since + 1
        is_same, is_soon = seen == before, self._calls_since < LOOK_EVERY_CALLS
        if is_same and is_soon and all(len(vars(kind)) == size for kind, size in self._sizes):
            return True
        own = [kind for kind in _below(Tensor) if _is_scripts(kind)]
        sizes, self._sizes, self._calls_since = self._sizes, [(kind, len(vars(kind))) for kind in own], 0
        return is_same and self._sizes == sizes

    def _accept(self) -> None:
        """Ignore the current changes: they do not matter."""
        self._subclasses = len(Tensor.__subclasses__())
        for held in self._classes:
            held.length, held.picked, held.same_at = len(held.now), held.pick(held.now), None

    def _differences(self) -> Iterator[tuple[type, str, Any]]:
        """Methods of torch's classes that have changed, and those of the script's own subclasses."""
        for held in self._classes:
            yield from held.differences()
        for kind in _below(Tensor):
            if _is_scripts(kind):
                for name in list(vars(kind)):
                    if name not in _FREE and (name in self._used or name.startswith("__")) and hasattr(Tensor, name):
                        yield kind, name, _MISSING


class _Owner:
    """The functions written in Python of a class or module of torch."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.functions = {name: value for name, value in vars(kind).items() if isinstance(value, types.FunctionType)}
        self._pick = itemgetter(*self.functions)
        self._picked = self._pick(vars(kind))

    def is_same(self) -> bool:
        """Whether they are unchanged, except by torch itself: the compiler replaces `torch.manual_seed`."""
        try:
            now = self._pick(vars(self.kind))
        except KeyError:
            return False
        if now != self._picked and all(
            new is old or _is_torchs(new) for new, old in zip(now, self._picked, strict=True)
        ):
            self.functions, self._picked = dict(zip(self.functions, now, strict=True)), now
        return bool(now == self._picked)


class _Class:
    """The original state of one class."""

    def __init__(self, kind: type, used: set[str]) -> None:
        self.kind, self._used = kind, used
        self.now = _namespace(kind)
        self._before = dict(self.now)
        self._within = self._names_within(used)
        names = [name for name in self._before if self.matters(name)]
        self.version = version_of(kind)
        self.same_at: int | None = None
        """A version of the class in which it was found to be unchanged."""
        self.pick = itemgetter(*names, names[0])
        self.picked, self.length = self.pick(self.now), len(self.now)

    def picked_now(self) -> Any:
        """The relevant methods as they are now; `None` if one was removed."""
        try:
            return self.pick(self.now)
        except KeyError:
            return None

    def matters(self, name: str) -> bool:
        """Whether surefoot calls this method, directly or inside another one."""
        return name not in _FREE and (name in self._used or name in self._within or name.startswith("__"))

    def _names_within(self, used: set[str]) -> set[str]:
        """The names that the methods that surefoot calls use in turn."""
        found: set[str] = set()
        waiting = used & self._before.keys()
        while waiting:
            found |= waiting
            functions = [value for name in waiting if isinstance(value := self._before[name], types.FunctionType)]
            waiting = {name for each in functions for name in each.__code__.co_names} & self._before.keys() - found
        return found

    def differences(self) -> Iterator[tuple[type, str, Any]]:
        """Every method that has changed, with its original."""
        for name in [*self.now, *(self._before.keys() - self.now.keys())]:
            was = self._before.get(name, _MISSING)
            now = self.now.get(name, _MISSING)
            if self.matters(name) and now is not was and not _is_torchs(now):
                yield self.kind, name, was


def _namespace(kind: type) -> Mapping[str, Any]:
    """The namespace of a class without the proxy that `vars` returns, which doubles the time of each access."""
    view = vars(kind)
    held = gc.get_referents(view)
    is_it = len(held) == 1 and type(held[0]) is dict and held[0].keys() == view.keys()
    return held[0] if is_it else view


class _Frozen(types.ModuleType):
    """A module with its original functions; everything else is looked up in the module."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        vars(self)["_now"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_now"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_now"], name, value)


def _has_kernels(module: types.ModuleType) -> bool:
    """Whether a module has Triton kernels: their compiler reads the globals, and must find Triton's own there."""
    held = list(vars(module).values())
    return any(type(value) is types.ModuleType and value.__name__.partition(".")[0] == "triton" for value in held)


def _is_torchs(value: Any) -> bool:
    """Whether torch itself has set a function: Dynamo replaces `Module.__setstate__` when it first compiles.

    The globals of a function show where it was defined: `functools.wraps` copies `__module__`.
    """
    return str(getattr(value, "__globals__", {}).get("__name__", "")).startswith("torch.")


def _is_scripts(kind: type) -> bool:
    """Whether a class belongs to the script: not to torch, nor to an installed library such as torchvision."""
    filename = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return filename is None or is_users(filename)


def replaced_methods() -> list[str]:
    """Methods of torch's own classes that code outside torch has replaced, such as `Tensor.sum`.

    Methods that surefoot never calls are left out: libraries add their own, as transformers adds `Module.smart_apply`.
    """
    found = [
        (kind, name)
        for kind in _CLASSES
        for name, value in list(vars(kind).items())
        if isinstance(plain := getattr(value, "__func__", value), types.FunctionType)
        and not str(plain.__globals__.get("__name__", "")).startswith(("torch.", "typing"))
    ]
    if not found:
        return []
    own = [module for name, module in sys.modules.copy().items() if name.startswith("surefoot.") and module]
    used = {name for module in own for name in names_used_in(module)}
    classes = {kind: _Class(kind, used) for kind in _CLASSES}
    return [f"{kind.__name__}.{name}" for kind, name in found if classes[kind].matters(name)]


def _put(kind: type, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(kind, name)
    else:
        setattr(kind, name, value)


def _below(kind: type) -> Iterator[type]:
    found: list[type] = kind.__subclasses__()
    for below in found:
        yield below
        yield from _below(below)


@functools.cache
def names_used_in(module: types.ModuleType) -> frozenset[str]:
    """The names of globals, builtins and attributes in the code of a module of surefoot."""
    return frozenset(name for code in _codes_of(module) for name in code.co_names)


def _codes_of(module: types.ModuleType) -> Iterator[types.CodeType]:
    """The code of every function that a module defines."""
    values = list(vars(module).values())  # asking a value for its module may import more into it
    waiting = [value for value in values if getattr(value, "__module__", None) == module.__name__]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is types.CodeType:
            yield value
            waiting.extend([each for each in value.co_consts if type(each) is types.CodeType])
        elif kind is types.FunctionType:
            waiting.extend((value.__code__, getattr(value, "__wrapped__", None)))
        elif isinstance(value, type):
            waiting.extend(vars(value).values())
        elif isinstance(value, property):
            waiting.extend((value.fget, value.fset))
        elif isinstance(value, (staticmethod, classmethod)):
            waiting.append(value.__func__)
