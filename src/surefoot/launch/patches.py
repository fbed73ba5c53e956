"""The calls that make a training loop, wrapped so that the watcher hears of them.

Each wrapper calls the original with the same arguments and returns what it returned. While torch compiles or traces,
a wrapper is only a pass-through, so that graphs come out the same.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from surefoot.launch.calm import Unnoticed, listeners
from surefoot.launch.describe import label_counts
from surefoot.launch.sites import is_users, place, site
from surefoot.launch.tape import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.launch.watcher import Watcher

MOST_BATCHES = 3_000


def install(watcher: Watcher) -> None:
    """Wrap everything. Called once, right after torch was imported."""
    safely, here = watcher.safely, watcher.here

    def left_behind() -> None:
        watcher.active = False

    os.register_at_fork(after_in_child=left_behind)

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return around(original, args, kwargs)

        if isinstance(original, types.BuiltinMethodType):  # pickled by reference: it must be found where it says
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
        setattr(owner, name, wrapper)
        builtin = _find_builtin(original)  # type: ignore[no-untyped-call]
        if builtin is not None:  # TorchScript knows its functions by identity
            _register_builtin(wrapper, builtin)

    def after(owner: Any, name: str, probe: str, observe: Callable[..., None]) -> None:
        """Call the original, then let `observe(result, args, kwargs)` look."""

        def around(original: Any, args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if here():
                safely(probe, observe, result, args, kwargs)
            return result

        wrap(owner, name, around)

    _wrap_backward(watcher, wrap, here)
    _wrap_listeners(wrap)
    _wrap_function_modes(watcher, wrap)
    _wrap_optimizers(watcher, after, here)
    _wrap_clipping(watcher, wrap, after, here)
    _wrap_scaler(watcher, wrap, after, here)
    _wrap_randomness(watcher, after)
    _wrap_data(watcher, after)
    _wrap_states(watcher, after)
    _wrap_modes(watcher, wrap, here)
    _wrap_policies(watcher, after)


def _wrap_backward(watcher: Watcher, wrap: Any, here: Callable[[], bool]) -> None:
    inside = False

    def around(original: Any, args: Any, kwargs: Any) -> Any:
        nonlocal inside
        given = args[0] if args else kwargs.get("tensors")
        root = given if isinstance(given, Tensor) else given[0] if isinstance(given, (list, tuple)) and given else None
        if inside or not isinstance(root, Tensor) or not here():
            return original(*args, **kwargs)
        inside = True
        try:
            watcher.safely("backward", watcher.before_backward, root)
            result = original(*args, **kwargs)
        finally:
            inside = False
        watcher.safely("backward", watcher.after_backward)
        return result

    wrap(torch.autograd, "backward", around)
    wrap(Tensor, "backward", around)  # calls the one above, but, under a function mode, from inside the mode

    def around_grad(original: Any, args: Any, kwargs: Any) -> Any:
        """In a loop without an optimizer, asking for gradients is what a step begins with."""
        given = args[0] if args else kwargs.get("outputs")
        root = given if isinstance(given, Tensor) else given[0] if isinstance(given, (list, tuple)) and given else None
        loop = (
            not watcher.optimizers and isinstance(root, Tensor) and root.numel() == 1 and not kwargs.get("create_graph")
        )
        if not loop or not here():
            return original(*args, **kwargs)
        if not watcher.safely("backward", is_users, sys._getframe(2).f_code.co_filename):
            return original(*args, **kwargs)
        watcher.safely("backward", watcher.before_backward, root)
        result = original(*args, **kwargs)
        watcher.safely("backward", watcher.after_backward, result)
        return result

    wrap(torch.autograd, "grad", around_grad)


def _wrap_listeners(wrap: Any) -> None:
    """Where the script would hear of a backward of ours, none is made."""

    def around_hook(original: Any, args: Any, kwargs: Any) -> Any:
        listeners.gradients = True
        return original(*args, **kwargs)

    def around_saved(original: Any, args: Any, kwargs: Any) -> Any:
        listeners.saved = True
        return original(*args, **kwargs)

    wrap(Tensor, "register_hook", around_hook)
    wrap(Tensor, "retain_grad", around_hook)
    for name in ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        wrap(nn.Module, name, around_hook)
    wrap(torch.autograd.graph.saved_tensors_hooks, "__enter__", around_saved)


def _wrap_function_modes(watcher: Watcher, wrap: Any) -> None:
    """A mode of the script's may be left while the tape lies on top of it: the tape steps aside."""

    def around_exit(original: Any, args: Any, kwargs: Any) -> Any:
        tape = watcher.look.tape if watcher.look is not None else None
        if tape is None or args[0] is tape or not watcher.here() or not tape.is_on_top():
            return original(*args, **kwargs)
        tape.leave()
        try:
            return original(*args, **kwargs)
        finally:
            tape.__enter__()  # type: ignore[no-untyped-call]

    wrap(TorchFunctionMode, "__exit__", around_exit)


def _wrap_optimizers(watcher: Watcher, after: Any, here: Callable[[], bool]) -> None:
    after(Optimizer, "__init__", "optimizers", lambda _, args, kwargs: watcher.optimizer_made(args[0]))

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if here():
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            watcher.safely("steps", watcher.before_step, optimizer, callable(closure))

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if here():
            watcher.safely("steps", watcher.after_step, optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)

    def zeroed(_: Any, args: Any, kwargs: Any) -> None:
        watcher._backwards_at_zero = watcher.backwards
        if watcher.look is not None:
            watcher._zero_site = site(4)

    after(Optimizer, "zero_grad", "zero_grad", zeroed)
    after(nn.Module, "zero_grad", "zero_grad", zeroed)

    def scheduled(_: Any, args: Any, kwargs: Any) -> None:
        scheduler = args[0]
        watcher.schedulers.append(
            {
                "ref": weakref.ref(scheduler),
                "type": type(scheduler).__name__,
                "site": site(4),
                "steps": 0,
                "last_epoch": 0,
            }
        )

    after(LRScheduler, "__init__", "schedules", scheduled)
    after(ReduceLROnPlateau, "__init__", "schedules", scheduled)


def _wrap_clipping(watcher: Watcher, wrap: Any, after: Any, here: Callable[[], bool]) -> None:
    def clipped(result: Any, args: Any, kwargs: Any) -> None:
        limit = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
        norm = result.full_tensor() if hasattr(result, "full_tensor") else result
        watcher._clip_now = {
            "clip_norm": float(norm) if norm.device.type == "cpu" else norm.detach(),
            "clip_limit": float(limit) if limit is not None else None,
        }
        if len(watcher.clips) < 3:
            watcher.clips.append(
                {
                    "step": watcher.steps,
                    "site": site(4),
                    "limit": float(limit) if limit is not None else None,
                    "scaled": watcher.scaler.get("scaled_now", False),
                    "scale": watcher.scaler.get("scale"),
                }
            )
        if watcher.scaler.get("scaled_now"):
            watcher.scaler["clipped_scaled"] = watcher.scaler.get("clipped_scaled", 0) + 1
            watcher.scaler.setdefault("clip_site", site(4))

    def around_value(original: Any, args: Any, kwargs: Any) -> Any:
        """Clipping by value leaves no figure behind: the largest entry is taken before."""
        if here():
            if args and not isinstance(args[0], (list, tuple, Tensor)):
                args = (list(args[0]), *args[1:])  # a generator can be read only once
            watcher.safely("clipping", value_clipped, args, kwargs)
        return original(*args, **kwargs)

    def value_clipped(args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("parameters")
        limit = float(kwargs.get("clip_value", args[1] if len(args) > 1 else 0.0))
        if isinstance(given, (list, tuple, Tensor)):
            tensors = [given] if isinstance(given, Tensor) else given
            largest = [float(t.grad.detach().abs().max()) for t in tensors if t.grad is not None and t.grad.numel()]
            watcher._clip_now = {"clip_norm": max(largest, default=0.0), "clip_limit": limit, "clip_by_value": True}
        if len(watcher.clips) < 3:
            watcher.clips.append({"step": watcher.steps, "site": site(5), "limit": limit, "by_value": True})
        if watcher.scaler.get("scaled_now"):
            watcher.scaler["clipped_scaled"] = watcher.scaler.get("clipped_scaled", 0) + 1
            watcher.scaler.setdefault("clip_site", site(5))

    after(nn.utils.clip_grad, "clip_grad_norm_", "clipping", clipped)
    wrap(nn.utils.clip_grad, "clip_grad_value_", around_value)
    nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_
    nn.utils.clip_grad_value_ = nn.utils.clip_grad.clip_grad_value_


def _wrap_scaler(watcher: Watcher, wrap: Any, after: Any, here: Callable[[], bool]) -> None:
    from torch.amp.grad_scaler import GradScaler

    state = watcher.scaler

    def scaled(result: Any, args: Any, kwargs: Any) -> None:
        scaler, given = args[0], args[1] if len(args) > 1 else kwargs.get("outputs")
        if not scaler.is_enabled():
            return
        state["enabled"] = True
        state["scaled_now"] = True
        if isinstance(result, Tensor) and isinstance(given, Tensor):
            watcher._unscaled = (weakref.ref(result), given.detach())
            if isinstance(getattr(scaler, "_scale", None), Tensor):
                state["scale"] = state["unscale_by"] = float(scaler._scale)

    def unscaled(result: Any, args: Any, kwargs: Any) -> None:
        state["scaled_now"] = False
        state["unscale_by"] = None

    def around_step(original: Any, args: Any, kwargs: Any) -> Any:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        known = watcher.safely("scaler", steps_of, optimizer) if isinstance(optimizer, Optimizer) and here() else None
        result = original(*args, **kwargs)
        if known is not None:
            watcher.safely("scaler", stepped, optimizer, known)
        return result

    def steps_of(optimizer: Optimizer) -> int:
        return watcher.watched(optimizer).series.count

    def stepped(optimizer: Optimizer, known: int) -> None:
        state["attempts"] = state.get("attempts", 0) + 1
        if watcher.watched(optimizer).series.count == known:
            state["skips"] = state.get("skips", 0) + 1
            state.setdefault("skip_steps", []).append(state["attempts"] - 1)
            del state["skip_steps"][:-500]
            watcher._last_losses, watcher._pending = watcher._pending, []
            watcher._root_sites_of_step = []
            if watcher.look is not None and len(watcher.look.roots) > 8:
                watcher.end_look()
                watcher.begin_look()

    def updated(result: Any, args: Any, kwargs: Any) -> None:
        scaler = args[0]
        state["scaled_now"] = False
        if scaler.is_enabled() and isinstance(getattr(scaler, "_scale", None), Tensor):
            trace = state.setdefault("trace", [])
            trace.append(float(scaler._scale))
            if len(trace) > 2000:
                del trace[500:1000]

    after(GradScaler, "scale", "scaler", scaled)
    after(GradScaler, "unscale_", "scaler", unscaled)
    wrap(GradScaler, "step", around_step)
    after(GradScaler, "update", "scaler", updated)


def _wrap_randomness(watcher: Watcher, after: Any) -> None:
    def seeding(kind: str) -> Callable[..., None]:
        def seeded(result: Any, args: Any, kwargs: Any) -> None:
            frame = sys._getframe(4)
            if is_users(frame.f_code.co_filename):
                calls = watcher.seeds.setdefault(kind, [])
                calls.append(watcher.steps)
                del calls[400:]
                note_seed(kind, args[-1] if args else kwargs.get("seed", kwargs.get("a")), frame)

        return seeded

    after(torch, "manual_seed", "seeds", seeding("torch"))
    torch.random.manual_seed = torch.manual_seed
    after(random, "seed", "seeds", seeding("python"))
    if "numpy" in sys.modules:
        import numpy as np

        after(np.random, "seed", "seeds", seeding("numpy"))

    def note_seed(kind: str, value: Any, frame: Any) -> None:
        """The same line, seeding with the same number again and again, draws the same numbers again and again."""
        if isinstance(value, int) and len(watcher.reseeds) < 64:
            where = place(frame.f_code.co_filename, frame.f_lineno)
            calls = watcher.reseeds.setdefault(f"{kind}({value}) at {where}", [])
            if len(calls) < 400:
                calls.append(watcher.steps)

    def seeded_own(kind: str) -> Callable[..., None]:
        def seeded(result: Any, args: Any, kwargs: Any) -> None:
            frame: Any = sys._getframe(4)
            if frame.f_code.co_filename == random.__file__:
                frame = frame.f_back
            if frame is not None and is_users(frame.f_code.co_filename):
                note_seed(kind, args[-1] if args else kwargs.get("seed"), frame)

        return seeded

    after(random.Random, "seed", "seeds", seeded_own("random.Random"))
    if "numpy" in sys.modules:
        after(np.random, "default_rng", "seeds", seeded_own("numpy.random.default_rng"))

    def permuted(result: Any, args: Any, kwargs: Any) -> None:
        if isinstance(result, Tensor) and result.numel() >= 8 and len(watcher.permutations) < 200:
            watcher.permutations.append(
                {"step": watcher.steps, "length": result.numel(), "print": hash(tuple(result[:32].tolist()))}
            )

    after(torch, "randperm", "permutations", permuted)


def _wrap_data(watcher: Watcher, after: Any) -> None:
    def loader_facts(loader: DataLoader[Any]) -> dict[str, Any]:
        for number, held in enumerate(watcher.loaders):
            if held["ref"]() is loader:
                return held
            if number > 32:
                return held
        dataset = loader.dataset
        facts = {
            "ref": weakref.ref(loader),
            "number": len(watcher.loaders),
            "batch_size": loader.batch_size,
            "sampler": type(loader.sampler).__name__,
            "workers": loader.num_workers,
            "rows": len(dataset) if hasattr(dataset, "__len__") else None,
            "batches": len(loader) if hasattr(dataset, "__len__") else None,
            "iterations": 0,
            "drawn": 0,
            "site": site(5),
            "training": False,
        }
        watcher.loaders.append(facts)
        return facts

    def iterated(result: Any, args: Any, kwargs: Any) -> None:
        facts = loader_facts(args[0])
        facts["iterations"] += 1
        result._surefoot = facts

    after(DataLoader, "__iter__", "data loaders", iterated)

    def drawn(result: Any, args: Any, kwargs: Any) -> None:
        facts = getattr(args[0], "_surefoot", None)
        if facts is None:
            return
        facts["drawn"] += 1
        if len(watcher.batches) >= MOST_BATCHES:
            return
        tensors = list(tensors_in(result))
        if not tensors or not tensors[0].dim():
            return
        first = tensors[0].detach().reshape(-1)
        ends = [*first[:8].tolist(), *first[-8:].tolist(), float(first[: 1 << 12].double().sum())]
        note = {
            "loader": facts["number"],
            "iteration": facts["iterations"],
            "step": watcher.steps,
            "backward": watcher.backwards,
            "size": len(tensors[0]),
            "print": hash((tuple(tensors[0].shape), tuple(ends))),
            "grad": torch.is_grad_enabled(),
        }
        labels = next((t for t in reversed(tensors[1:]) if not t.is_floating_point() and t.dim() == 1), None)
        if labels is not None and len(watcher.batches) < 600:
            note["labels"] = label_counts(labels, 64)
        elif len(tensors) > 1 and tensors[-1].is_floating_point() and tensors[-1].numel() <= 1 << 16:
            note["target_mean"] = float(tensors[-1].float().mean())
            note["target_std"] = float(tensors[-1].float().std(correction=0))
        watcher.batches.append(note)

    after(_BaseDataLoaderIter, "__next__", "batches", drawn)


def _wrap_states(watcher: Watcher, after: Any) -> None:
    def module_loaded(result: Any, args: Any, kwargs: Any) -> None:
        if not is_users(sys._getframe(4).f_code.co_filename):
            return
        for tensor in args[0].parameters():
            watcher.book.add(tensor).loaded = True
        watcher.events.append({"event": "model-loaded", "step": watcher.steps, "site": site(4)})

    def optimizer_loaded(result: Any, args: Any, kwargs: Any) -> None:
        held = watcher.watched(args[0])
        held.loaded_at = held.series.count
        watcher.look_soon()
        ages = [float(state["step"]) for state in args[0].state.values() if "step" in state]
        held.loaded_age = max(ages) if ages else None
        watcher.events.append(
            {"event": "optimizer-loaded", "step": watcher.steps, "site": site(4), "optimizer": held.number}
        )

    def scheduler_loaded(result: Any, args: Any, kwargs: Any) -> None:
        watcher.events.append({"event": "scheduler-loaded", "step": watcher.steps, "site": site(4)})

    def file_loaded(result: Any, args: Any, kwargs: Any) -> None:
        watcher.events.append(
            {"event": "file-loaded", "step": watcher.steps, "site": site(4), "holds": _states_in(result)}
            | {"backward": watcher.backwards}
        )

    def file_saved(result: Any, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("obj")
        watcher.events.append({"event": "saved", "step": watcher.steps, "site": site(4), "holds": _states_in(given)})

    after(nn.Module, "load_state_dict", "states", module_loaded)
    after(Optimizer, "load_state_dict", "states", optimizer_loaded)
    after(LRScheduler, "load_state_dict", "states", scheduler_loaded)
    after(torch.serialization, "load", "states", file_loaded)
    after(torch.serialization, "save", "states", file_saved)
    torch.load, torch.save = torch.serialization.load, torch.serialization.save


def _states_in(value: Any) -> list[str]:
    """What kinds of state a checkpoint holds."""
    found = []
    values = value if isinstance(value, dict) else {}
    for item in [value, *list(values.values())[:64]]:
        if not isinstance(item, dict):
            continue
        if set(item) >= {"state", "param_groups"}:
            found.append("optimizer")
        elif "last_epoch" in item or "_step_count" in item:
            found.append("scheduler")
        elif "growth_factor" in item or ("scale" in item and "_growth_tracker" in item):
            found.append("scaler")
        elif item and all(isinstance(part, Tensor) for part in item.values()):
            found.append("model")
    counts = {"epoch", "step", "iteration", "iter", "global_step", "start_epoch", "steps", "epochs"}
    if any(str(key).lower() in counts and isinstance(item, int) for key, item in values.items()):
        found.append("progress")
    return found


def _wrap_modes(watcher: Watcher, wrap: Any, here: Callable[[], bool]) -> None:
    decorator = os.path.join("torch", "utils", "_contextlib.py")
    libraries: set[Any] = set()
    """Code that was found not to be the script's."""

    def around_enter(original: Any, args: Any, kwargs: Any) -> Any:
        frame = sys._getframe(2)
        if frame.f_code not in libraries and here():
            watcher.safely("evaluation", opened, args[0], frame)
        return original(*args, **kwargs)

    def opened(context: Any, frame: Any) -> None:
        if isinstance(context, torch.set_grad_enabled) and context.mode:
            return
        if frame.f_code.co_filename.endswith(decorator):  # whose function is it that was decorated?
            code = getattr(frame.f_locals.get("func"), "__code__", None)
            by_user = code is not None and is_users(code.co_filename)
        else:
            by_user = is_users(frame.f_code.co_filename)
            if not by_user:
                libraries.add(frame.f_code)
        if by_user:
            context._surefoot = True
            watcher.evaluations.open()

    def around_exit(original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if here() and getattr(args[0], "_surefoot", False):
            watcher.safely("evaluation", watcher.evaluations.close)
        return result

    for context in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled):
        wrap(context, "__enter__", around_enter)
        wrap(context, "__exit__", around_exit)

    def compiled(original: Any, args: Any, kwargs: Any) -> Any:
        # A compiled function guards on the modes and hooks that are on: both stay off from here.
        if not watcher.compiled:
            watcher.compiled = True
            watcher.safely("looking", watcher.end_look)
        result = original(*args, **kwargs)
        kind = type(result)
        if kind.__name__ == "OptimizedModule" and kind not in followed:
            followed.add(kind)
            wrap(kind, "__call__", around_call)
        return result

    followed: set[type] = set()

    def around_call(original: Any, args: Any, kwargs: Any) -> Any:
        """A compiled model is followed from outside."""
        out = original(*args, **kwargs)
        if watcher.look is not None and here():
            watcher.safely("model calls", watcher.look.note_compiled, args[0], args[1:], kwargs, out)
        return out

    wrap(torch, "compile", compiled)
    wrap(nn.Module, "compile", compiled)


def _wrap_policies(watcher: Watcher, after: Any) -> None:
    from torch.distributions import Categorical

    def entropy_of(distribution: Any) -> float:
        with Unnoticed():
            chances = distribution.probs.detach().float()
            return float(torch.special.entr(chances).sum(-1).mean())

    def log_prob(result: Any, args: Any, kwargs: Any) -> None:
        if watcher.look is not None and watcher.look.tape is not None and isinstance(result, Tensor):
            index = watcher.look.tape.maker(result)
            if index is not None:
                watcher.look.tape.entries[index].name = "log_prob"
        if (
            result.requires_grad
            and (len(watcher.policy) < 200 or watcher.steps % 16 == 0)
            and len(watcher.policy) < 2000
        ):
            last = watcher.policy[-1]["backward"] if watcher.policy else -1
            if watcher.backwards != last:
                entropy = entropy_of(args[0])
                watcher.policy.append(
                    {"step": watcher.steps, "backward": watcher.backwards, "entropy": entropy}
                    | {"actions": args[0].param_shape[-1]}
                )

    after(Categorical, "log_prob", "policies", log_prob)

    def divergence(result: Any, args: Any, kwargs: Any) -> None:
        """The KL divergence from a distribution that is not learned and not the same for every row."""
        notes = watcher.divergences
        if not result.requires_grad or (notes and notes[-1]["backward"] == watcher.backwards) or len(notes) >= 1000:
            return
        if len(notes) >= 200 and watcher.backwards % 16:
            return
        with watcher.look.quietly() if watcher.look is not None else torch.no_grad():
            other = args[1]
            held = [t for name in other.arg_constraints if isinstance(t := other.__dict__.get(name), Tensor)]
            if not held or any(tensor.requires_grad for tensor in held):
                return
            if any(tensor.dim() and float(tensor.double().std(0).max()) > 0 for tensor in held if len(tensor) > 1):
                found = {"step": watcher.steps, "backward": watcher.backwards, "site": site(4)}
                notes.append(found | {"kl": float(result.detach().mean())})

    for owner in (torch.distributions, torch.distributions.kl):
        after(owner, "kl_divergence", "policies", divergence)
