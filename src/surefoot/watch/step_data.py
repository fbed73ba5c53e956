"""What every step was trained on: a fingerprint of its inputs and targets, and the labels in it.

A script that makes its batches itself has no data loader to observe, but the graph under the loss holds the data: the
loss function saved its target, the first layer its input. At the first backward from a line of the script the whole
graph is searched; from then on the way to those two nodes is known, and a step costs a walk down one path and a few
numbers.

Saved tensors are left alone once the script uses hooks on them (activation checkpointing, offloading): reading one
would run its hook.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor

from surefoot.observe.readable import is_readable
from surefoot.record.facts import SeenRows, StepBatch, StepDataFacts
from surefoot.watch import autograd_graph as graph
from surefoot.watch.deferred import later, own, read_each, reads_at_once
from surefoot.watch.script_hooks import WithoutHooks, intercepts_operations, script_hooks
from surefoot.watch.tensor_summary import prints_of_rows, sampled

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BATCHES = 1_200
LABELLED = 500
"""So many batches are recorded with their labels and the size of their numbers."""
ROWS_OF = 300
"""So many batches are recorded row by row."""
MOST_ROWS, MOST_IN_BATCH = 12_000, 256
_SEARCHES = 12
_EAGER_STEPS = 200
_NAN = -1.5e308
"""Stands for NaN in fingerprints: each NaN has a hash of its own."""
_ROWS_LATER = 64
"""On a device, the rows of a batch are entered so many batches later."""

_INPUTS = {
    "Addmm": "mat1", "Mm": "self", "Convolution": "input", "MkldnnConvolution": "input", "Embedding": "indices",
    "EmbeddingBag": "indices", "NativeBatchNorm": "input", "NativeLayerNorm": "input", "NativeGroupNorm": "input",
}  # fmt: skip
"""Layers, and the name under which each saves what it was given."""


@dataclass(slots=True)
class _DataPaths:
    """Where the graphs of one line's losses hold their data."""

    line: int
    """The number of the line."""
    searches: int = 0
    """How often the whole graph was searched."""
    found: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)
    """For inputs and target: the path from the root, the operation, and the name under which it saves the tensor."""


class StepData:
    """The data of the steps so far."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []
        self.rows: dict[int, dict[int, int]] = {}
        """For each line that calls `backward`: every row trained on, and the backward it was first seen at."""
        self.recent: set[int] = set()
        """The lines since the last step of an optimizer."""
        self.roots_of_step: list[Any] = []
        """The lines that called `backward` since the last step, once per call."""
        self._paths: dict[Any, _DataPaths] = {}
        self._prints: list[tuple[int, int, list[int]]] = []
        """Line, backward and prints of rows that are still on a device."""

    def note(self, root: Tensor, where: Any, step: int, backward: int) -> None:
        """`backward` is about to run on `root`, called from the line `where`."""
        if script_hooks.saved or len(self.batches) >= MOST_BATCHES or root.grad_fn is None:
            return
        if root.device.type != "cpu" and step >= _EAGER_STEPS:
            return
        paths = self._paths.setdefault(where, _DataPaths(len(self._paths)))
        self.recent.add(paths.line)
        with WithoutHooks():
            inputs = self._follow(root.grad_fn, paths, "inputs")
            target = self._follow(root.grad_fn, paths, "target")
            if inputs is None and target is None:
                return
            is_early = len(self.batches) < LABELLED
            batch = StepBatch(step=step, backward=backward, line=paths.line)
            if inputs is not None:
                batch = replace(batch, input_print=print_of(inputs), size=len(inputs))
                if is_early and inputs.is_floating_point():
                    batch = replace(batch, input_largest=later(_largest, *torch.aminmax(inputs.detach())))
                rows = self.rows.setdefault(paths.line, {})
                if len(self.batches) < ROWS_OF and len(rows) < MOST_ROWS and inputs.dim() > 1:
                    self._prints.append((paths.line, backward, prints_of_rows(inputs, MOST_IN_BATCH)))
                    self._enter_rows(0 if reads_at_once(inputs) else _ROWS_LATER)
            if target is not None:
                batch = replace(batch, target_print=print_of(target), **(target_facts(target) if is_early else {}))
            self.batches.append(batch)

    def _enter_rows(self, later_by: int) -> None:
        """Enter the rows of all batches but the last so many, which may be on their way."""
        while len(self._prints) > later_by:
            line, backward, prints = self._prints.pop(0)
            if len(self.rows[line]) >= MOST_ROWS:
                continue
            for row in next(iter(read_each([prints])), []):
                self.rows[line].setdefault(row, backward)

    def take_lines(self) -> set[int]:
        """The lines since the last step of an optimizer; the next ones are of the next step."""
        lines, self.recent = self.recent, set()
        return lines

    def _follow(self, root: Any, paths: _DataPaths, kind: str) -> Tensor | None:
        known = paths.found.get(kind)
        if known is not None:
            path, op, name = known
            node = root
            for turn in path:
                below = node.next_functions
                node = below[turn][0] if turn < len(below) else None
                if node is None:
                    break
            if node is not None and graph.op(node) == op:
                tensor = _data(node, name)
                if tensor is not None:
                    return tensor
        if paths.searches >= _SEARCHES:
            return None
        paths.searches += 1
        found = max(_candidates(root, kind), key=lambda item: item[0], default=None)
        if found is None:
            return None
        paths.found[kind] = found[1:4]
        return found[4]

    def as_facts(self) -> StepDataFacts:
        """The data of all steps."""
        self._enter_rows(0)
        rows = {
            str(line): SeenRows(prints=list(held), first=list(held.values()), whole=self._whole(line))
            for line, held in self.rows.items()
        }
        self.batches = read_each(self.batches)
        return StepDataFacts(batches=self.batches, rows=rows)

    def _whole(self, line: int) -> bool:
        """Whether every row that was trained on from a line is known."""
        largest = max((batch.size or 0 for batch in self.batches if batch.line == line), default=0)
        return len(self.batches) < ROWS_OF and len(self.rows[line]) < MOST_ROWS and largest <= MOST_IN_BATCH


def _data(node: Any, name: str) -> Tensor | None:
    """A tensor a node saved, if it came from outside the graph."""
    try:
        tensor = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # freed, or changed in place since
        return None
    if (
        not isinstance(tensor, Tensor)
        or intercepts_operations(tensor)
        or tensor.grad_fn is not None
        or tensor.requires_grad
    ):
        return None
    is_data = tensor.dim() and tensor.numel() > 1 and tensor.layout is torch.strided
    return tensor if is_data and is_readable(tensor) else None


def _candidates(root: Any, kind: str) -> Iterator[tuple[int, tuple[int, ...], str, str, Tensor]]:
    """Where the graph holds data: size, way from the root, operation, name, tensor."""
    waiting: list[tuple[Any, tuple[int, ...]]] = [(root, ())]
    seen = {root}
    position = 0
    while position < len(waiting) and position < 2_000:
        node, path = waiting[position]
        position += 1
        op = graph.op(node)
        name = _INPUTS.get(op) if kind == "inputs" else "target" if hasattr(node, "_saved_target") else None
        if name is not None:
            tensor = _data(node, name)
            if tensor is not None:
                yield (tensor.numel() if kind == "inputs" else -position), path, op, name, tensor
        if len(path) > 300 or (kind == "target" and len(path) > 12):
            continue
        for turn, (below, _) in enumerate(node.next_functions):
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append((below, (*path, turn)))


def print_of(tensor: Tensor) -> int:
    """A number that equal tensors share and others almost surely do not."""
    flat = tensor.detach().reshape(-1)
    total = flat[: 1 << 12].double().sum()
    if reads_at_once(flat):
        return _print(tuple(tensor.shape), [*flat[:8].tolist(), *flat[-8:].tolist(), float(total)])
    return later(partial(_print, tuple(tensor.shape)), torch.cat([flat[:8].double(), flat[-8:].double(), total[None]]))


def _print(shape: tuple[int, ...], values: Tensor | list[float]) -> int:
    numbers = values.tolist() if isinstance(values, Tensor) else values
    return hash((shape, tuple(_NAN if value != value else value for value in numbers)))


def _largest(low: float, high: float) -> float:
    return max(-low, high)


class _TargetFacts(TypedDict, total=False):
    labels: dict[str, int] | None
    target_mean: float | None
    target_std: float | None
    target_largest: float | None


def target_facts(target: Tensor) -> _TargetFacts:
    """The labels of a batch, or the scale of its targets."""
    is_float = target.is_floating_point()
    full = target.detach().float() if is_float else None
    scale = None if full is None else torch.stack([full.mean(), full.std(correction=0), full.abs().max()])
    found = later(partial(_labels_or_scale, is_float), own(sampled(target, 512)), scale)
    return cast("_TargetFacts", {name: later(itemgetter(name), found) for name in _TargetFacts.__annotations__})


def _labels_or_scale(is_float: bool, values: Tensor, scale: Tensor | None) -> _TargetFacts:
    labels = Counter(values.tolist())
    is_labels = len(labels) <= 64 and (not is_float or set(labels) <= {0.0, 1.0})
    mean, std, largest = (None, None, None) if scale is None or is_labels else scale.tolist()
    return {
        "labels": {str(int(label)): count for label, count in labels.items()} if is_labels else None,
        "target_mean": mean,
        "target_std": std,
        "target_largest": largest,
    }
