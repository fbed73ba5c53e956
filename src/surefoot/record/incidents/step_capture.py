"""Records each step before it is judged: references to memory, and random streams, without copies.

A refused step leaves weights, moments and buffers unchanged: they *are* the state before it. The positions of the
random streams and the batch are lost by then. So the following is recorded during each step, in a few microseconds:

- every batch when it is returned (by a `DataLoader`, by `stabilizer.resume`, or passed to `run_microbatches`), and the
  number of writes to each of its tensors so far: a loop that changes it in place is detected;
- the random streams right after that or, if no batch is seen, when the model is first called;
- the inputs of the model, and each loss.

No object of the loop is referenced, so the lifetime of all objects is unchanged: models are referenced weakly, and the
memory of a batch's tensors is kept to the end of the step by tensors that share it (`values.TensorMirror`).

Nothing is read from a device. If the verdict arrives some steps later, the records of those steps are kept, but only
little device memory. The model has a hook from the moment a batch is drawn until its backward, so that it can be copied
and saved between steps as usual.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.device import generators_of, is_capturing, replace_random_states
from surefoot.core.random_state import RandomStreams, read_streams
from surefoot.core.weak_reference import InertWhenCopied, weak_callback
from surefoot.core.without_hooks import runs_eagerly, without_torch_function
from surefoot.record.incidents.loader_batches import add_listener
from surefoot.record.incidents.values import TensorMirror

if TYPE_CHECKING:
    from surefoot.types import Scalar

    Weight = Scalar | Callable[[], Scalar] | None

MOST_DRAWN = 8
"""The number of batches recorded for one microbatch: a loop that draws more does so for another purpose."""
MOST_CALLS = 16
MOST_HELD_BYTES = 64 << 20
"""The maximum device memory held for the inputs of a model in one step."""
MOST_BATCH_BYTES = 256 << 20
"""The maximum size of the batches of several microbatches together; the last one is always kept."""
MOST_MICROBATCHES = 1_024
"""The number of microbatches recorded for one step. A loop that never steps has more."""


_WORDS = 624
_BYTES = 4 * _WORDS


class StreamNote(NamedTuple):
    """The streams at one moment. `full` returns them like `read_streams`."""

    python: bytes | None
    """Position and words as in memory; `None` if `public` contains them."""
    gauss: float | None
    numpy: bytes | None
    torch: Tensor
    devices: tuple[tuple[int, Tensor], ...]
    """The states of the generators of some devices, by index."""
    public: RandomStreams | None
    """All streams, if the slow method had to be used."""

    def full(self) -> RandomStreams:
        """The same as `core.random_state.read_streams`; devices that were not recorded have their current state."""
        if self.public is not None:
            return self.public
        assert self.python is not None
        assert self.numpy is not None
        state = read_streams()
        position, words = _split(self.python, position_first=True)
        state["python"] = {
            "version": state["python"]["version"],
            "words": torch.tensor([*words, position], dtype=torch.int64),
            "gauss": self.gauss,
        }
        position, words = _split(self.numpy, position_first=False)
        now = state["numpy"]
        moved = position != now["position"] or words != now["keys"].tolist()
        state["numpy"] = {
            "kind": now["kind"],
            "keys": torch.tensor(words, dtype=torch.int64),
            "position": position,
            "has_gauss": 0 if moved else now["has_gauss"],
            "cached": 0.0 if moved else now["cached"],
        }
        state["torch"] = self.torch
        replace_random_states(state, self.devices)
        return state


class QuickStreams:
    """Records the random streams of the process in a microsecond or two; accelerators' only for the given devices.

    `read_streams` takes some 80 microseconds, because Python and NumPy return the state of their generators number by
    number. Both are one block of memory: Python's is the tail of the object, NumPy's is at the address that its
    `ctypes` interface returns. That block is copied as a whole and decoded only if it is needed. It is not even copied
    while its position and another word are unchanged, because most steps use neither generator. Its layout is checked
    once against the public state; if it differs (another interpreter), the slow method is used.

    One number is not in NumPy's block: the second of a pair of normal numbers, if there is one. It is read when the
    note is read, if the stream has not moved since, and otherwise taken as absent: a step that draws single normal
    numbers from NumPy's global generator may draw another one in a replay.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._generators = generators_of(devices)
        self._python, self._numpy = _python_block(), _numpy_block()
        self._own: Any = getattr(random, "_inst", None)

    @property
    def quick(self) -> bool:
        """Whether the blocks were found; otherwise a record takes some 80 microseconds."""
        return self._python is not None and self._numpy is not None

    def note(self) -> StreamNote:
        """The current streams. Does not wait for a device: the state of a generator is on the host."""
        devices = tuple([(index, generator.get_state()) for index, generator in self._generators])
        own = torch.get_rng_state()
        if self._python is None or self._numpy is None:
            return StreamNote(None, None, None, own, devices, read_streams())
        return StreamNote(self._python.copy(), self._own.gauss_next, self._numpy.copy(), own, devices, None)

    def note_or(self, earlier: StreamNote | None) -> StreamNote | None:
        """`note()`, or `earlier` while a graph is being recorded, when generators must not be read."""
        return earlier if is_capturing() else self.note()


class _Block:
    """The memory of one generator: its words, and its position before or after them."""

    def __init__(self, address: int, position_first: bool) -> None:
        self._address = address
        # The position, and a word that seeding changes: after seeding, the first word is always 0x80000000.
        self._glance = (address, 12) if position_first else (address + _BYTES - 4, 8)
        self._seen, self._copied = b"", b""

    def copy(self) -> bytes:
        """Its content; the last copy again if no number was drawn since."""
        seen = ctypes.string_at(*self._glance)  # every number moves the position ...
        if seen != self._seen:  # ... and going round, or seeding, changes the word
            self._seen, self._copied = seen, ctypes.string_at(self._address, _BYTES + 4)
        return self._copied


def _split(block: bytes, position_first: bool) -> tuple[int, list[int]]:
    numbers = np.frombuffer(block, dtype=np.uint32)
    if position_first:
        return int(numbers[0]), numbers[1:].tolist()
    return int(numbers[_WORDS]), numbers[:_WORDS].tolist()


def _python_block() -> _Block | None:
    """The state of Python's generator; `None` if its layout is not that of CPython."""
    generator: Any = getattr(random, "_inst", None)
    try:
        kind = type(generator).__mro__[1]  # the base class written in C
        for start in range(0, kind.__basicsize__ - _BYTES - 3, 4):
            block = _Block(id(generator) + start, position_first=True)
            position, words = _split(block.copy(), position_first=True)
            if (*words, position) == generator.getstate()[1]:
                return block
    except Exception:
        return None
    return None


def _numpy_block() -> _Block | None:
    """The state of NumPy's global generator; `None` if it is not a Mersenne twister with the known layout."""
    try:
        legacy: Any = np.random.mtrand._rand
        block = _Block(legacy._bit_generator.ctypes.state_address, position_first=False)
        kind, keys, position, *_ = legacy.get_state()
        found, words = _split(block.copy(), position_first=False)
    except Exception:
        return None
    same = kind == "MT19937" and found == position and words == keys.tolist()
    return block if same else None


class RecordedTensors(NamedTuple):
    """A nested value of tensors at one moment."""

    value: TensorMirror
    versions: list[int]

    @property
    def changed(self) -> bool:
        """Whether any of the tensors has been written to since."""
        return self.value.versions() != self.versions


def record_tensors(value: Any) -> RecordedTensors:
    """Record a nested value of tensors without referencing any of its objects."""
    mirror = TensorMirror(value)
    return RecordedTensors(mirror, mirror.versions())


@dataclass
class Microbatch:
    """The data between two calls of `step`."""

    streams: StreamNote | None = None
    """The random streams after the last batch was drawn, or when the model was first called."""
    drawn: list[RecordedTensors] = field(default_factory=list)
    given: RecordedTensors | None = None
    """The argument of `run_microbatches`, if no batch was drawn before."""
    calls: list[TensorMirror] = field(default_factory=list)
    """Positional and keyword inputs of every call of a model with gradients enabled."""
    callers: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """The models that were called, with or without gradients, without duplicates."""
    evaluations: int = 1
    """The number of evaluations in the step; batch and random streams are those of the first one."""
    dropped: bool = False
    """Whether its batches were dropped because there were too many."""
    losses: list[Tensor] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)

    def nbytes(self) -> int:
        """The size of its batches in memory."""
        total = 0 if self.given is None else self.given.value.nbytes
        for seen in self.drawn:
            total += seen.value.nbytes
        for call in self.calls:
            total += call.nbytes
        return total

    def drop(self) -> int:
        """Drop the batches; returns the memory that they took."""
        freed = self.nbytes()
        if not self.dropped:
            self.drawn, self.given, self.calls, self.dropped = [], None, [], True
        return freed


@dataclass
class Window:
    """One optimizer step."""

    step: int
    start: StreamNote | None
    """The random streams at the end of the previous step; not recorded if batches are drawn."""
    microbatches: list[Microbatch] = field(default_factory=list)
    began_before: bool = False
    """Whether its first microbatches were run before the recording began."""
    in_closure: bool = False
    """Whether the optimizer evaluates the loss itself."""
    interrupted: bool = False
    """Whether another optimizer has stepped since the first batch or call."""
    had_gradients: bool = False
    """Whether gradients existed before its first backward: left over, or set to zero."""
    batch_bytes: int = 0
    """The size of the kept batches in memory."""

    def add(self, microbatch: Microbatch) -> None:
        """Add a complete microbatch. If all batches together are too large, the first ones are dropped."""
        self.microbatches.append(microbatch)
        self.batch_bytes += microbatch.nbytes()
        if self.batch_bytes > MOST_BATCH_BYTES:
            for each in self.microbatches[:-1]:
                self.batch_bytes -= each.drop()
                if self.batch_bytes <= MOST_BATCH_BYTES:
                    break
        if len(self.microbatches) > MOST_MICROBATCHES:
            self.batch_bytes -= self.microbatches.pop(0).drop()
            self.began_before = True

    @property
    def drew(self) -> bool:
        """Whether any batch was seen."""
        for each in self.microbatches:  # noqa: SIM110, a generator costs a call per microbatch, at each step
            if each.drawn or each.given is not None:
                return True
        return False


class HookedModels:
    """The models whose calls are recorded: referenced weakly, with a forward hook during a part of each step."""

    def __init__(self, models: Sequence[nn.Module], hook: _ForwardHook) -> None:
        self._known = [weakref.ref(model) for model in models]
        self._hook = hook
        self._key: Any = f"surefoot-{id(hook)}"  # torch's own hooks are numbered
        self._attached: list[weakref.ref[nn.Module]] = []
        # The hook is removed from models that live longer than the recording.
        weakref.finalize(self, _take_off, self._attached, self._key).atexit = False

    def add(self, models: Sequence[nn.Module]) -> bool:
        """Add models, replacing those that are inside them; returns whether any is new."""
        if len(models) == len(self._known) == 1 and self._known[0]() is models[0]:
            return False  # the usual case, at each step
        known = self.alive()
        fresh = [model for model in models if not any(model is each for each in known)]
        if not fresh:
            return False
        inside = {id(part) for model in fresh for part in model.modules()}
        known = [model for model in known if id(model) not in inside] + fresh
        self._known = [weakref.ref(model) for model in known]
        return True

    def alive(self) -> list[nn.Module]:
        """The models that still exist."""
        return _alive(self._known)

    def devices(self) -> set[torch.device]:
        """The devices of their parameters."""
        return {each.device for model in self.alive() for each in model.parameters()}

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is one of the models."""
        return any(known() is module for known in self._known)

    def parts(self) -> set[int]:
        """The identities of all modules inside a model."""
        return {id(part) for model in self.alive() for part in model.modules() if part is not model}

    def has_hook(self, module: nn.Module) -> bool:
        """Whether a model has its hook now."""
        return any(attached() is module for attached in self._attached)

    def attach(self) -> None:
        """The same as `register_forward_pre_hook(hook, with_kwargs=True)` without its handle: it runs at every step."""
        if len(self._attached) == len(self._known):
            return
        models = self.alive()
        # A model that is compiled as a whole would be compiled again, with the hook.
        models = [model for model in models if getattr(model, "_compiled_call_impl", None) is None]
        self._attached[:] = [weakref.ref(model) for model in models]
        for model in models:
            model._forward_pre_hooks[self._key] = self._hook
            model._forward_pre_hooks_with_kwargs[self._key] = True

    def detach(self) -> None:
        """Remove the hooks."""
        _take_off(self._attached, self._key)

    def clear(self) -> None:
        """Remove the hooks and drop the models."""
        self.detach()
        self._known = []


def _take_off(attached: list[weakref.ref[nn.Module]], key: Any) -> None:
    for model in _alive(attached):
        model._forward_pre_hooks.pop(key, None)
        model._forward_pre_hooks_with_kwargs.pop(key, None)
    attached.clear()


def _alive(models: Sequence[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [model for reference in models if (model := reference()) is not None]


class StepCapture:
    """Records the current step, and keeps earlier ones that have not been judged yet."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        home: torch.device,
        lag_steps: int = 0,
        step: int = 0,
        between_steps: bool = True,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        """Record the calls of `models`, which are not kept alive, from `step` on.

        `between_steps` is whether a model may have a hook before a batch shows that a step has begun. `on_failure` is
        called if recording fails, which must not affect anything else; without it, recording ends.
        """
        self.models = HookedModels(models, _ForwardHook(self))
        self._thread = threading.get_ident()
        self._streams = QuickStreams([home])
        self._past: deque[Window] = deque(maxlen=lag_steps + 1)
        self.under_way = Microbatch()
        """The current microbatch."""
        self.current = Window(step, self._streams.note())
        """The current step."""
        self.is_paused = False
        """Whether recording is paused."""
        self.hold_all = not lag_steps
        """Whether the inputs of a model are kept although a batch was seen: for one step, they are small."""
        self._held_bytes = 0
        self._just_drawn = 0
        self.failed = on_failure or weak_callback(self.close)
        """Called if recording fails."""
        self._between_steps = between_steps
        if between_steps:
            self.models.attach()
        add_listener(self)

    def add_models(self, models: Sequence[nn.Module]) -> None:
        """Also record the calls of models that were not known at the beginning."""
        if self.models.add(models):
            self._streams = QuickStreams(self.models.devices())

    def called_without_hook(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A model was called while its hook was off: from now to the backward, all models have theirs."""
        if not self.models.has_hook(module):
            self.called(module, args, kwargs)
        self.models.attach()

    # ---- during a step --------------------------------------------------------------------------------------------

    def loader_drew(self, batch: Any) -> Any:
        """A data loader has returned a batch, for training if the model is in training mode."""
        if threading.get_ident() == self._thread:
            try:
                with without_torch_function():
                    self._just_drawn = id(batch) if self._draw(batch) else 0
            except Exception as error:
                self.failed(error)
        return batch

    def drew(self, batch: Any) -> None:
        """A batch was drawn. One that a loader has just returned is not recorded twice."""
        noted, self._just_drawn = self._just_drawn, 0
        if noted != id(batch):
            self._draw(batch)

    def _draw(self, batch: Any) -> bool:
        """Record a batch, if it is used for training."""
        now = self.under_way
        if self.is_paused:
            return False
        if self._past.maxlen == 1:
            self._past.clear()  # judged by now: the last batch must not live longer than in the loop
        models = self.models.alive()
        if (
            not torch.is_grad_enabled()
            or (models and not any(model.training for model in models))
            or not runs_eagerly()
        ):
            return False
        if self.current.interrupted:  # earlier records belong to the step of another optimizer
            self.moved_to(self.current.step, under_way=False)
            now = self.under_way
        now.drawn.append(record_tensors(batch))
        if len(now.drawn) > MOST_DRAWN:
            del now.drawn[0]
        now.streams = self._streams.note_or(self.under_way.streams)
        self.models.attach()
        return True

    def was_given(self, batch: Any) -> None:
        """`run_microbatches` was called with a batch."""
        if not self.under_way.drawn:
            self.under_way.given = record_tensors(batch)
            self.under_way.streams = self._streams.note_or(self.under_way.streams)
            self.models.attach()

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A model is about to run."""
        if self.is_paused or torch.compiler.is_compiling():
            return
        now, self._just_drawn = self.under_way, 0
        if not now.callers or not any(caller() is module for caller in now.callers):
            now.callers.append(weakref.ref(module))
        if not torch.is_grad_enabled():
            if not module.training and not now.losses:  # an evaluation: the batch was drawn for it
                now.drawn.clear()
            return
        if now.streams is None:
            now.streams = self._streams.note_or(self.under_way.streams)
        wanted = self.hold_all or not (now.drawn or now.given is not None)
        if wanted and len(now.calls) < MOST_CALLS and runs_eagerly():
            inputs = TensorMirror((args, kwargs))
            # All of them on the host, but only a little device memory.
            self._held_bytes += inputs.device_bytes
            if self._held_bytes <= MOST_HELD_BYTES:
                now.calls.append(inputs)

    def ran_backward(self, loss: Tensor, weight: Weight) -> None:
        """Backward has run on a loss; its weight may be provided later, by a function."""
        self.under_way.losses.append(loss.detach())
        self.under_way.weights.append(weight)

    def ran_again(self, loss: Tensor) -> None:
        """An optimizer has evaluated its closure again after a microbatch was closed: the last loss counts."""
        if self.current.microbatches:
            last = self.current.microbatches[-1]
            last.losses, last.evaluations = [loss.detach()], last.evaluations + 1

    def close_microbatch(self) -> None:
        """The microbatch is complete."""
        self.current.add(self.under_way)
        self.under_way = Microbatch()
        if self.current.drew or not self._between_steps:
            self.models.detach()

    def moved_to(self, step: int, under_way: bool, paused: bool = False) -> None:
        """The run has moved: to `step`, or to the middle of it. While `paused`, nothing is recorded."""
        self._past.clear()
        self.under_way, self.is_paused = Microbatch(), paused
        start = None if under_way or paused else self._streams.note_or(None)
        self.current = Window(step, start, began_before=under_way)
        if paused:
            self.models.detach()

    def begin(self, step: int) -> None:
        """The step has ended; the next one is `step`."""
        if self.under_way.losses or not self.current.microbatches:
            self.close_microbatch()
        drew, self._held_bytes = self.current.drew, 0
        if self._between_steps:  # otherwise the verdict is known before the step ends
            self._past.append(self.current)
        # A batch drawn ahead of its step stays with that step.
        self.current = Window(step, None if drew else self._streams.note_or(self.under_way.streams))
        if not drew and self._between_steps:
            self.models.attach()

    # ---- after a bad step -----------------------------------------------------------------------------------------

    def window(self, step: int) -> Window | None:
        """The record of a current or recent step."""
        if self.current.step == step:
            return self.current
        return next((window for window in self._past if window.step == step), None)

    def close(self, error: Exception | None = None) -> None:
        """Stop recording, perhaps because of an error."""
        self.models.clear()
        self.under_way = Microbatch()
        self._past.clear()


class _ForwardHook(InertWhenCopied):
    """The temporary hook of a model."""

    def __init__(self, notes: StepCapture) -> None:
        self._notes = weakref.ref(notes)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        notes = self._notes()
        if notes is not None:
            try:
                with without_torch_function():
                    notes.called(module, args, kwargs)
            except Exception as error:
                notes.failed(error)
