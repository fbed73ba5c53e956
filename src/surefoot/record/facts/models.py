"""Facts of models and their parameters."""

from __future__ import annotations

from surefoot.record.facts.codec import Facts, item


class ModuleFacts(Facts):
    """One part of a model."""

    path: str
    """Its path in the model; empty for the model itself."""
    type: str
    """The name of its class."""


class ModelFacts(Facts):
    """A model that was called."""

    name: str
    """The name of the variable that holds it."""
    type: str
    """The name of its class."""
    modules: list[ModuleFacts]
    """Its parts, at most 2000."""


class WeightScale(Facts):
    """The scale of a weight; of a sharded one, of the part in this process. Empty if it could not be read."""

    norm: float | None = None
    """Its norm."""
    largest: float | None = None
    """Its largest absolute entry."""
    std: float | None = None
    """Its standard deviation; only for matrices."""
    fan_in: int | None = None
    """The size of a row; only for matrices."""
    rows_equal: bool | None = None
    """Whether all rows are the same; only for matrices."""
    row_range: float | None = None
    """The norm of the differences between the largest and the smallest entry of each column; only for matrices."""


class ParameterFacts(Facts):
    """One leaf tensor that is, or should be, learned."""

    id: int
    """Its number."""
    shape: list[int]
    """Its sizes."""
    dtype: str
    """Its type, without `torch.`."""
    name: str = ""
    """Its name in its model, or that of the variable that holds it."""
    model: str = ""
    """The name of its model; empty if it has none."""
    module_type: str = ""
    """The class of the module that owns it."""
    registered: bool = True
    """Whether a module that was called owns it the regular way."""
    optimizers: list[int] = item(factory=list, always=True)
    """The numbers of the optimizers that hold it."""
    trained_by: list[int] = item(factory=list, always=True)
    """The numbers of the optimizers that have changed it."""
    loaded: bool = False
    """Whether a state was loaded into it."""
    rewritten: bool = False
    """Whether other values were put into it between its entry and its first update."""
    requires_grad: bool = True
    """Whether it requires a gradient."""
    first: WeightScale = item(factory=WeightScale, always=True)
    """Its scale before its first update."""
    last: WeightScale = item(factory=WeightScale, always=True)
    """Its scale after its last sampled update."""
    sampled: int = item(default=0, always=True)
    """The number of sampled steps in which an optimizer held it."""
    in_graph: int = 0
    """The number of sampled steps in which a loss depended on it."""
    used: int = 0
    """The number of sampled steps in which an operation took it."""
    with_grad: int = 0
    """The number of sampled updates in which it had a gradient."""
    zero_grad: int = 0
    """The number of sampled updates in which its gradient was 0."""
    changed: int = 0
    """The number of sampled updates in which it changed."""
    unchanged: int = 0
    """The number of sampled updates in which it did not."""
    moved_alone: int = 0
    """How often it changed between sampled steps although no optimizer holds it."""
    moves: list[float] = item(factory=list)
    """By how much, as a share of its norm, from one sampled step to the next."""
    along: list[float] = item(factory=list)
    """The cosine between such a change and the gradient before it; only of loops without an optimizer."""
    label: str
    """Its name, with its model's in front where there are several models."""
