"""Observes blocks without gradients, in which scripts evaluate, and compilation.

A block counts if the script's own code opens it, or a function of the script that is decorated with it; or if a
library opens it, such as a trainer, and calls a model in it. Compiled code has guards on active modes and hooks, so
once something is compiled neither is used again. A function of a library that `torch.compile` decorates is compiled at
its first call, if there is one: bitsandbytes decorates many on import. The inputs of compiled models and functions are
observed at each call (`compiled_inputs`).
"""

from __future__ import annotations

import math
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._contextlib import context_decorator

from surefoot.core.function_hooks import Hook, add_hook_to_wrapper
from surefoot.core.user_code import is_users
from surefoot.core.weak_reference import weak_reference
from surefoot.watch.compiled_inputs import may_hold_data
from surefoot.watch.eager_stance import EAGER_LOOKS
from surefoot.watch.function_recorder import remove_leftover_recorders
from surefoot.watch.module_hooks import COMPILED
from surefoot.watch.patches.indexing import follow_compiled
from surefoot.watch.user_frames import is_other_library

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher

INPUTS = "inputs of compiled models"
"""The name of the probe."""
ENTRY = "_callback_from_stance"
"""The function of `torch._dynamo.eval_frame` that each compiled model or function calls before it runs."""
WHY_ENTRY = "the first call of a function that a library has decorated with `torch.compile`; observed once there is one"
MOST_EMPTY = 3
"""After this many blocks without a call of a model, the code of a library is ignored."""


def wrap_modes(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe the blocks in which the script disables gradients."""
    decorator = context_decorator.__code__.co_filename
    blocks = _GradientFreeBlocks(watcher)

    ignored, ignored_files, open_blocks = blocks.ignored, blocks.ignored_files, blocks.open

    def entered(args: Any, kwargs: Any) -> None:
        frame = sys._getframe(2)
        code: Any = frame.f_code
        if code.co_filename == decorator:  # find the function that was decorated
            code = getattr(frame.f_locals.get("func"), "__code__", None)
            if code is None:
                return
        if code.co_filename not in ignored_files and id(code) not in ignored and watcher.probes.here():
            watcher.probes.safely("evaluation", blocks.entered, args[0], code, frame)

    def left(args: Any, kwargs: Any) -> Any:
        return id(args[0]) if open_blocks and blocks.is_open(args[0]) and watcher.probes.here() else None

    def closed(number: int, result: Any) -> None:
        watcher.probes.safely("evaluation", blocks.left, number)

    for context in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled):
        why = "where the script evaluates: a block without gradients begins"
        wrapping.add(context, "__enter__", "evaluation", why, entered)
        why = "where the script evaluates: a block without gradients ends"
        wrapping.add(context, "__exit__", "evaluation", why, left, closed)


class _GradientFreeBlocks:
    """The open blocks without gradients, and the code whose blocks are ignored."""

    def __init__(self, watcher: Watcher) -> None:
        self._evaluations = watcher.evaluations
        self.ignored: dict[int, types.CodeType] = {}
        """Code of libraries that call no model in their blocks, by its identity: its hash is computed at each use."""
        self.ignored_files: set[str] = set()
        """Files of torch, of Python and of surefoot, whose blocks are not evaluations."""
        self.open: list[tuple[int, types.CodeType | None]] = []
        """The open blocks: the identity of the context, and the code of the library that opened it."""
        self._empty: dict[types.CodeType, float] = {}
        """For each code of a library, the number of observed blocks in which no model was called."""

    def entered(self, context: Any, code: types.CodeType, frame: types.FrameType) -> None:
        if _turns_gradients_on(context):
            return
        if is_users(code.co_filename):
            self.open.append((id(context), None))
        elif not is_other_library(code.co_filename):
            self.ignored_files.add(code.co_filename)
            return
        elif _is_inside_model(frame):
            self.ignored[id(code)] = code
            return
        elif self.open:
            return  # inside a block that is already known
        else:
            self.open.append((id(context), code))
        self._evaluations.open()

    def is_open(self, context: Any) -> bool:
        return any(number == id(context) for number, _ in self.open)

    def left(self, number: int) -> None:
        place = next(place for place, (other, _) in enumerate(self.open) if other == number)
        code = self.open.pop(place)[1]
        has_calls = self._evaluations.close()
        if code is None or has_calls is None:
            return
        if has_calls:
            self._empty[code] = -math.inf
        else:
            self._evaluations.forget_empty()
            self._empty[code] = self._empty.get(code, 0) + 1
            if self._empty[code] >= MOST_EMPTY:
                self.ignored[id(code)] = code


def _turns_gradients_on(context: Any) -> bool:
    if isinstance(context, torch.set_grad_enabled):
        return bool(context.mode)
    return isinstance(context, torch.inference_mode) and not context.mode


def _is_inside_model(frame: types.FrameType | None) -> bool:
    """Whether a module is being called: its own blocks without gradients, as in rotary embeddings, do not count."""
    calling = nn.Module._call_impl.__code__
    while frame is not None and frame.f_code is not calling:
        frame = frame.f_back
    return frame is not None


def _follow_inputs(watcher: Watcher, function: types.FunctionType) -> None:
    """Observe the inputs of a compiled function, or of a model that `Module.compile` has compiled."""
    held = weak_reference(function)

    def given(args: Any, kwargs: Any) -> None:
        if may_hold_data(args, kwargs) and watcher.probes.here():
            watcher.probes.safely(INPUTS, watcher.compiled_inputs.take, held(), args, kwargs)

    add_hook_to_wrapper(function, Hook(given))


def _keep_stance(watcher: Watcher, wrapping: Hooks) -> None:
    """Show the script the compiler's stance, and the global module hooks, as they are without surefoot."""
    from torch._dynamo import eval_frame
    from torch.nn.modules import module

    eager = watcher.sampler.eager

    def set_by_script(args: Any, kwargs: Any) -> None:
        if eager.is_set_by_script():
            watcher.probes.safely("looking", watcher.state.run_compiled)
            eager.release()

    def asked(args: Any, kwargs: Any) -> Any:
        return eager.hides_hooks() or None

    def answered(token: Any, result: Any) -> bool:
        return False

    why = "with `--eager-looks`: the stance of the script is restored before the script sets one"
    wrapping.add(eval_frame, "_set_stance", EAGER_LOOKS, why, set_by_script)
    why = (
        "with `--eager-looks`: torch warns about module hooks when a compiled model is called, but not about surefoot's"
    )
    wrapping.add(module, "_has_any_global_hook", EAGER_LOOKS, why, asked, answered)  # type: ignore[arg-type]


class _CompiledCalls:
    """Stops the use of hooks and modes before code is compiled with them."""

    def __init__(self, watcher: Watcher, wrapping: Hooks) -> None:
        self._watcher, self._wrapping = watcher, wrapping
        self._are_followed = False

    def begin(self) -> None:
        """A compiled model or function may be called from now on."""
        watcher = self._watcher
        if not watcher.state.active:  # a forked child, which logs nothing
            watcher.state.stop_sampling()
        elif not watcher.state.compiled:
            watcher.state.compiled = True
            watcher.probes.safely("looking", watcher.sampler.end)
            watcher.probes.safely("evaluation", watcher.evaluations.drop)
            watcher.probes.safely("compiling", self._exclude_own_code)
            if watcher.incidents is not None:
                watcher.probes.safely("incidents", watcher.incidents.compiled)

    def _exclude_own_code(self) -> None:
        """Exclude surefoot's code from compilation: torch also compiles functions called after a graph break."""
        from torch._dynamo.eval_frame import skip_code

        for code in self._watcher.probes.originals.codes():
            skip_code(code)
        if self._watcher.context.options.eager_looks:
            _keep_stance(self._watcher, self._wrapping)

    def follow(self) -> None:
        """Something was decorated that may never be called: `begin` at the first call."""
        from torch._dynamo import eval_frame

        if self._are_followed or self._watcher.state.compiled:
            return
        if not isinstance(getattr(eval_frame, ENTRY, None), types.FunctionType):  # a torch that calls it differently
            self.begin()
            return
        self._are_followed = True
        self._wrapping.add(eval_frame, ENTRY, "compiled calls", WHY_ENTRY, self._called)
        if "compiled calls" in self._watcher.probes.problems:
            self.begin()

    def _called(self, args: Any, kwargs: Any) -> None:
        """The compiler is about to be switched on, before a compiled function runs, or off if there is no callback."""
        if args[0] not in (None, False):
            self.begin()
            remove_leftover_recorders()  # one that was in use at the first call


def _is_librarys(function: Any) -> bool:
    """Whether a function, not a model, belongs to a library."""
    return isinstance(function, types.FunctionType) and is_other_library(function.__code__.co_filename)


def has_decorated() -> bool:
    """Whether `torch.compile` was called before."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in backends.values())  # `None` marks code that must not be compiled


def wrap_compiling(watcher: Watcher, wrapping: Hooks) -> None:
    """After the first compilation, observe models from outside only."""
    followed: set[type] = set()
    calls = _CompiledCalls(watcher, wrapping)

    def compiling(args: Any, kwargs: Any) -> Any:
        if args[0] is not None and not _is_librarys(args[0]):  # `None`: a decorator with settings is being made
            calls.begin()
        return True

    def compiled(token: Any, result: Any) -> None:
        kind = type(result)
        if not watcher.state.compiled and hasattr(result, "_torchdynamo_orig_callable"):
            watcher.probes.safely("compiled calls", calls.follow)
        if isinstance(result, types.FunctionType) and hasattr(result, "_torchdynamo_orig_callable"):
            watcher.probes.safely("compiled functions", _follow_inputs, watcher, result)
        elif kind.__name__ == COMPILED and kind not in followed:
            followed.add(kind)
            wrapping.add(kind, "__call__", "model calls", why_called, sampled_call, called)
            follow_compiled(watcher, wrapping, kind)
            wrapping.add(kind, "__call__", INPUTS, why_called, given)

    def given(args: Any, kwargs: Any) -> None:
        if may_hold_data(args[1:], kwargs) and watcher.probes.here():
            watcher.probes.safely(INPUTS, watcher.compiled_inputs.take, args[0], args[1:], kwargs)

    def sampled_call(args: Any, kwargs: Any) -> Any:
        return None if watcher.state.sampled is None else (args, kwargs)

    def called(call: Any, result: Any) -> None:
        if watcher.probes.here():
            watcher.probes.safely("model calls", note_call, result, *call)

    def note_call(result: Any, args: Any, kwargs: Any) -> None:
        if watcher.state.sampled is not None and not watcher.state.sampled.hooks.has_any():
            watcher.state.sampled.hooks.note_compiled(args[0], args[1:], kwargs, result)

    why_called = "the inputs and outputs of a compiled model; observed as soon as there is one"
    wrapping.announce("torch._dynamo.eval_frame.OptimizedModule.__call__", why_called)
    wrapping.announce(f"torch._dynamo.eval_frame.{ENTRY}", WHY_ENTRY)
    why = "after the first compilation no hook and no mode is installed, because compiled code depends on them"
    wrapping.add(torch, "compile", "looking", why, compiling, compiled)
    wrapping.add(nn.Module, "compile", "looking", why, compiling, compiled)
    if has_decorated():
        calls.follow()
