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
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from surefoot.observe.readable import is_readable
from surefoot.record.facts import SeenRows, StepBatch, StepDataFacts
from surefoot.watch import autograd_graph as graph
from surefoot.watch.script_hooks import WithoutHooks, intercepts_operations, script_hooks
from surefoot.watch.tensor_summary import fingerprints

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
        self.roots_of_step: set[Any] = set()
        """The lines that called `backward` since the last step."""
        self._paths: dict[Any, _DataPaths] = {}

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
                    batch = replace(batch, input_largest=float(inputs.abs().max()))
                rows = self.rows.setdefault(paths.line, {})
                if len(self.batches) < ROWS_OF and len(rows) < MOST_ROWS and inputs.dim() > 1:
                    for row in fingerprints(inputs, MOST_IN_BATCH):
                        rows.setdefault(row, backward)
            if target is not None:
                batch = replace(batch, target_print=print_of(target), **(target_facts(target) if is_early else {}))
            self.batches.append(batch)

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
        rows = {
            str(line): SeenRows(prints=list(held), first=list(held.values()), whole=self._whole(line))
            for line, held in self.rows.items()
        }
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
    ends = [*flat[:8].tolist(), *flat[-8:].tolist(), float(flat[: 1 << 12].double().sum())]
    return hash((tuple(tensor.shape), tuple(ends)))


class _TargetFacts(TypedDict, total=False):
    labels: dict[str, int]
    target_mean: float
    target_std: float
    target_largest: float


def target_facts(target: Tensor) -> _TargetFacts:
    """The labels of a batch, or the scale of its targets."""
    flat = target.detach().reshape(-1)
    if flat.numel() > 512:
        flat = flat[:: -(-flat.numel() // 512)]
    values = flat.tolist()
    labels = Counter(values)
    if len(labels) <= 64 and (not target.is_floating_point() or set(labels) <= {0.0, 1.0}):
        return {"labels": {str(int(label)): count for label, count in labels.items()}}
    if not target.is_floating_point():
        return {}
    full = target.detach().float()
    return {
        "target_mean": float(full.mean()),
        "target_std": float(full.std(correction=0)),
        "target_largest": float(full.abs().max()),
    }
