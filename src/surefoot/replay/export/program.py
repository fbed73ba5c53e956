"""Some of the captured calls as lines of Python, with the tensors that they start from.

What is tried here, what is shrunk and what is written into the script is the same text. It begins with the chosen calls
in their order, and ends with a list `made` with the result of the last one: its outputs, or in backward the gradients
of its inputs. `attempt` runs it in this process and counts the non-finite values in its result.
"""

from __future__ import annotations

import builtins
import keyword
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from surefoot.replay.export.call_text import NotWritable, spell, title
from surefoot.replay.locate.describe import Counts, values_of

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from surefoot.replay.export.call_recorder import CapturedCalls, Key, Ran


_TAKEN = frozenset(
    ("torch", "F", "Path", "made", "result", "sys", "json", "counts", "kinds", "said", "load", "tensors", "gradients")
)


@dataclass
class Line:
    """One line of the script."""

    text: str
    ran: Ran | None = None
    """The call that it represents."""


@dataclass
class Program:
    """Lines, and the tensors they begin with."""

    title: str
    """The name of the failing call."""
    lines: list[Line]
    leaves: dict[str, Tensor]
    made: list[str]
    """The expressions whose values are checked."""
    backward: bool
    keys: dict[str, Key] = field(default_factory=dict)
    """Which value each of the leaves is."""

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join([*(line.text for line in self.lines), f"made = [{', '.join(self.made)}]"])

    @property
    def operations(self) -> int:
        """How many calls there are."""
        return sum(line.ran is not None for line in self.lines)

    @property
    def bytes(self) -> int:
        """Of all tensors that it begins with."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves.values())


def build(captured: CapturedCalls, chosen: list[Ran], *, backward: bool) -> Program:
    """Lines for some calls; the last is the one that fails. Raises `NotWritable` if a call cannot be written."""
    return _Writer(captured, backward).write(chosen)


class _Writer:
    def __init__(self, captured: CapturedCalls, backward: bool) -> None:
        self._captured, self._backward = captured, backward
        self._lines: list[Line] = []
        self._leaves: dict[str, Tensor] = {}
        self._keys: dict[str, Key] = {}
        self._known: dict[Key, str] = {}
        self._used: set[str] = set()
        self._autocast: dict[str, dtype] = {}

    def write(self, chosen: list[Ran]) -> Program:
        *before, bad = chosen
        for ran in before:
            self._add(ran, self._fresh(self._name_of_output(ran)))
        self._bring_in(bad)
        if self._backward:
            made = self._differentiate(bad)
        else:
            self._add(bad, "result")
            made = _results(bad) or [self._known[key] for key in bad.written]
        if not made:
            raise NotWritable(f"{title(bad)} has no result to check")
        return Program(title(bad), self._lines, self._leaves, made, self._backward, self._keys)

    def _bring_in(self, ran: Ran) -> None:
        for key in ran.inputs:
            self._expression(key)

    def _expression(self, key: Key) -> str:
        """The variable with a value; a tensor the script begins with, if no earlier line made it."""
        if key not in self._known:
            tensor = self._captured.values.get(key)
            if tensor is None:
                raise NotWritable("an input had been overwritten, or is of a kind that cannot be stored")
            name = self._fresh(self._captured.names.get(key, "given"))
            self._leaves[name], self._keys[name] = tensor, key
            self._known[key] = name
        return self._known[key]

    def _add(self, ran: Ran, name: str) -> None:
        call = f"{name} = {spell(ran, self._expression)}"
        if ran.is_random:
            self._emit("torch.manual_seed(0)", ran.autocast)
        self._emit(call, ran.autocast, ran)
        for key, path in ran.outputs.items():
            self._known[key] = f"{name}{path}"

    def _emit(self, text: str, autocast: dict[str, dtype], ran: Ran | None = None) -> None:
        """A line, under autocast where its call was; calls that follow one another share it."""
        if autocast != self._autocast:
            for depth, (kind, precision) in enumerate(autocast.items()):
                self._lines.append(Line(f'{"    " * depth}with torch.autocast("{kind}", dtype={precision}):'))
            self._autocast = autocast
        self._lines.append(Line("    " * len(autocast) + text, ran))

    def _differentiate(self, bad: Ran) -> list[str]:
        upstream = self._captured.upstream
        inputs = list(dict.fromkeys(self._expression(key) for key in bad.needs_gradient))
        if not upstream or not inputs:
            raise NotWritable(f"{title(bad)} received no gradient")
        for name in inputs:
            if not name.isidentifier():
                raise NotWritable("a part of a result has no gradient")
            leaf = name in self._leaves
            text = f"{name}.requires_grad_()" if leaf else f"{name} = {name}.detach().requires_grad_()"
            self._emit(text, bad.autocast)
        self._add(bad, "result")
        outputs, arriving = [], []
        for path, gradient in upstream.items():
            name = self._fresh("gradient")
            self._leaves[name] = gradient
            outputs.append(f"result{path}")
            arriving.append(name)
        text = ", ".join(f"[{', '.join(part)}]" for part in (outputs, inputs, arriving))
        self._emit(f"gradients = torch.autograd.grad({text})", {})
        kinds = {self._expression(key): key.dtype for key in bad.needs_gradient}
        return [_readable(f"gradients[{i}]", kinds[name]) for i, name in enumerate(inputs)]

    def _name_of_output(self, ran: Ran) -> str:
        return next((name for key in ran.outputs if (name := self._captured.names.get(key, ""))), "value")

    def _fresh(self, wish: str) -> str:
        wish = wish if wish.isidentifier() and not keyword.iskeyword(wish) else "given"
        wish = f"{wish}_" if hasattr(builtins, wish) else wish
        name, number = wish, 1
        while name in self._used or name in _TAKEN:
            number += 1
            name = f"{wish}_{number}"
        self._used.add(name)
        return name


def _results(ran: Ran) -> list[str]:
    """The results of a call that can contain a non-finite value."""
    kinds = {path: key.dtype for key, path in ran.outputs.items()}
    able = {path: kind for path, kind in kinds.items() if kind and (kind.is_floating_point or kind.is_complex)}
    return [_readable(f"result{path}", kind) for path, kind in able.items()]


def _readable(expression: str, kind: dtype | None) -> str:
    """An expression as real numbers of a dtype that supports every check."""
    if kind is not None and kind.is_complex:
        return f"torch.view_as_real({expression}.resolve_conj())"
    return f"{expression}.float()" if kind is not None and kind.itemsize == 1 else expression


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class TrialResult(NamedTuple):
    """The result of some lines."""

    counts: Counts
    numel: int

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Which kinds of non-finite values there are."""
        return tuple(number > 0 for number in self.counts)


@dataclass
class Patience:
    """A limit for the number of attempts."""

    trials: int = 600
    seconds: float = 20.0
    _began: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether it is used up."""
        return self.trials <= 0 or time.monotonic() - self._began > self.seconds


def attempt(text: str, leaves: Mapping[str, Tensor]) -> TrialResult | None:
    """The result of the lines for these tensors; `None` if they raise."""
    risky = any(leaf.device.type != "cpu" for leaf in leaves.values()) and any(
        leaf.dtype in _INTEGERS for leaf in leaves.values()
    )
    if risky and _run(text, {name: leaf.cpu() for name, leaf in leaves.items()}) is None:
        return None  # an index out of range is an error on the CPU, and the end of the process on a GPU
    return _run(text, {name: leaf.clone() for name, leaf in leaves.items()})


def _run(text: str, leaves: dict[str, Tensor]) -> TrialResult | None:
    names: dict[str, Any] = {"torch": torch, "F": functional, **leaves}
    with ExitStack() as stack:
        stack.enter_context(_neutral(leaves))
        if "manual_seed" in text:
            stack.enter_context(torch.random.fork_rng())
        try:
            exec(compile(text, "<reproduction>", "exec"), names)
            return _count(names["made"])
        except Exception:  # whatever it is, it is not the failure that is searched for
            return None


def _neutral(leaves: Mapping[str, Tensor]) -> ExitStack:
    """The settings of a fresh process, whatever the caller has set."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    for kind in {leaf.device.type for leaf in leaves.values()}:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _count(made: list[Tensor]) -> TrialResult:
    total, numel = Counts(), 0
    for tensor in made:
        values = values_of(tensor)
        if values is not None:
            each = (values.isnan(), values.isposinf(), values.isneginf())
            total = Counts(*(had + int(here.sum()) for had, here in zip(total, each, strict=True)))
            numel += values.numel()
    return TrialResult(total, numel)
