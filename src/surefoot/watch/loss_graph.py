"""Reads the graph and the recorder of a backward call: sign, factor, pairs, breaks, and the first non-finite node.

The graph shows what the loss depends on, the recorder shows which lines of the script computed it. Nothing is computed
on the graph itself; hooks on its nodes only accumulate values. Graphs with more than 4,000 nodes get no hooks.
"""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from surefoot.core.without_hooks import WithoutHooks, runs_eagerly
from surefoot.observe.readable import readable
from surefoot.record.facts import (
    BackwardCall,
    GraphBreak,
    HistoryCall,
    InputTargetPairs,
    LossSign,
    NonFiniteNode,
    ResultGradient,
)
from surefoot.watch import autograd_graph as graph
from surefoot.watch.deferred import later
from surefoot.watch.function_recorder import BREAKS
from surefoot.watch.model_calls import rounded_rows
from surefoot.watch.operation_names import (
    COMPARISONS,
    DECISIONS,
    DISTANCE_LOSSES,
    DRAWS,
    LOSSES,
    STEP_FUNCTIONS,
    VIEWS,
    WEIGHT_LAYERS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from surefoot.watch.function_recorder import FunctionRecorder, RecordedCall
    from surefoot.watch.loss_calls import LossCalls
    from surefoot.watch.model_calls import Features, Held

MOST_HOOKED = 4_000
"""Larger graphs go without hooks on their nodes."""
_PAIRED = {
    "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    *DISTANCE_LOSSES, *COMPARISONS,
}  # fmt: skip


def chain(node: Any) -> list[str]:
    """The operations directly below a root, as far as there is a single path."""
    names = []
    for _ in range(12):
        if node is None:
            break
        names.append(graph.op(node))
        below = [n for n, _ in node.next_functions if n is not None]
        if len(below) != 1:
            break
        node = below[0]
    return names


def made_from(recorder: FunctionRecorder, entry: int) -> list[HistoryCall]:
    """The last calls that a loss was made from."""
    history = list(recorder.history(entry, 24))
    return [HistoryCall(site=e.site, shape=e.out_shape) for e in history]


def sign(recorder: FunctionRecorder, entry: int) -> LossSign | None:
    """Follow the loss back to its loss function, counting changes of sign and constant factors.

    A tensor divisor, such as the number of targets, counts as a constant factor.
    """
    factor = 1.0
    counts: list[Any] = []
    index = entry
    for _ in range(12):
        e = recorder.entries[index]
        if e.name in LOSSES:
            known = later(partial(_divided, factor), *counts)
            return LossSign(function=e.name, site=e.site, factor=known, index=e.index)
        if e.name in ("neg", "rsub"):
            factor = -factor
        elif e.name in ("mul", "div") and e.notes.constant is not None:
            factor *= e.notes.constant
        elif e.name == "div" and e.notes.divisor is not None:
            counts.append(e.notes.divisor)
        elif e.name not in ("mean", "sum", "add", "sub", "mul", "div", *VIEWS):
            return None
        ahead = [i for i in e.inputs if recorder.entries[i].out_grad]
        if len(ahead) != 1:
            return None
        index = ahead[0]
    return None


def _divided(factor: float, *counts: float) -> float | None:
    """The factor divided by all counts; `None` if a count is 0. The sign of the counts, which may vary, is ignored."""
    product = abs(math.prod(counts))
    return factor / product if product and math.isfinite(product) else None


def factor_of(recorder: FunctionRecorder, entry: int) -> float:
    """The product of the numbers that the loss was multiplied by right before backward."""
    factor = 1.0
    for _ in range(8):
        e = recorder.entries[entry]
        if e.notes.constant is not None:
            factor *= e.notes.constant
        elif e.name == "neg":
            factor = -factor
        elif e.name not in VIEWS:
            break
        ahead = [i for i in e.inputs if recorder.entries[i].out_grad]
        if len(ahead) != 1:
            break
        entry = ahead[0]
    return factor


def pair_rows(calls: LossCalls, held: list[Held]) -> InputTargetPairs | None:
    """A sample of inputs with their labels, if a model call and a loss of this step match."""
    if len(held) != 1 or held[-1].features is None:
        return None
    return pairs_of(calls, held[-1].features)


def pairs_of(calls: LossCalls, features: Features) -> InputTargetPairs | None:
    """Rows of a model's input with the targets of the last loss, if there are as many targets as rows.

    Where no loss function was called, the only difference between a prediction and a target stands for one.
    """
    by_hand = calls.differences if len(calls.differences) == 1 else []
    loss = calls.losses[-1] if calls.losses else by_hand[0] if by_hand else None
    if loss is None or (calls.losses and loss.op not in _PAIRED):
        return None
    target = calls.targets.get(loss.index)
    if target is None or target.shape.numel() != features.size:
        return None
    return later(_pairs, features.rows, target.few)


def _pairs(rows: Tensor, targets: Tensor) -> InputTargetPairs:
    features = rows if rows.is_floating_point() else _bags(rows)
    return InputTargetPairs(inputs=rounded_rows(5, features), targets=targets.tolist())


def _bags(ids: Tensor) -> Tensor:
    """How often each token id, modulo 64, occurs in each row; on the host."""
    folded = ids.long() % 64
    return torch.zeros(len(ids), 64, device="cpu").scatter_add_(1, folded, torch.ones_like(folded).float())


def breaks(recorder: FunctionRecorder, roots: list[BackwardCall]) -> list[GraphBreak]:
    """Where the gradient of a value was cut off or set to 0, and whether a loss was made from it.

    A result without a node is cut off even if it requires a gradient: `torch.tensor(loss, requires_grad=True)` does.
    """
    found = []
    ends = {number: root.entry for number, root in enumerate(roots) if root.entry is not None}
    under = {number: {entry.index for entry in recorder.history(end, 5000)} for number, end in ends.items()}
    reached = set().union(*under.values())
    for entry in recorder.entries:
        differentiates = entry.grad_enabled and entry.index in reached
        named = entry.name in BREAKS or (entry.name in DECISIONS and differentiates)
        is_copy = entry.parameters and not entry.inputs and entry.index not in reached  # of a weight: `state_dict()`
        is_cut = named and not entry.kind and not is_copy
        cut = is_cut or (entry.name in STEP_FUNCTIONS and differentiates) or entry.name in DRAWS
        dark = not entry.grad_enabled and entry.index in reached
        if (cut or dark) and any(entry.grads):
            found.append(
                GraphBreak(
                    op="no_grad" if dark and not cut else entry.name,
                    site=entry.site,
                    module=entry.module,
                    reaches_loss=entry.index in reached,
                    backward_calls=[number for number, below in under.items() if entry.index in below],
                    parameters=sorted(_upstream(recorder, entry))[:200],
                    drawn_for_layers=_feeds_layers(recorder, entry, reached) if entry.name in DRAWS else None,
                )
            )
    return found[:200]


def _feeds_layers(recorder: FunctionRecorder, draw: RecordedCall, reached: set[int]) -> bool:
    """Whether layers with weights use what was drawn, and have nothing else of what its distribution was made from.

    Noise is added to what it is made from, which keeps its gradient. And a density trains a distribution that cannot be
    differentiated, such as a policy's: its mean is subtracted from what was drawn, or from a target.
    """
    sources = {past.index for past in recorder.history(draw.index, 200)} - {draw.index}
    weights, means = _upstream(recorder, draw), set(draw.inputs)
    for past in recorder.history(draw.index, 20):
        means |= set(past.inputs) if past.index in means and past.name in VIEWS else set()
    drawn, beside, feeds = {draw.index}, sources, False
    for entry in recorder.entries:
        given = set(entry.inputs)
        if entry.index not in reached or entry.index in sources or entry.index == draw.index:
            continue
        if entry.name in _COMPARISONS and given & means and _compares_many(recorder, entry, means):
            return False
        if given & beside or weights.intersection(entry.parameters):
            beside = beside | {entry.index}
        if given & drawn:
            drawn.add(entry.index)
            if entry.name in WEIGHT_LAYERS and entry.parameters:
                if entry.index in beside:
                    return False
                feeds = True
    return feeds


_COMPARISONS = {"sub", "rsub", "gaussian_nll_loss", "mse_loss"}


def _compares_many(recorder: FunctionRecorder, entry: RecordedCall, means: set[int]) -> bool:
    """Whether means are compared with draws or targets; the mean of a prior is one number."""
    others = [recorder.entries[index] for index in entry.inputs if index not in means]
    if not others:
        return len(entry.grads) > len(entry.inputs)  # with a tensor that no recorded call has made
    return any(math.prod(other.out_shape or [1]) > 1 for other in others)


def _upstream(recorder: FunctionRecorder, entry: RecordedCall) -> set[int]:
    """The parameters that a value was computed from."""
    return {number for past in recorder.history(entry.index, 2000) for number in past.parameters}


class _KnownSum(NamedTuple):
    """The sum of a gradient, as long as autograd adds nothing to it in place."""

    tensor: weakref.ref[Tensor]
    version: int
    total: Tensor


class NodeHooks:
    """Records the gradients that the nodes of one backward receive and return."""

    def __init__(self, recorder: FunctionRecorder | None, safely: Callable[..., Any]) -> None:
        self._safely = safely
        self._recorder = recorder
        self._seen: list[tuple[str, int | None, list[Tensor], list[Tensor]]] = []
        self._known: dict[int, _KnownSum] = {}
        """The sums of gradients, by identity: most results of a node are what the next one receives."""

    def register(self, below: list[Any]) -> Iterator[Any]:
        """Add a hook to each node; returns the handles that remove them."""
        return (node.register_hook(self._hook_for(node)) for node in below)

    def _hook_for(self, node: Any) -> Callable[[Any, Any], None]:
        op = graph.op(node)
        entry = graph.number_of(node, self._recorder.mark) if self._recorder is not None else None

        def hook(made: Any, given: Any) -> None:
            if runs_eagerly():
                self._safely("backward", self._note, op, entry, given, made)

        return hook

    def _note(self, op: str, entry: int | None, given: Any, made: Any) -> None:
        with WithoutHooks():
            results = self._sums(made)
            if results:
                self._seen.append((op, entry, self._sums(given), results))

    def _sums(self, tensors: Any) -> list[Tensor]:
        found = []
        for tensor in tensors or ():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                total = self._sum(tensor)
                if total is not None:
                    found.append(total)
        return found

    def _sum(self, tensor: Tensor) -> Tensor | None:
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor and known.version == tensor._version:
            return known.total
        values = readable(tensor)
        if values is None:
            return None
        total = values.sum(dtype=torch.float32)
        self._known[id(tensor)] = _KnownSum(weakref.ref(tensor), tensor._version, total)
        return total

    def gradients_of(self, nodes: Mapping[int, int]) -> list[ResultGradient] | None:
        """The sum of the gradient for the results of some calls: by the numbers of their nodes, the index to record."""
        found = [
            later(partial(_result_gradient, nodes[entry]), given[0])
            for _, entry, given, _ in self._seen
            if entry is not None and entry in nodes and given
        ]
        return found or None

    def first_bad(self) -> NonFiniteNode | None:
        """The first node that turned finite gradients into non-finite ones."""
        seen, self._seen, self._known = self._seen, [], {}
        sums = [value for _, _, given, made in seen for value in (*given, *made)]
        if not sums:
            return None
        home = sums[0].device
        together = torch.stack([value if value.device == home else value.to(home) for value in sums])
        counted = [(op, entry, len(given), len(made)) for op, entry, given, made in seen]
        return later(partial(_first_bad, self._recorder, counted), torch.isfinite(together))


def _result_gradient(index: int, total: float) -> ResultGradient:
    return ResultGradient(index=index, total=total if math.isfinite(total) else None)


def _first_bad(
    recorder: FunctionRecorder | None, seen: list[tuple[str, int | None, int, int]], sums_finite: Tensor
) -> NonFiniteNode | None:
    flags = iter(sums_finite.tolist())
    for op, number, given, made in seen:
        was_finite, is_finite = (False not in [next(flags) for _ in range(count)] for count in (given, made))
        if was_finite and not is_finite:
            entry = recorder.entries[number] if recorder is not None and number is not None and number >= 0 else None
            return NonFiniteNode(
                op=op,
                call=entry.name if entry is not None else None,
                site=entry.site if entry is not None else "",
                module=entry.module if entry is not None else "",
            )
    return None
