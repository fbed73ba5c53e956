"""Logs which settings differ between a checkpoint and the run that resumes from it.

torch's `load_state_dict` silently replaces the settings of the run by the saved ones: a learning rate that was lowered
before a restart is not used. The functions of a `LambdaLR` are not saved: there the run's own one is used,
and the learning rate may jump. Nothing is changed here.

A setting that a schedule of torch's defines is logged as a warning. Others, which the training loop may have changed on
purpose (`lr` without a scheduler, `weight_decay`), are logged as an info.

The settings of surefoot's own parts are those of the run, and a part with other settings starts without its history. If
it changes what a step does (clipping, loss scaling), this is a warning, and otherwise an info.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from surefoot.core.state_tree import settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

log = logging.getLogger("surefoot")

_SCHEDULE_SETTINGS = (
    *("base_lrs", "T_max", "T_0", "T_mult", "eta_min", "step_size", "gamma", "milestones", "_milestones"),
    *("total_iters", "factor", "start_factor", "end_factor", "power", "total_steps"),
)
"""The settings of torch's schedulers that stay the same during a run."""
_GROUP_SETTINGS = ("lr", "weight_decay", "eps", "momentum", "betas", "alpha", "dampening", "nesterov", "amsgrad")
_CYCLED = {"momentum": "max_momentum", "betas": "max_momentum", "lr": "initial_lr"}
"""Settings that a schedule changes if the group also has this entry."""


def log_changed_settings(optimizer: Any, scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Log what differs from a saved run, before it is loaded."""
    schedule = list(_schedule_changes(scheduler, saved["scheduler"]))
    if schedule:
        log.warning("surefoot: the schedule has changed since the checkpoint was saved: %s.", "; ".join(schedule))
    groups = list(_group_changes(optimizer.param_groups, saved["optimizer"]["param_groups"]))
    if groups:
        log.info("surefoot: the checkpoint replaces settings of the optimizer: %s.", "; ".join(groups[:5]))


_PARTS = {
    "rules": "the rules that refuse steps",
    "setback": "`setback`",
    "lost_progress": "`lost_progress`",
    "look_back": "the detectors that look back over many steps",
    "escalation": "`escalation`",
    "recovery": "`recovery`",
}
"""The parts whose change is an info, and their descriptions."""


def log_changed_parts(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Log which parts of the stabilizer have other settings than in the saved run, given the settings by part."""
    differ = {part: saved[part] for part in now if saved.get(part, now[part]) != now[part]}
    if "scaler" in differ:
        _warn_of_other_scaling(differ["scaler"], now["scaler"])
    if "clip" in differ:
        log.warning(
            "surefoot: clipping has changed since the checkpoint was saved: it was %s and is %s, without a history.",
            differ["clip"], now["clip"],
        )  # fmt: skip
    others = [f"{name} ({_difference(differ[part], now[part])})" for part, name in _PARTS.items() if part in differ]
    if others:
        log.info(
            "surefoot: settings have changed since the checkpoint was saved, and these parts start without a history: "
            "%s.", "; ".join(others),
        )  # fmt: skip


def warn_of_other_accumulation(then: int | None, now: int) -> None:
    """Log that a step uses another number of microbatches than in the saved run."""
    if then is not None and then != now:
        log.warning(
            "surefoot: `accumulate` was %d when the checkpoint was saved and is %d: a step uses %.3g times as many "
            "microbatches, at the same learning rate.", then, now, now / then,
        )  # fmt: skip


def _difference(then: str, now: str) -> str:
    """The settings that differ, of two texts that list them."""
    before, after = then.split(", "), now.split(", ")
    gone, new = [each for each in before if each not in after], [each for each in after if each not in before]
    return f"{', '.join(gone) or 'less'} -> {', '.join(new) or 'less'}"


def _warn_of_other_scaling(then: str, now: str) -> None:
    """Log that a run continues with different loss scaling."""
    none = settings_of(None)
    if now == none:
        what = f'it was saved with loss scaling ({then}), and the run has none: fp16 needs `precision="fp16"`'
    elif then == none:
        what = f"it was saved without loss scaling, and the run has {now}: the scale starts at its initial value"
    else:
        what = f"its loss scaling is {then}, and the run's is {now}: the scale starts at its initial value"
    log.warning("surefoot: the checkpoint is loaded, but %s.", what)


def _schedule_changes(scheduler: Any, saved: Any, name: str = "scheduler") -> Iterator[str]:
    if scheduler is None or not isinstance(saved, dict):
        return
    for key in _SCHEDULE_SETTINGS:
        now, then = getattr(scheduler, "__dict__", {}).get(key), saved.get(key)
        if now is not None and then is not None and not _equal(now, then):
            yield f"{name}.{key.lstrip('_')} was {_shown(then)} and is {_shown(now)}, and the saved value is used"
    if isinstance(scheduler, LambdaLR):
        yield from _rate_changes(scheduler, saved, name)
    inner, others = getattr(scheduler, "_schedulers", None), saved.get("_schedulers")
    if isinstance(inner, (list, tuple)) and isinstance(others, (list, tuple)):
        for number, (one, other) in enumerate(zip(inner, others, strict=False)):
            yield from _schedule_changes(one, other, f"{name}[{number}]")


def _rate_changes(scheduler: LambdaLR, saved: Mapping[str, Any], name: str) -> Iterator[str]:
    """Compare the saved learning rate with that of surefoot's schedules. Functions of the user's are not called."""
    step, bases, rates = (saved.get(key) for key in ("last_epoch", "base_lrs", "_last_lr"))
    if not isinstance(step, int) or not isinstance(bases, list) or not isinstance(rates, list):
        return
    for function, base, then in zip(scheduler.lr_lambdas, bases, rates, strict=False):
        if not (isinstance(function, partial) and function.func.__module__ == "surefoot.build.schedules"):
            continue
        now, then = float(base) * function(step), float(then)
        if not math.isclose(now, then, rel_tol=1e-6, abs_tol=1e-12 * float(base)):
            yield (
                f"the learning rate of {name} at step {step} was {then:.4g} and is {now:.4g}, because the "
                "schedule's function has changed, and the new one is used"
            )
            return


def _group_changes(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, (now, then) in enumerate(zip(groups, saved, strict=False)):
        for key in _GROUP_SETTINGS:
            if key in now and key in then and _CYCLED.get(key) not in then and not _equal(now[key], then[key]):
                yield f"{key} of group {number} was {_shown(now[key])} in this script and is {_shown(then[key])}"


def _equal(one: Any, other: Any) -> bool:
    """Whether two settings are equal; on a device they are not read, and count as equal."""
    if any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in (one, other)):
        return True
    return bool(_plain(one) == _plain(other))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):  # the milestones of MultiStepLR, a Counter
        return sorted((int(key), count) for key, count in value.items())
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    plain = _plain(value)
    return f"{plain:g}" if isinstance(plain, float) else str(plain)
