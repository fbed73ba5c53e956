"""The data of every step: a fingerprint of its inputs and targets, and its labels.

A script that makes its batches itself has no data loader to observe, but the graph below the loss holds the data: the
loss function saved its target, the first layer its input. At the first backward call from a line of the script, the
whole graph is searched; from then on the path to those two nodes is known, and a step costs a walk along one path and a
few numbers.

On a device, when not every step is measured any more (`measuring_budget`), only the largest value of data other than
integers is computed, which shows whether all values are finite.

Saved tensors are not read if the script uses hooks on them (activation checkpointing, offloading): reading one would
run its hook.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.core.device import has_failed, has_streams
from surefoot.core.without_hooks import WithoutHooks, intercepts_operations
from surefoot.observe.readable import is_readable
from surefoot.record.facts import SeenRows, StepBatch, StepDataFacts
from surefoot.watch import autograd_graph as graph
from surefoot.watch.batch_numbers import BatchNumbers, LargestNumbers
from surefoot.watch.script_hooks import script_hooks

if TYPE_CHECKING:
    from surefoot.watch.measuring_budget import MeasuringBudget

MOST_BATCHES, MOST_WITH_BAD = 1_200, 1_300
"""The maximum number of batches recorded; on a GPU, some more whose data is not finite."""
LABELLED = 500
"""The number of batches recorded with their labels and the scale of their values."""
ROWS_OF = 300
"""The number of batches recorded row by row."""
MOST_ROWS, MOST_IN_BATCH = 12_000, 256
_SEARCHES = 12
MOST_PASSES = 2
"""The number of passes whose beginning triggers a sample: scripts evaluate there, some with gradients enabled."""

_INPUTS = {
    "Addmm": "mat1", "Mm": "self", "Convolution": "input", "MkldnnConvolution": "input", "Embedding": "indices",
    "EmbeddingBag": "indices", "NativeBatchNorm": "input", "NativeLayerNorm": "input", "NativeGroupNorm": "input",
}  # fmt: skip
"""Layers, and the name under which each saves its input."""


@dataclass(slots=True)
class _DataPaths:
    """The places of data in the graphs of the losses of one line."""

    line: int
    """The number of the line."""
    searches: int = 0
    """The number of times the whole graph was searched."""
    is_whole: bool = False
    """Whether the last data consisted of integers only, which are always finite."""
    found: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)
    """For inputs and target: the path from the root, the operation, and the name under which it saves the tensor."""


class StepData:
    """The data of the steps so far."""

    def __init__(self, budget: MeasuringBudget) -> None:
        self._budget = budget
        self.batches: list[StepBatch] = []
        self.rows: dict[int, dict[int, int]] = {}
        """For each line that calls `backward`: every row trained on, with the backward at which it first occurred."""
        self.recent: set[int] = set()
        """The lines since the last step of an optimizer."""
        self.roots_of_step: set[Any] = set()
        """The lines that called `backward` since the last step."""
        self._paths: dict[Any, _DataPaths] = {}
        self._noted = 0
        self.pass_steps: int | None = None
        """The number of steps in a pass over the data, known once all rows of a batch have occurred before."""
        self._passes = 0
        """The number of passes whose beginning was reported."""
        self._being_copied: deque[tuple[StepBatch, BatchNumbers | LargestNumbers]] = deque()

    def note(self, root: Tensor, where: Any, step: int, backward: int) -> None:
        """`backward` is about to run on `root`, called from the line `where`."""
        if self._being_copied:
            self._take_arrived()
        on_device = has_streams(root.device)
        is_kept = self._noted < MOST_BATCHES and self._budget.measured_all
        if script_hooks.saved or root.grad_fn is None or not (is_kept or on_device):
            return
        paths = self._paths.get(where)
        if paths is None:
            paths = self._paths[where] = _DataPaths(len(self._paths))
        self.recent.add(paths.line)
        if (not is_kept and paths.is_whole) or (not paths.found and paths.searches >= _SEARCHES):
            return
        began = time.perf_counter()
        with WithoutHooks():
            inputs = self._follow(root.grad_fn, paths, "inputs")
            target = self._follow(root.grad_fn, paths, "target")
            if inputs is None and target is None:
                return
            numbers = self._numbers(inputs, target, paths.line) if is_kept else LargestNumbers(inputs, target)
            paths.is_whole = not any(each is not None and each.is_floating_point() for each in (inputs, target))
            size = None if inputs is None else len(inputs)
            self._being_copied.append((StepBatch(step=step, backward=backward, line=paths.line, size=size), numbers))
            self._take_arrived()
        if is_kept and on_device:
            self._budget.spend(time.perf_counter() - began)

    def _numbers(self, inputs: Tensor | None, target: Tensor | None, line: int) -> BatchNumbers:
        with_rows = self._noted < ROWS_OF and len(self.rows.setdefault(line, {})) < MOST_ROWS
        numbers = BatchNumbers(inputs, target, self._noted < LABELLED, MOST_IN_BATCH if with_rows else 0)
        self._noted += 1
        return numbers

    def _take_arrived(self, wait: bool = False) -> None:
        """Add the batches whose numbers have arrived; with `wait`, all of them."""
        while self._being_copied and (wait or self._being_copied[0][1].has_arrived()):
            batch, numbers = self._being_copied.popleft()
            try:
                self._take(batch, numbers)
            except RuntimeError:
                if not has_failed():  # otherwise the numbers are lost
                    raise

    def _take(self, batch: StepBatch, numbers: BatchNumbers | LargestNumbers) -> None:
        is_kept = len(self.batches) < MOST_BATCHES
        rows = numbers.rows()
        known = self.rows.setdefault(batch.line, {}) if rows else {}
        if self.pass_steps is None and batch.step and rows and all(row in known for row in rows):
            self.pass_steps = batch.step
        for row in rows:
            known.setdefault(row, batch.backward)
        if is_kept or (len(self.batches) < MOST_WITH_BAD and not numbers.are_finite()):
            self.batches.append(replace(batch, **numbers.as_fields()))

    def begins_pass(self, step: int) -> bool:
        """Whether one of the first passes over the data begins after this step."""
        length = self.pass_steps
        if length is None or length < 2 or step % length or self._passes >= MOST_PASSES:
            return False
        self._passes += 1
        return True

    def take_lines(self) -> set[int]:
        """Return the lines since the last step of an optimizer, and start a new set."""
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
        """The data of all steps. Waits for the device."""
        self._take_arrived(wait=True)
        rows = {
            str(line): SeenRows(prints=list(held), first=list(held.values()), whole=self._whole(line))
            for line, held in self.rows.items()
        }
        return StepDataFacts(batches=self.batches, rows=rows)

    def _whole(self, line: int) -> bool:
        """Whether every row that was trained on from a line is known."""
        largest = max((batch.size or 0 for batch in self.batches if batch.line == line), default=0)
        are_all_noted = self._noted < ROWS_OF and self._budget.measured_all
        return are_all_noted and len(self.rows[line]) < MOST_ROWS and largest <= MOST_IN_BATCH


def _data(node: Any, name: str) -> Tensor | None:
    """A tensor that a node saved, if it came from outside the graph."""
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


def _candidates(root: Any, kind: str) -> list[tuple[int, tuple[int, ...], str, str, Tensor]]:
    """The places where the graph holds data: size, path from the root, operation, name, tensor.

    The state that a recurrent layer starts from also comes from outside the graph, and is usually zero. It is told from
    data by its weight, which is applied to later states as well, and those are computed.
    """
    waiting: list[tuple[Any, tuple[int, ...]]] = [(root, ())]
    seen = {root}
    position = 0
    found: list[tuple[Any, tuple[int, tuple[int, ...], str, str, Tensor]]] = []
    recurrent: set[Any] = set()
    while position < len(waiting) and position < 2_000:
        node, path = waiting[position]
        position += 1
        op = graph.op(node)
        name = _INPUTS.get(op) if kind == "inputs" else "target" if hasattr(type(node), "_saved_target") else None
        if name is not None:
            tensor = _data(node, name)
            if tensor is not None:
                rank = tensor.numel() if kind == "inputs" else -position
                found.append((_weight_of(node, op), (rank, path, op, name, tensor)))
            elif kind == "inputs":
                recurrent.add(_weight_of(node, op))
        if len(path) > 300 or (kind == "target" and len(path) > 12):
            continue
        for turn, (below, _) in enumerate(node.next_functions):
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append((below, (*path, turn)))
    kept = [place for weight, place in found if weight is None or weight not in recurrent]
    return kept or [place for _, place in found]


def _weight_of(node: Any, op: str) -> Any:
    """The node of the parameter that a matrix product multiplies by; `None` for other operations."""
    if op not in ("Addmm", "Mm"):
        return None
    below = node.next_functions[-1][0]
    while below is not None and graph.op(below) == "T":
        below = below.next_functions[0][0]
    return below
