"""Single parts without a stabilizer: clip gradients in your own loop, or run one detector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.act.apply import scale_gradients
from surefoot.act.clip import ClipByNorm
from surefoot.act.shape import warn_of_unmatched
from surefoot.core.settings import shown
from surefoot.core.state_tree import pack, unpack
from surefoot.errors import SettingError, UsageError, require
from surefoot.guard.validation import signal_value, split_clip
from surefoot.observe.tensors import TensorMeter, combine_shards, dense_views, total_norm
from surefoot.types import GradientNorms, NamedParameter, Signals, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.types import Clipper, Detector, Shaper


class Stateful:
    """A detector or a clipper with its state, for use in your own loop.

    >>> import surefoot as sf
    >>> monitor = sf.Stateful(sf.LossStabilityMonitor(window_steps=8))
    >>> for loss in (3.0, 2.0, 1.5, 1.2, 1.0, 0.9, 0.8, 0.7):
    ...     verdict = monitor.update(loss=loss)
    >>> verdict.evidence["status"]
    'stable'
    """

    def __init__(self, part: Detector | Clipper) -> None:
        if isinstance(part, type) or not (hasattr(part, "init") and hasattr(part, "update")):
            raise SettingError(f"`Stateful` takes a detector or a clipper such as `ClipByNorm(1.0)`; got {part!r}.")
        self.part = part
        self.steps = 0
        self.state: Any = None

    def update(self, step: int | None = None, **signals: Any) -> Verdict:
        """Run a detector on one step, given its signals by name."""
        known = {
            name: signals.pop(name) for name in ("loss", "grad_norm", "nonfinite", "clip_factor") if name in signals
        }
        if _is_clipper(self.part):
            raise UsageError(f"{self.part!r} is a clipper, which judges no step: pass it to `clip_gradients`.")
        for name, value in (known | signals).items():
            if value is not None:
                signal_value(name, value)
        step = self.steps if step is None else step
        if self.state is None:
            self.state = self.part.init()  # type: ignore[call-arg]
        self.state, verdict = self.part.update(self.state, Signals(step, **known, extra=signals))  # type: ignore[arg-type]
        self.steps = step + 1
        return verdict  # type: ignore[return-value]

    def factor(self, norms: GradientNorms) -> Tensor:
        """The factor by which a clipper multiplies the gradients."""
        if self.state is None:
            self.state = self.part.init(len(norms.each))  # type: ignore[call-arg]
        self.state, factor = self.part.update(self.state, norms)  # type: ignore[arg-type]
        self.steps += 1
        return factor  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values."""
        return {"part": repr(self.part), "steps": self.steps, "state": pack(self.state)}

    def load_state_dict(self, state: dict[str, Any], count: int = 1) -> None:
        """Continue where a saved one stopped; `count` is the number of gradients, for a clipper that needs it."""
        if not isinstance(state, Mapping) or not state.keys() >= {"part", "steps", "state"}:
            raise UsageError(f"`state` must be the result of `state_dict()`; got {shown(state)}.")
        if state["part"] != repr(self.part):
            raise UsageError(f"the state belongs to {state['part']}, and this is {self.part!r}: settings must match.")
        self.steps = state["steps"]
        fresh = self.part.init(count) if _is_clipper(self.part) else self.part.init()  # type: ignore[call-arg]
        self.state = None if state["state"] is None else unpack(fresh, state["state"])


def _is_clipper(part: Any) -> bool:
    """A clipper's `init` takes the number of gradients; a detector's takes nothing."""
    return bool(part.init.__code__.co_argcount > 1)


@torch.no_grad()
def clip_gradients(
    parameters: torch.nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    clip: float | Clipper | Shaper | Stateful | Sequence[Clipper | Shaper],
) -> Tensor:
    """Clip gradients in place; returns the global norm before clipping, on the device.

    A non-finite gradient is left unchanged, and the returned norm is NaN: multiplying by such a norm would break every
    other gradient too. Check it, and skip the step. Pass a clipper with state as `Stateful(clipper)`, which keeps its
    state between calls.
    """
    named = [item if isinstance(item, tuple) else ("", item) for item in _listed(parameters)]
    for _, parameter in named:
        require(
            isinstance(parameter, Tensor),
            f"`parameters` must be a model, a tensor or several tensors; one of them is {shown(parameter)}.",
        )
    running = clip if isinstance(clip, Stateful) else None
    rule = running.part if running else ClipByNorm(float(clip)) if isinstance(clip, (int, float)) else clip
    shapers, clipper = split_clip(rule)
    require(bool(shapers) or clipper is not None, f"`clip` must be a number or a clipper; got {shown(clip)}.")
    present = [i for i, (_, parameter) in enumerate(named) if parameter.grad is not None]
    with_gradient = [NamedParameter(*named[i]) for i in present]
    if not with_gradient:
        return torch.zeros(())
    gradients = [parameter.grad for _, parameter in with_gradient if parameter.grad is not None]
    statistics = combine_shards(TensorMeter().measure(gradients), gradients)
    norm = total_norm(statistics.norm)
    warn_of_unmatched(shapers, [name for name, _ in named])
    for shaper in shapers:
        shaper.shape(with_gradient)
    if shapers:
        gradients = [parameter.grad for _, parameter in with_gradient if parameter.grad is not None]
    if shapers and clipper is not None:
        statistics = combine_shards(TensorMeter().measure(gradients), gradients)
    if clipper is not None:
        each, places = statistics.norm, None
        if len(present) < len(named):  # still one entry per parameter, so that each history stays with its tensor
            places = torch.tensor(present).to(each.device, non_blocking=True)
            each = each.new_zeros(len(named)).index_copy(0, places, each)
        norms = GradientNorms(total_norm(statistics.norm), each)
        factor = running.factor(norms) if running else clipper.update(clipper.init(len(named)), norms)[1]
        if places is not None and factor.ndim:
            factor = factor[places]
        scale_gradients(dense_views(gradients), factor)
    return norm


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, Tensor):
        return [parameters]
    require(
        isinstance(parameters, (torch.nn.Module, Iterable)),
        f"`parameters` must be a model, a tensor or several tensors; got {shown(parameters)}.",
    )
    return list(parameters.named_parameters() if isinstance(parameters, torch.nn.Module) else parameters)
