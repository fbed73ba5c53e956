"""Blocks without gradients, which are how scripts evaluate, and compilation.

A block counts when the script's own code opens it, or a function of the script's that is decorated with it. A compiled
function guards on the modes and hooks that are on, so from the first compilation on neither is used again. What goes
into compiled models and functions is observed at each call (`compiled_inputs`).
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.core.function_hooks import Hook, add_hook_to_wrapper
from surefoot.core.weak_reference import weak_reference
from surefoot.watch.compiled_inputs import may_hold_data
from surefoot.watch.eager_stance import EAGER_LOOKS
from surefoot.watch.module_hooks import COMPILED
from surefoot.watch.patches.indexing import follow_compiled
from surefoot.watch.user_frames import is_users

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher

INPUTS = "inputs of compiled models"
"""The probe."""


def wrap_modes(watcher: Watcher, wrapping: Hooks) -> None:
    """The blocks in which the script turns gradients off."""
    decorator = os.path.join("torch", "utils", "_contextlib.py")
    libraries: set[Any] = set()
    """Code that was found not to be the script's."""
    open_now: list[int] = []
    """The blocks that the script is in."""

    def entered(args: Any, kwargs: Any) -> None:
        frame = sys._getframe(2)
        code: Any = frame.f_code
        if code.co_filename.endswith(decorator):  # whose function is it that was decorated?
            code = getattr(frame.f_locals.get("func"), "__code__", None)
        if code is not None and code not in libraries and watcher.probes.here():
            watcher.probes.safely("evaluation", opened, args[0], code)

    def opened(context: Any, code: Any) -> None:
        if isinstance(context, torch.set_grad_enabled) and context.mode:
            return
        if is_users(code.co_filename):
            open_now.append(id(context))
            watcher.evaluations.open()
        else:
            libraries.add(code)

    def left(args: Any, kwargs: Any) -> Any:
        return id(args[0]) if open_now and id(args[0]) in open_now and watcher.probes.here() else None

    def closed(number: int, result: Any) -> None:
        open_now.remove(number)
        watcher.probes.safely("evaluation", watcher.evaluations.close)

    for context in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled):
        why = "where the script evaluates: a block without gradients begins"
        wrapping.add(context, "__enter__", "evaluation", why, entered)
        why = "where the script evaluates: a block without gradients ends"
        wrapping.add(context, "__exit__", "evaluation", why, left, closed)


def _follow_inputs(watcher: Watcher, function: types.FunctionType) -> None:
    """Observe what goes into a compiled function, or into a model that `Module.compile` has compiled."""
    held = weak_reference(function)

    def given(args: Any, kwargs: Any) -> None:
        if may_hold_data(args, kwargs) and watcher.probes.here():
            watcher.probes.safely(INPUTS, watcher.compiled_inputs.take, held(), args, kwargs)

    add_hook_to_wrapper(function, Hook(given))


def _keep_stance(watcher: Watcher, wrapping: Hooks) -> None:
    """Let the script find the compiler's stance, and the global module hooks, as they are without surefoot."""
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

    why = "with `--eager-looks`: the stance is the script's own again before the script sets one"
    wrapping.add(eval_frame, "_set_stance", EAGER_LOOKS, why, set_by_script)
    why = "with `--eager-looks`: torch warns of module hooks when a compiled model is called; not of surefoot's"
    wrapping.add(module, "_has_any_global_hook", EAGER_LOOKS, why, asked, answered)  # type: ignore[arg-type]


def wrap_compiling(watcher: Watcher, wrapping: Hooks) -> None:
    """From the first compilation on, models are followed from outside only."""
    followed: set[type] = set()

    def compiling(args: Any, kwargs: Any) -> Any:
        # A compiled function guards on the modes and hooks that are on: both stay off from here.
        if not watcher.state.compiled:
            watcher.state.compiled = True
            watcher.probes.safely("looking", watcher.sampler.end)
            watcher.probes.safely("compiling", begun)
            if watcher.incidents is not None:
                watcher.probes.safely("incidents", watcher.incidents.compiled)
        return True

    def begun() -> None:
        """What is called where a graph breaks is compiled, too: surefoot's own code must not be."""
        from torch._dynamo.eval_frame import skip_code

        for code in watcher.probes.originals.codes():
            skip_code(code)
        if watcher.context.options.eager_looks:
            _keep_stance(watcher, wrapping)

    def compiled(token: Any, result: Any) -> None:
        kind = type(result)
        if isinstance(result, types.FunctionType) and hasattr(result, "_torchdynamo_orig_callable"):
            watcher.probes.safely("compiled functions", _follow_inputs, watcher, result)
        elif kind.__name__ == COMPILED and kind not in followed:
            followed.add(kind)
            wrapping.after(kind, "__call__", "model calls", called, why_called)
            follow_compiled(watcher, wrapping, kind)
            wrapping.add(kind, "__call__", INPUTS, why_called, given)

    def given(args: Any, kwargs: Any) -> None:
        if may_hold_data(args[1:], kwargs) and watcher.probes.here():
            watcher.probes.safely(INPUTS, watcher.compiled_inputs.take, args[0], args[1:], kwargs)

    def called(result: Any, args: Any, kwargs: Any) -> None:
        if watcher.state.sampled is not None and not watcher.state.sampled.hooks.has_any():
            watcher.state.sampled.hooks.note_compiled(args[0], args[1:], kwargs, result)

    why_called = "what goes in and out of a compiled model; observed once there is one"
    wrapping.announce("torch._dynamo.eval_frame.OptimizedModule.__call__", why_called)
    why = "from the first compilation on no hook and no mode is put on: what is compiled depends on them"
    wrapping.add(torch, "compile", "looking", why, compiling, compiled)
    wrapping.add(nn.Module, "compile", "looking", why, compiling, compiled)
