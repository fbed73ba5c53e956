"""Facts about sampled steps: what was called, what `backward` ran on, and what the optimizers did to the parameters."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.record.facts.calls import DropoutCall, LossCall, ModelCall, SampledCalls
from surefoot.record.facts.codec import Facts, item


def with_step(value: dict[str, object], kinds: Iterable[str]) -> dict[str, object]:
    """Facts as JSON has them, with their step in each call of the lists of these names."""
    step, dated = value.get("step"), dict(value)
    for kind in kinds:
        calls = value.get(kind)
        if isinstance(calls, list):
            dated[kind] = [{**each, "step": step} if isinstance(each, dict) else each for each in calls]
    return dated


class HistoryCall(Facts):
    """One of the last calls that a loss was made from."""

    site: str
    """The line of the script."""
    shape: list[int] | None = item(null=True)
    """The shape of its result."""


class LossSign(Facts):
    """The loss function that a loss came from, and what it was multiplied by on the way."""

    function: str
    """The name of the loss function."""
    site: str
    """The line of the script."""
    factor: float | None = item(null=True)
    """The product of all constant factors; `None` if it is not known."""
    index: int
    """Its place among the calls of the step."""


class LossTerm(Facts):
    """One term of a summed loss, and the gradient it brings."""

    site: str
    """The line of the script that made it."""
    op: str
    """The function that made it."""
    value: float
    """Its value."""
    norm: float
    """The norm of the gradient it brings."""
    loss: str | None = item(null=True)
    """The loss function it came from, if it came from one."""
    loss_site: str | None = item(null=True)
    """The line of the script that called the loss function."""
    loss_index: int | None = item(null=True)
    """The place of that call among the calls of the step."""


class Causality(Facts):
    """Whether outputs of a model whose targets are its inputs, perhaps later ones, depend on later inputs."""

    applies: bool
    """Whether it could be measured."""
    from_past: float | None = None
    """The gradient that the outputs of the first half have for inputs of the first half."""
    from_future: float | None = None
    """The gradient that the outputs of the first half have for inputs of the second half."""
    positions: int | None = None
    """The length of the sequence."""
    model: str
    """The name of the model."""
    site: str
    """The line of the script that called the loss function."""
    offset: int = item(default=1)
    """By how many positions the targets are ahead of the inputs."""


class RowMixing(Facts):
    """Outputs of a model depend on inputs of other rows of the batch."""

    model: str
    """The name of the model."""
    rows: int
    """The number of rows of the batch."""
    has_positions: bool
    """Whether each row of the input is a sequence, and has one target, not one for each position."""
    calls: list[str]
    """The functions from the last result with mixed rows to the first one with separate rows."""
    site: str
    """The line of the script that called the first of them."""
    module: str
    """The module that was running."""
    from_own: float | None = None
    """The gradient that outputs of the first half of the rows have for the earliest result, in the same rows."""
    from_others: float | None = None
    """The same for the other half of the rows. Both are `None` where the shapes alone show that rows are mixed."""
    shapes: list[list[int]] | None = None
    """What a reshape was given and what it returned, where these show it."""


class NonFiniteNode(Facts):
    """The first node of a backward pass that turned finite gradients into something else."""

    op: str
    """The kind of autograd node."""
    call: str | None = item(null=True)
    """The function that made the node, if it was recorded."""
    site: str
    """The line of the script; empty if it is not known."""
    module: str
    """The module that was running."""


class InputTargetPairs(Facts):
    """A sample of inputs with their targets."""

    inputs: list[list[float]] = item("x")
    """At most 64 rows of at most 64 features."""
    targets: list[float] = item("y")
    """The target of each row."""


class EvaluationBlock(Facts):
    """What was called in a block without gradients between two steps. Its model calls are `RunFacts.evaluations`."""

    block: int
    """Which block without gradients it is, as `ModelCall.block` counts them."""
    step: int
    """How many steps there had been."""
    losses: list[LossCall] = item(factory=list)
    """Calls of loss functions."""
    dropouts: list[DropoutCall] = item(factory=list)
    """Calls that dropped something at random."""
    pairs: InputTargetPairs | None = None
    """A sample of the inputs of its last model call, with their targets."""

    @classmethod
    def prepared(cls, value: dict[str, object]) -> dict[str, object]:
        """Calls carry the number of their step, which is written only once."""
        return with_step(value, ("losses", "dropouts"))


class ResultGradient(Facts):
    """The gradient of a loss for the result of a call, added up."""

    index: int
    """The place of the call among the calls of the step."""
    total: float | None = item(null=True)
    """The sum of the gradient; `None` if it is not finite."""


class BackwardCall(Facts):
    """A call of `backward`."""

    site: str
    """The line of the script."""
    value: float | None = item(null=True)
    """The loss; `None` if it was on a device and not read."""
    backward: int
    """Which backward of the run it is, counted from 1."""
    step: int
    """The step it belongs to."""
    optimizers: list[int] = item("for")
    """The optimizers that stepped with its gradients."""
    nodes: int
    """The size of the graph."""
    operations: list[str]
    """The autograd nodes under the loss, while there is only one way down."""
    custom: list[str]
    """The autograd functions of the script's own in the graph."""
    parameters: list[int]
    """The numbers of the parameters that the loss depends on."""
    entry: int | None = item(null=True)
    """The place of the call that made the loss among the calls of the step."""
    made_from: list[HistoryCall] | None = None
    """The last calls that the loss was made from, the last one first."""
    sign: LossSign | None = item(beside="made_from")
    """The loss function that the loss came from."""
    factor: float | None = None
    """What the loss was multiplied by, in plain numbers, right before backward."""
    pairs: InputTargetPairs | None = item(null=True)
    """A sample of inputs with their targets."""
    terms: list[LossTerm] | None = None
    """The terms of the loss, where they were asked for."""
    causality: Causality | None = None
    """Whether the model sees the future, where that was asked for."""
    row_mixing: RowMixing | None = None
    """Where the model mixes the rows of the batch, where that was asked for and it does."""
    nonfinite_node: NonFiniteNode | None = item("backward_nonfinite", default=None)
    """Where the gradients became non-finite."""
    output_gradients: list[ResultGradient] | None = None
    """For the first output of each model call, by its `index`; only where several optimizers work."""
    product_gradients: list[ResultGradient] | None = None
    """For each recorded product of a log-probability, with one number or several, by its `index`."""

    @classmethod
    def prepared(cls, value: dict[str, object]) -> dict[str, object]:
        """A loss that was not read was once written as the text of a tensor."""
        loss = value.get("value")
        return value | {"value": None} if isinstance(loss, str) and loss.startswith("tensor(") else value


class GraphBreak(Facts):
    """Where a value that gradients should flow through was cut off from its graph."""

    op: str
    """What cut it off: `detach`, `item`, …, or `no_grad`."""
    site: str
    """The line of the script."""
    module: str
    """The module that was running."""
    reaches_loss: bool
    """Whether a loss was made from the value."""
    backward_calls: list[int] = item("roots")
    """Which backward calls of the step went over a loss made from it, by their place in the list."""
    parameters: list[int]
    """The numbers of the parameters that the value was computed from."""
    drawn_for_layers: bool | None = None
    """For a draw from a distribution: whether layers use its result, and no density of the distribution does."""


class ParameterUpdate(Facts):
    """What one step did to one parameter."""

    parameter: int = item("id")
    """The number of the parameter."""
    grad: float | None = item(null=True)
    """The norm of its gradient; `None` if it had none."""
    zeros: float | None = None
    """The share of the gradient that is 0."""
    nonfinite: int | None = None
    """How many entries of the gradient are not finite."""
    largest: float | None = None
    """The largest absolute entry of the gradient."""
    weight: float | None = None
    """The norm of the parameter before the step."""
    root_second_moment: float | None = None
    """The root of the median second moment of an adaptive optimizer, corrected for its bias."""
    second_moment: float | None = None
    """The root of the mean second moment of an adaptive optimizer."""
    age: float | None = None
    """How many steps the optimizer's state has gathered."""
    update: float | None = None
    """The norm of the change."""
    ratio: float | None = item(beside="update")
    """The norm of the change over the norm of the parameter; `None` for a parameter of zeros."""
    stuck: float | None = None
    """The share of the entries that did not change."""


class PathSlopes(Facts):
    """The slopes of the loss along the way of the parameters from an earlier sampled step to this one."""

    since: int
    """The earlier step."""
    start: float
    """The gradient at the earlier step times the whole change since: negative where the way leads down."""
    end: float
    """The gradient at this step times the same change."""
    length: float
    """The norm of the change."""


class OptimizerUpdate(Facts):
    """One step of one optimizer."""

    optimizer: int
    """The number of the optimizer."""
    rows: list[ParameterUpdate]
    """What it did to each of its parameters."""
    lr: list[float]
    """The learning rate of each parameter group."""
    path: PathSlopes | None = None
    """The way from the last sampled step of this optimizer; `None` at the first."""
    as_left: float | None = None
    """The cosine between the gradient of a weight as the last of several backward calls left it and as it was used."""


class SampledStep(Facts):
    """Everything that was seen of one sampled step."""

    step: int
    """The number of the step."""
    model_calls: list[ModelCall] = item("passes", factory=list, always=True)
    """Calls of models."""
    backward_calls: list[BackwardCall] = item("roots", factory=list, always=True)
    """Calls of `backward`."""
    updates: list[OptimizerUpdate] = item("steps", factory=list, always=True)
    """Steps of optimizers."""
    calls: SampledCalls = item("notes", factory=SampledCalls, always=True)
    """Calls of torch functions."""
    breaks: list[GraphBreak] = item(factory=list, beside="operations")
    """Where the graph was cut."""
    operations: int | None = None
    """The number of calls that were recorded; `None` where none could be."""
    host_seconds: float | None = None
    """How long the host was busy with surefoot's code while the step was sampled."""
    eager: bool = item(default=False)
    """Whether compiled models ran eagerly in it (`--eager-looks`)."""

    @classmethod
    def prepared(cls, value: dict[str, object]) -> dict[str, object]:
        """Calls carry the number of their step, which is written only once."""
        notes = value.get("notes")
        if not isinstance(notes, dict):
            return value
        dated = with_step({**notes, "step": value.get("step")}, notes)
        return {**value, "notes": {kind: dated[kind] for kind in notes}}
