"""The preflight: ten steps in order, each on copies, with everything restored at the end.

A fault in an earlier step explains faults in later ones: a label out of range explains a crash, a disconnected graph
explains a constant loss, and only without these is the learning rate the cause. A step that raises, because a model is
unusual, is reported as skipped, and the others continue.

Nothing is changed: parameters, buffers, gradients, training flags, hooks, optimizer, and all random streams are bitwise
as before. Not restored are batches drawn from a one-shot iterator (a note says how many), and what hooks or closures of
the user write elsewhere.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.core.random_state import loader_generators
from surefoot.core.save_restore import untouched
from surefoot.core.settings import is_number, is_whole, shown
from surefoot.doctor.batches import is_iterator, take
from surefoot.doctor.checks import STEPS, Check, Examination, skipped
from surefoot.doctor.clipping import check_clipping
from surefoot.doctor.context import CheckContext
from surefoot.doctor.data import check_data
from surefoot.doctor.label_among_inputs import check_label_among_inputs
from surefoot.doctor.learning_rates import check_rates
from surefoot.doctor.loss_inputs import check_agreement
from surefoot.doctor.overfit import check_overfit
from surefoot.doctor.precision import check_precision
from surefoot.doctor.retained_graphs import check_graphs
from surefoot.doctor.scale import check_scale
from surefoot.doctor.shapes import check_shapes
from surefoot.doctor.shuffled_labels import check_control
from surefoot.doctor.statistics import check_statistics
from surefoot.doctor.trial_run import check_trial_run
from surefoot.errors import SettingError, UsageError, require

if TYPE_CHECKING:
    from surefoot.doctor.loss_of_batch import LossOf


def debug_training_stability(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    eval_loader: Iterable[Any] | None = None,
    loss_of: LossOf | None = None,
    clip: float | None = None,
    seconds: float = 60.0,
    num_steps: int = 0,
    show: bool = True,
) -> Examination:
    """Run the ten-step preflight, print its table and return it. Nothing is changed.

    Args:
        model: Copied, never run itself.
        loader: Gives batches: a loader, a list, or (with a note) an iterator.
        loss_fn: `loss_fn(prediction, target)`; may be left out when the model returns its own loss.
        optimizer: May be left out; what needs it is then skipped.
        eval_loader: With one, the splits are compared: rows in both, different scale.
        loss_of: `loss_of(model, batch)` gives the loss, for loops whose way to call the model cannot be guessed.
        clip: The limit on the gradient norm that the loop uses, if it clips.
        seconds: Time that all probes share, roughly.
        num_steps: Then train a copy for this many steps, or until a detector raises an alarm, and report where.
            It may take `seconds` once more.
        show: Print the table. In a notebook, use `show=False`: the returned value is displayed as HTML.
    """
    _refuse_what_cannot_be_examined(model, loader, optimizer)
    _check_numbers(clip, seconds, num_steps)
    start = time.monotonic()
    inner = _unwrapped(model)
    generators = [*loader_generators(loader), *loader_generators(eval_loader)]
    with untouched(model, optimizer, generators), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        context = CheckContext(
            inner, loss_fn, optimizer, _take(loader, "loader"), [], seconds, clip, _device(inner, optimizer)
        )
        context.eval_batches = [] if eval_loader is None else _take(eval_loader, "eval_loader")
        context.notes = _notes(model, inner, loader, len(context.batches))
        for step, name, check in _steps(loss_of, num_steps):
            context.checks += _safely(context, step, name, check)
    context.checks.sort(key=lambda check: check.step)
    examination = Examination(tuple(context.checks), time.monotonic() - start, tuple(context.notes))
    if show:
        print(examination)
    return examination


examine = partial(debug_training_stability, show=False)
"""The same without printing, for programs."""


def _steps(loss_of: LossOf | None, num_steps: int) -> list[tuple[int, str, Callable[[CheckContext], list[Check]]]]:
    checks: dict[int, Callable[[CheckContext], list[Check]]] = {
        1: lambda context: check_shapes(context, loss_of),
        2: check_agreement,
        3: check_overfit,
        5: check_rates,  # first, because a learning rate that is too high explains much of what step 4 finds
        4: check_statistics,
        6: check_scale,
        7: check_clipping,
        8: check_precision,
        9: check_graphs,
        10: check_data,
    }
    return [
        *((step, STEPS[step], check) for step, check in checks.items()),
        (10, "label among the inputs", check_label_among_inputs),
        (10, "shuffled labels", check_control),
        *([(11, "trial run", partial(check_trial_run, num_steps=num_steps))] if num_steps else []),
    ]


def _safely(context: CheckContext, step: int, name: str, check: Callable[[CheckContext], list[Check]]) -> list[Check]:
    """Run one step. If it raises, the error is reported as a skipped check."""
    if context.refusal and check is not check_data and step not in (1, 2):
        return [skipped(step, name, context.refusal)]
    if step == 2 and context.look is None:
        return [skipped(step, name, context.refusal)]
    try:
        return check(context)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0][:160]
        return [skipped(step, name, f"this step could not run: {type(error).__name__}: {line}")]


def _refuse_what_cannot_be_examined(model: Any, loader: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"`model` must be a torch.nn.Module; got {type(model).__name__}.")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise UsageError(f"`loader` must be iterable over batches; got {type(loader).__name__}.")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise UsageError(f"`optimizer` must be a torch optimizer; got {type(optimizer).__name__}.")


def _check_numbers(clip: Any, seconds: Any, num_steps: Any) -> None:
    require(
        clip is None or (is_number(clip) and clip > 0),
        f"`clip` must be the largest gradient norm of the loop, a number above 0, or None; got {shown(clip)}.",
    )
    require(
        is_number(seconds) and seconds > 0,
        f"`seconds` must be a number of more than 0; got {shown(seconds)}. The default is 60.",
    )
    require(
        is_whole(num_steps) and num_steps >= 0,
        f"`num_steps` must be a whole number, and not negative; got {shown(num_steps)}. 0 omits the trial run.",
    )


def _take(loader: Iterable[Any], name: str) -> list[Any]:
    try:
        batches = take(loader)
    except (SettingError, UsageError):
        raise
    except Exception as error:
        raise UsageError(f"`{name}` raised {type(error).__name__} instead of returning a batch: {error}") from error
    if not batches:
        raise UsageError(f"`{name}` returned no batch. Pass a loader or a list of batches that is not exhausted.")
    return batches


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and parallel wrappers, whose copies would compile or communicate."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and type(model).__name__ in _WRAPPERS:
            return _unwrapped(inner)
    return model


_WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")


def _device(model: nn.Module, optimizer: Any) -> torch.device:
    groups = [] if optimizer is None else optimizer.param_groups
    tensors = [*model.parameters(), *model.buffers(), *(p for group in groups for p in group["params"])]
    return tensors[0].device if tensors else torch.device("cpu")


def _notes(model: nn.Module, inner: nn.Module, loader: Any, taken: int) -> list[str]:
    notes = []
    if inner is not model:
        notes.append(f"Examined the {type(inner).__name__} inside the {type(model).__name__}.")
    if is_iterator(loader):
        notes.append(f"The loader is an iterator, which cannot be rewound: {taken} batches were taken out of it.")
    return notes
