"""Raises an alarm for a layer whose units are all dead: the following ReLU returns 0, so the layer gets no gradient.

Two signals are needed, and the second is checked only after the first:

1. For `STEPS` applied steps the gradient of a layer is exactly 0, and so is that of the following weight, while the
   following bias, if there is one, still gets a gradient: the input of that weight is 0 in every batch.
2. In the next `LOOKS` batches every output of the layer is 0 or less although its input is not all 0. If no bias
   follows, the input of the following layer must also be all 0.

So there is no alarm for a layer that is frozen or has no gradient, that does not contribute to the loss of this phase
(the following bias gets no gradient, or the following layer has an input), whose input is absent (all 0), or whose
output is set to 0 by a mask, a gate or dropout (the layer itself still has positive outputs).

Not covered: units that die one by one (the log has their share), and models whose modules
accept no hook, such as compiled ones.
"""

from __future__ import annotations

import logging
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from surefoot.core.device import is_capturing
from surefoot.core.device_copies import begin_reading_number
from surefoot.core.without_hooks import WithoutHooks, runs_eagerly
from surefoot.observe.activations import ForwardHook, in_backward, watched_modules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

    from surefoot.core.device_copies import ArrivingNumber, KnownNumber
    from surefoot.guard.run_history import RunHistory
    from surefoot.types import LayerStats, StepRecord

logger = logging.getLogger("surefoot")

STEPS = 50
"""The number of consecutive applied steps with a gradient of exactly 0 before the outputs of a layer are checked."""
LOOKS = 3
"""The number of batches whose outputs are checked."""


class _Layer(NamedTuple):
    """The positions of a module's weight and bias among the gradients of a step."""

    name: str
    weight: int
    bias: int | None


class DeadLayers:
    """Follows the gradients of a run, and checks the outputs of a layer that has had none for long."""

    def __init__(self, models: Sequence[nn.Module], history: RunHistory) -> None:
        self._models, self._history = models, history
        self._names: tuple[str, ...] = ()
        self._layers: list[_Layer] = []
        self._counts: dict[str, int] = {}
        """The number of consecutive steps for which each layer has passed nothing on."""
        self._done: set[str] = set()
        """Layers that have been checked; each is checked once."""
        self._look: _OutputCheck | None = None
        self._handles: list[RemovableHandle] = []
        self._is_over = False
        weakref.finalize(self, _remove, self._handles).atexit = False  # a hook must not outlive this object

    def take(self, record: StepRecord) -> None:
        """The numbers of a step have arrived. Never raises."""
        if self._is_over:
            return
        try:
            self._take(record)
        except Exception as error:
            self._is_over = True
            _remove(self._handles)
            logger.warning("surefoot: the check for dead layers is disabled (%s: %s)", type(error).__name__, error)

    def _take(self, record: StepRecord) -> None:
        layers = record.signals.layers
        if layers is None or record.skipped:
            return
        silent = self._layers_without_gradient(layers)
        self._counts = {name: self._counts.get(name, 0) + 1 for name in silent}
        if self._look is not None:
            self._conclude(self._look, record)
        elif name := next((each for each, count in self._counts.items() if self._is_due(each, count)), None):
            self._look = self._begin(name, silent[name])

    def _is_due(self, name: str, count: int) -> bool:
        return count >= STEPS and name not in self._done

    def _layers_without_gradient(self, layers: LayerStats) -> dict[str, str]:
        """The layers without any gradient whose successor gets only zeros, with that successor."""
        without = layers.without_gradient
        if not bool(without.any()) or bool(layers.nonfinite.any()):
            return {}
        if layers.names is not self._names and layers.names != self._names:
            self._names, self._layers = layers.names, _layers_of(layers.names)
        zero = without.tolist()
        found = {}
        for layer, behind in zip(self._layers, self._layers[1:], strict=False):
            blocked = zero[layer.weight] and (layer.bias is None or zero[layer.bias])
            if blocked and zero[behind.weight] and (behind.bias is None or not zero[behind.bias]):
                found[layer.name] = behind.name
        return found

    def _begin(self, name: str, behind: str) -> _OutputCheck | None:
        self._done.add(name)
        modules = {each: module for each, module in watched_modules(self._models) if each in (name, behind)}
        if name not in modules or behind not in modules:
            return None
        reads_behind = getattr(modules[behind], "bias", None) is None
        look = _OutputCheck(name, behind, reads_behind)
        for each in (name, behind) if reads_behind else (name,):
            self._handles.append(modules[each].register_forward_hook(_CallHook(look, each)))
        return look

    def _conclude(self, look: _OutputCheck, record: StepRecord) -> None:
        passed = True if look.name not in self._counts else look.passed_anything()  # it may have a gradient again
        look.steps += 1
        if passed is None and look.steps <= STEPS:
            return
        self._look = None
        _remove(self._handles)
        if passed is False:
            self._alarm(look, record)

    def _alarm(self, look: _OutputCheck, record: StepRecord) -> None:
        count = self._counts[look.name]
        self._history.note(
            record.signals,
            "dead-layer",
            "warning",
            f"{look.name} is dead: its gradient has been exactly 0 for {count} steps and its outputs in {LOOKS} "
            f"batches are all 0 or less, so the weight of {look.behind} gets no gradient either. Initialise "
            f"{look.name} again, with a bias of 0, and lower the learning rate, or use an activation with a slope "
            "below 0, such as GELU or LeakyReLU",
            evidence={"layer": look.name, "behind": look.behind, "steps": count},
        )


def _layers_of(names: Sequence[str]) -> list[_Layer]:
    """The modules that have a parameter called `weight`, in order."""
    places = {name: i for i, name in enumerate(names)}
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return [_Layer(module, places[f"{module}.weight"], places.get(f"{module}.bias")) for module in modules]


class _CallHook(ForwardHook):
    """A forward hook that also passes on the arguments of the module."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module was called."""
        if not torch.compiler.is_compiling():
            self._watch.look(self._name, module, (args, output))


class _OutputCheck:
    """Records whether any output of a module in a few forward passes is above 0, or its input is all 0.

    With `reads_behind`, also whether the input of the module behind it is not all 0.
    """

    def __init__(self, name: str, behind: str, reads_behind: bool) -> None:
        self.name, self.behind = name, behind
        self.steps = 0
        """The number of steps since the check began: it does not wait for a module that is no longer called."""
        self._thread = get_ident()
        read = (name, behind) if reads_behind else (name,)
        self._signs: dict[str, list[ArrivingNumber | KnownNumber]] = {each: [] for each in read}
        """For each module and call, whether it shows that the module is not dead."""
        self._failed = False

    def look(self, name: str, module: nn.Module, call: Any) -> None:
        """The module was called; `call` has its arguments and its output. Never raises."""
        args, output = call
        trains = torch.is_grad_enabled() and module.training and not in_backward()
        if len(self._signs[name]) >= LOOKS or get_ident() != self._thread or not trains or not runs_eagerly():
            return
        try:
            with WithoutHooks():
                if not args or not _is_readable(args[0]) or not _is_readable(output):
                    self._failed = True
                else:
                    arrives = (args[0].detach() != 0).any()
                    sign = arrives if name == self.behind else (output.detach() > 0).any() | ~arrives
                    self._signs[name].append(begin_reading_number(sign))
        except Exception:  # observation never ends a run
            self._failed = True

    def passed_anything(self) -> bool | None:
        """Whether an output was above 0, an input absent, or a call unreadable; `None` after too few calls."""
        if not self._failed and any(len(signs) < LOOKS for signs in self._signs.values()):
            return None
        return self._failed or any(number.wait() for signs in self._signs.values() for number in signs)


def _is_readable(value: Any) -> bool:
    return type(value) is Tensor and value.is_floating_point() and not is_capturing(value.device)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
