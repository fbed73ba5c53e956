"""`RunFacts`: everything a run leaves for a diagnosis, and the parts that are not about one step or one moment.

Whoever records a run writes the parts it can see. What was not observed is empty or `None`, which is no evidence: a
rule that needs it stays silent.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from surefoot.core.formats import FACTS
from surefoot.record.facts.calls import ModelCall, TensorSummary
from surefoot.record.facts.codec import Facts, item
from surefoot.record.facts.events import Event, NonFiniteLoss
from surefoot.record.facts.preflight import PreflightFacts
from surefoot.record.facts.sampled_steps import EvaluationBlock, SampledStep

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


WHOLE_SCRIPT, STEPS_ONLY = "script", "steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFacts(Facts):
    """One part of a model, and the settings that matter for a diagnosis."""

    path: str
    """Its path in the model; empty for the model itself."""
    type: str
    """The name of its class."""
    p: float | None = None
    """The probability of dropout."""
    dropout: float | None = None
    """The dropout of a recurrent layer or of attention."""
    eps: float | None = None
    """The epsilon of a normalization layer."""
    num_features: int | None = None
    """The width of a batch norm."""
    bidirectional: bool | None = None
    """Whether a recurrent layer runs in both directions."""
    num_embeddings: int | None = None
    """The rows of an embedding table."""
    momentum: float | None = None
    """The momentum of running statistics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts(Facts):
    """A model that was called."""

    name: str
    """The name of the variable that holds it."""
    type: str
    """The name of its class."""
    modules: list[ModuleFacts]
    """Its parts, at most 2000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightScale(Facts):
    """The scale of a weight; of a sharded one, of the part in this process. Empty if it could not be read."""

    norm: float | None = None
    """Its norm."""
    largest: float | None = None
    """Its largest absolute entry."""
    std: float | None = None
    """Its standard deviation; of matrices only."""
    fan_in: int | None = None
    """The size of a row; of matrices only."""
    rows_equal: bool | None = None
    """Whether all rows are the same; of matrices only."""


@dataclass(frozen=True, kw_only=True, slots=True)
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
    found_in: str = ""
    """For one that is not registered: the attribute that holds it."""
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
    """In how many sampled steps an optimizer held it."""
    in_graph: int = 0
    """In how many sampled steps a loss depended on it."""
    used: int = 0
    """In how many sampled steps an operation took it."""
    with_grad: int = 0
    """In how many sampled updates it had a gradient."""
    zero_grad: int = 0
    """In how many sampled updates its gradient was 0."""
    changed: int = 0
    """In how many sampled updates it changed."""
    unchanged: int = 0
    """In how many sampled updates it did not."""
    moved_alone: int = 0
    """How often it changed between sampled steps although no optimizer holds it."""
    label: str
    """Its name, with its model's in front where there are several models."""


Setting = bool | int | float | str | list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings(Facts):
    """The settings of one parameter group, as the optimizer was given them."""

    values: dict[str, Setting] = item(whole=True)
    """Every setting that is a number, text, or a list of numbers."""

    @classmethod
    def of(cls, group: Mapping[str, object]) -> GroupSettings:
        """The settings of a parameter group of torch that JSON can hold."""
        known = {key: _simple(value) for key, value in group.items() if key != "params"}
        return cls(values={key: value for key, value in known.items() if value is not None})

    def number(self, name: str) -> float | None:
        """A setting that is a number."""
        value = self.values.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def lr(self) -> float | None:
        """The learning rate."""
        return self.number("lr")

    @property
    def initial_lr(self) -> float | None:
        """The learning rate that a scheduler began with."""
        return self.number("initial_lr")

    @property
    def eps(self) -> float | None:
        """What the second moment is kept away from 0 by."""
        return self.number("eps")

    @property
    def momentum(self) -> float | None:
        """The momentum of SGD and RMSprop."""
        return self.number("momentum")

    @property
    def weight_decay(self) -> float | None:
        """The weight decay."""
        return self.number("weight_decay")

    @property
    def betas(self) -> list[float] | None:
        """The decay rates of the moments."""
        value = self.values.get("betas")
        return value if isinstance(value, list) else None

    @property
    def maximize(self) -> bool:
        """Whether the loss is maximized."""
        return bool(self.values.get("maximize"))


def _simple(value: object) -> Setting | None:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value):
        return list(value)
    if getattr(value, "ndim", None) == 0 or getattr(value, "shape", None) == (1,):  # a learning rate may be a tensor
        return float(value)  # type: ignore[arg-type]
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeries(Facts):
    """One number per step, in columns. A column is empty if no step had the number, and `None` where one had not.

    Of a long run the middle is thinned: the first thousand and the last two thousand steps are complete.
    """

    grad_norm: list[float | None] = item(factory=list)
    """The norm of the gradients before clipping."""
    skipped: list[bool | float | None] = item(factory=list)
    """Whether the guard skipped the step."""
    closure: list[int | None] = item(factory=list)
    """How often the step evaluated its closure."""
    loss: list[float | None] = item(factory=list)
    """The loss."""
    backwards: list[int | None] = item(factory=list)
    """How many backwards there were since the step before."""
    lr: list[float | None] = item(factory=list)
    """The learning rate of the first parameter group."""
    clip_norm: list[float | None] = item(factory=list)
    """The norm, or the largest entry, that clipping found."""
    clip_limit: list[float | None] = item(factory=list)
    """The limit of clipping."""
    clip_by_value: list[bool | None] = item(factory=list)
    """Whether entries were clipped, not the norm."""
    scale: list[float | None] = item(factory=list)
    """The loss scale."""
    roots: list[int | None] = item(factory=list)
    """How many different lines called `backward`."""
    at: list[int | None] = item(factory=list)
    """The step of the run."""
    step: list[int] = item(factory=list)
    """The step of the optimizer."""
    leftover: list[float | None] = item(factory=list)
    """Which share of the parameters still had a gradient when backward ran."""

    def without(self, steps: Container[int]) -> StepSeries:
        """The columns without the rows of some steps."""
        rows = [row for row, step in enumerate(self.step) if step not in steps]
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return StepSeries(**{name: [column[row] for row in rows] for name, column in columns.items() if column})


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts(Facts):
    """One optimizer: its settings and the numbers of its steps."""

    number: int
    """Its number, in the order in which optimizers were made."""
    type: str
    """The name of its class."""
    site: str = ""
    """The line of the script that made it."""
    settings: list[GroupSettings] = item(factory=list, always=True)
    """The settings of its first eight parameter groups."""
    steps: int
    """How many steps it made."""
    created_at_step: int = item(default=0, always=True)
    """The step of the run at which it was made."""
    state_loaded_at_step: int | None = item(null=True)
    """How many steps it had made when a state was loaded into it."""
    loaded_state_steps: float | None = item(null=True)
    """How many steps that state had gathered."""
    backward_lines: list[int] = item("lines", factory=list, always=True)
    """The lines of `backward` whose gradients it stepped with, as `StepBatch.line` counts them."""
    zeroed_before_step: int = 0
    """How often gradients were zeroed between backward and step."""
    zero_site: str = ""
    """The line of the script that did so."""
    series: StepSeries = item(factory=StepSeries, always=True)
    """The numbers of its steps."""

    @property
    def first_group(self) -> GroupSettings:
        """The settings of its first parameter group; empty if they are not known."""
        return self.settings[0] if self.settings else GroupSettings(values={})


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerFacts(Facts):
    """A learning-rate scheduler."""

    type: str
    """The name of its class."""
    site: str
    """The line of the script that made it."""
    steps: int
    """How often it was stepped."""
    last_epoch: int
    """How far it counts."""
    optimizer: int | None = item(beside="settings")
    """The number of its optimizer."""
    settings: dict[str, bool | int | float] | None = None
    """Its numbers, as they were when it was first stepped; `None` if it never was."""

    @property
    def cosine_period(self) -> float | None:
        """After how many steps a cosine schedule reaches its floor."""
        return (self.settings or {}).get("T_max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seeds(Facts):
    """At which steps each generator of random numbers was seeded."""

    torch: list[int] = item(factory=list)
    """`torch.manual_seed`."""
    python: list[int] = item(factory=list)
    """`random.seed`."""
    numpy: list[int] = item(factory=list)
    """`numpy.random.seed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch(Facts):
    """What one backward was trained on, read off its graph."""

    step: int
    """The step."""
    backward: int
    """Which backward of the run it is."""
    line: int
    """Which line that calls `backward` it is, in the order of their first call."""
    input_print: int | None = item("x", default=None)
    """A fingerprint of the inputs."""
    size: int | None = None
    """Number of rows."""
    input_largest: float | None = item("x_largest", default=None)
    """The largest absolute input."""
    target_print: int | None = item("y", default=None)
    """A fingerprint of the targets."""
    labels: dict[str, int] | None = None
    """How often each label occurs."""
    target_mean: float | None = item("y_mean", default=None)
    """The mean of the targets."""
    target_std: float | None = item("y_std", default=None)
    """The standard deviation of the targets."""
    target_largest: float | None = item("y_largest", default=None)
    """The largest absolute target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRows(Facts):
    """Every row that was trained on from one line that calls `backward`."""

    prints: list[int]
    """A fingerprint of each row."""
    first: list[int]
    """The backward at which it was first seen."""
    whole: bool
    """Whether every row is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDataFacts(Facts):
    """What the steps were trained on."""

    batches: list[StepBatch] = item("notes", factory=list, always=True)
    """The data of each backward, at most 1200."""
    rows: dict[str, SeenRows] = item(factory=dict, always=True)
    """The rows, by the number of the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation(Facts):
    """A permutation that rows were picked by, at the first sampled step that saw it."""

    step: int
    """The step."""
    length: int
    """Its length."""
    fingerprint: int = item("print")
    """A number that equal permutations share."""
    number: int
    """Which permutation of the run it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippingFacts(Facts):
    """One of the first calls that clip gradients."""

    step: int
    """The step."""
    site: str
    """The line of the script."""
    limit: float | None = item(null=True)
    """The limit."""
    by_value: bool = item(default=False)
    """Whether entries are clipped, not the norm."""
    scaled: bool | None = None
    """Whether the gradients still carried the loss scale; of clipping by norm."""
    scale: float | None = item(beside="scaled")
    """The loss scale; of clipping by norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderFacts(Facts):
    """A data loader that was iterated."""

    number: int
    """Its number."""
    batch_size: int | None = item(null=True)
    """Its batch size."""
    sampler: str
    """The class of its sampler."""
    shuffles: bool
    """Whether the sampler means to give another order every time."""
    workers: int
    """Number of worker processes."""
    rows: int | None = item(null=True)
    """The length of its dataset."""
    batches: int | None = item(null=True)
    """Its own length."""
    iterations: int
    """How often it was iterated."""
    drawn: int
    """How many batches were drawn."""
    site: str
    """The line of the script that iterates it."""
    training: bool
    """Not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnBatch(Facts):
    """A batch that a data loader handed out."""

    loader: int
    """The number of the loader."""
    iteration: int
    """Which iteration of the loader it is from, counted from 1."""
    step: int
    """The step."""
    backward: int
    """How many backwards there had been."""
    size: int
    """Number of rows."""
    fingerprint: int = item("print")
    """A number that equal batches share."""
    grad_mode: bool = item("grad")
    """Whether gradients were enabled."""
    labels: dict[str, int] | None = None
    """How often each label occurs."""
    target_mean: float | None = None
    """The mean of the targets."""
    target_std: float | None = None
    """The standard deviation of the targets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScalerFacts(Facts):
    """What a gradient scaler did. Empty if there is none."""

    enabled: bool = item(default=False)
    """Whether it scales."""
    scaled_now: bool | None = None
    """Whether gradients carried the scale at the end."""
    scale: float | None = None
    """The last scale."""
    unscale_by: float | None = item(beside="enabled")
    """What gradients still have to be divided by."""
    clipped_scaled: int = item(default=0)
    """How often gradients were clipped while they carried the scale."""
    clip_site: str | None = None
    """The line of the script that did so."""
    attempts: int = item(default=0)
    """How many steps it was asked for."""
    made_at: list[int] | None = None
    """How many there had been whenever another scaler was first used, at most 64 times."""
    skips: int = item(default=0)
    """How many steps it skipped."""
    skip_steps: list[int] = item(factory=list)
    """Which ones, at most the last 500."""
    trace: list[float] = item(factory=list)
    """The scale after each step; of a long run the middle is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyEntropy(Facts):
    """The entropy of a policy whose log-probabilities were trained on."""

    step: int
    """The step."""
    backward: int
    """How many backwards there had been."""
    entropy: float
    """The mean entropy, in nats."""
    actions: int
    """Number of actions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySignal(Facts):
    """A number about a policy that its trainer has computed and logged."""

    step: int
    """The step that it was logged with."""
    kind: str
    """What it says: a value of `record.policy_signals.KINDS`."""
    name: str
    """Its name in the log."""
    value: float
    """The number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyDivergence(Facts):
    """The KL divergence of a learned distribution from a fixed one."""

    step: int
    """The step."""
    backward: int
    """How many backwards there had been."""
    site: str
    """The line of the script."""
    kl: float
    """The mean divergence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPass(Facts):
    """One pass over a validation set: calls of a loss function without gradients, between two steps."""

    step: int
    """How many steps had been made."""
    number: int
    """Which of the passes after that step it is."""
    function: str
    """The loss function."""
    loss: float | None = item(null=True)
    """The mean over the rows."""
    rows: int
    """How many rows the predictions had."""
    calls: int
    """How many calls there were."""


class RetainedGraphs(NamedTuple):
    """How many graphs of earlier steps were still held."""

    step: int
    """The step."""
    alive: int
    """How many are held."""
    made: int
    """Of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardFacts(Facts):
    """What `surefoot run --guard` did."""

    checked: int
    """How many steps it checked."""
    skipped: int
    """How many it skipped."""
    first: int | None = item(null=True)
    """The first skipped step."""
    last: int | None = item(null=True)
    """The last skipped step."""
    parameters: list[str]
    """The parameters whose gradients were not finite."""
    reasons: list[str] = item(factory=list, always=True)
    """Other reasons, in words."""
    not_guarded: dict[str, str]
    """The optimizers it could not guard, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentDevices(Facts):
    """What an experiment saw of the optimizers."""

    devices: list[str]
    """The kinds of devices that parameters are on."""
    has_state: bool
    """Whether an optimizer keeps tensors."""
    dtypes: list[str]
    """The types of the parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinuedStep(Facts):
    """One step of a run that continues from an incident; the first is the captured step."""

    loss: float | None = item(null=True)
    """Its loss; the mean of its microbatches."""
    grad_norm: float | None = item(null=True)
    """Its gradient norm; `None` if a loss scaler skipped the step."""
    lr: float | None = item(null=True)
    """Its learning rate; `None` if a loss scaler skipped the step."""
    applied: bool
    """Whether the optimizer applied it."""
    skipped: bool
    """Whether the experiment skipped it on purpose."""
    captured_rows: int | None = None
    """With other batches: how many rows of the captured batch could not be replaced in this step's batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedBatch(Facts):
    """The batch of the captured step."""

    nonfinite: int
    """How many of its values are not finite."""
    handed_out: bool = item(default=False, always=True)
    """Whether the batch itself was captured; otherwise only the inputs of the model were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedDraws(Facts):
    """The captured step, repeated with other random numbers."""

    random: bool = item(default=False, always=True)
    """Whether the step draws random numbers."""
    tries: int = item(default=0, always=True)
    """How many other draws were tried."""
    failed: int = item(default=0, always=True)
    """With how many of them the step failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailingRows(Facts):
    """Which rows of the captured batch fail."""

    of: int = item(default=0, always=True)
    """How many rows the batch has."""
    tries: int = item(default=0, always=True)
    """How many parts of it were tried."""
    draws: RepeatedDraws = item(factory=RepeatedDraws, always=True)
    """What other random numbers change."""
    ahead: bool = item(default=False, always=True)
    """Whether the script draws batches ahead of their steps, so that a failure cannot be assigned to a part."""
    fails: bool | None = item(null=True)
    """Whether the whole batch fails; `None` if it was not tried."""
    single: list[int] = item(factory=list, always=True)
    """Rows that fail alone."""
    together: list[list[int]] = item(factory=list, always=True)
    """First and last row of each part that fails only as a whole."""
    everywhere: bool = item(default=False, always=True)
    """Whether every part fails."""
    done: bool = item(default=False, always=True)
    """Whether the search came to its end."""
    microbatch: int | None = item(null=True)
    """Which microbatch was searched, if the step had several."""
    narrowed: list[int] | None = None
    """First and last row of the part that failed last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentFacts(Facts):
    """The change that `surefoot bisect` or `surefoot replay --experiments` made to the run."""

    change: str | None = item(null=True)
    """Its name."""
    acted: int = item(default=0, always=True)
    """How often it was made."""
    problem: str | None = item(null=True)
    """Why it could not be made; empty if it could."""
    notes: list[str] = item(factory=list, always=True)
    """What is worth knowing about it."""
    skipped: list[int] = item(factory=list, always=True)
    """The steps it left out."""
    refused: str | None = item(null=True)
    """Why it does not apply."""
    outside: list[str] = item(factory=list, always=True)
    """Files that the script made outside of the scratch folder."""
    ended: str | None = item(null=True)
    """Why the run was ended early; empty if it was not."""
    seen: ExperimentDevices | None = item(null=True)
    """What it saw of the optimizers."""
    trail: list[ContinuedStep] | None = None
    """After an incident: the steps of the run, the captured one first."""
    open: list[float] | None = None
    """After an incident: the losses of the step that was not complete when the run ended."""
    state: dict[str, int] | None = None
    """After an incident: how many values of each weight were not finite before the captured step."""
    batch: CapturedBatch | None = None
    """After an incident: the captured batch."""
    rows: FailingRows | None = None
    """After an incident, with a search for rows: what it found."""
    why_not: str | None = None
    """After an incident: why the change does not apply to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashArguments(Facts):
    """The arguments of the torch function that raised."""

    input: TensorSummary | None = None
    """Its input."""
    target: TensorSummary | None = None
    """Its target."""
    weight: TensorSummary | None = None
    """Its weight."""
    tensor: TensorSummary | None = None
    """The argument called `tensor`."""
    indices: TensorSummary | None = None
    """The argument called `indices`."""
    ignore_index: int | None = None
    """The label that is left out."""
    num_classes: int | None = None
    """The number of classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashFacts(Facts):
    """The error that ended the script."""

    type: str
    """The name of its class."""
    message: str
    """Its message."""
    site: str | None = None
    """The line of the script."""
    function: str | None = None
    """The function of the script."""
    call: str | None = None
    """The torch function that raised, if it is one whose arguments are looked at."""
    arguments: CrashArguments | None = None
    """Its arguments."""
    locals: dict[str, TensorSummary] | None = None
    """The tensors among the local variables, if the arguments are not known."""
    step: int | None = None
    """The step of the call that failed, where it is known from before: that of an error of a device."""
    reported_at: str | None = None
    """The line that raised, where it is not the one that failed: a device reports its errors later."""
    table: str | None = None
    """The parameter that was looked up."""
    indices: str | None = None
    """The variable that holds the ids or labels."""
    calls_checked: int | None = None
    """How many of the last calls had ids or labels that fit, of an error of a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldMemory(Facts):
    """Memory of an accelerator after a step, as torch's allocator counts it."""

    step: int
    """The step."""
    device: str
    """The device, as torch prints it."""
    allocated: float
    """Bytes that tensors hold."""
    peak: float
    """The most that they have held so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleMemory(Facts):
    """Memory of an accelerator that the calls of one module take in a sampled step, as torch's allocator counts it."""

    step: int
    """The step."""
    device: str
    """The device, as torch prints it."""
    module: str
    """The path of the module."""
    held: float
    """Bytes that were held when it was left and not when it was entered; what the modules inside left is theirs."""
    peak: float
    """The most that the whole process was seen to hold while it ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts(Facts):
    """Everything that was observed in one run. Nothing in it is a judgement."""

    schema: int = FACTS.version
    """The version of the format."""
    scope: str = item(default=WHOLE_SCRIPT)
    """What was observed: `script`, or `steps` where only the steps of optimizers were."""
    steps: int = 0
    """How many steps were made; where optimizers take turns, one for each round."""
    backwards: int = 0
    """How many backwards there were."""
    trainer: str | None = None
    """The library whose training loop the script calls: `transformers`, `lightning` or `accelerate`."""
    models: list[ModelFacts] = item(factory=list, always=True)
    """The models that were called."""
    parameters: list[ParameterFacts] = item(factory=list, always=True)
    """The parameters, by number."""
    optimizers: list[OptimizerFacts] = item(factory=list, always=True)
    """The optimizers, in the order in which they were made."""
    updated_by_hand: list[int | None] = item("manual", factory=list, always=True)
    """The parameters of a loop without an optimizer, by number."""
    backward_series: StepSeries = item(factory=StepSeries, always=True)
    """The numbers of the backwards before the first step, and of a loop without an optimizer."""
    schedulers: list[SchedulerFacts] = item(factory=list, always=True)
    """The learning-rate schedulers."""
    sampled_steps: list[SampledStep] = item(factory=list, always=True)
    """The steps that were looked at closely."""
    events: list[Event] = item(factory=list, always=True)
    """What happened, in order."""
    evaluations: list[ModelCall] = item(factory=list, always=True)
    """Calls of models without gradients, between the steps."""
    evaluation_calls: list[EvaluationBlock] = item(factory=list)
    """What was called in some of the blocks without gradients: losses, and what drops at random."""
    evaluation_passes: list[EvaluationPass] = item(factory=list)
    """The losses of evaluation passes."""
    evaluation_blocks: int = 0
    """How many blocks without gradients there were."""
    seeds: Seeds | None = None
    """Which generators were seeded; `None` if that was not observed."""
    reseeds: dict[str, list[int]] = item(factory=dict, always=True)
    """The steps of each call that seeds, by generator, seed and line."""
    step_data: StepDataFacts = item("stream", factory=StepDataFacts, always=True)
    """What the steps were trained on."""
    permutations: list[Permutation] = item(factory=list, always=True)
    """The permutations that rows were picked by."""
    clippings: list[ClippingFacts] = item("clips", factory=list, always=True)
    """The first calls that clip gradients."""
    loaders: list[LoaderFacts] = item(factory=list, always=True)
    """The data loaders."""
    batches: list[DrawnBatch] = item(factory=list, always=True)
    """The batches that they handed out."""
    loss_scaler: LossScalerFacts = item("scaler", factory=LossScalerFacts, always=True)
    """What a gradient scaler did."""
    policy_entropies: list[PolicyEntropy] = item("policy", factory=list, always=True)
    """The entropy of a policy over the run."""
    policy_divergences: list[PolicyDivergence] = item("divergences", factory=list, always=True)
    """The divergence of a policy from a fixed one over the run."""
    policy_signals: list[PolicySignal] = item(factory=list)
    """What a trainer of policies has logged, as TRL does."""
    retained_graphs: list[RetainedGraphs] = item("retained", factory=list, always=True)
    """How many graphs of earlier steps were still held, over the run."""
    held_memory: list[HeldMemory] = item(factory=list)
    """Memory of accelerators after some of the steps."""
    module_memory: list[ModuleMemory] = item(factory=list)
    """Memory of accelerators that modules took in the sampled steps: of each, the largest."""
    compiled: bool = False
    """Whether a model was compiled: the operations inside it were not observed, or only in sampled steps."""
    eager_looks: bool = item(default=False)
    """Whether compiled models were to run eagerly in sampled steps (`--eager-looks`), which changes bits."""
    problems: dict[str, str] = item(factory=dict, always=True)
    """What is no longer observed, and why."""
    guard: GuardFacts | None = item("guarded", default=None)
    """What `--guard` did; `None` without it."""
    experiment: ExperimentFacts | None = None
    """The change that `surefoot bisect` made; `None` without one."""
    crash: CrashFacts | None = None
    """The error that ended the script; `None` if there was none."""
    discarded_loss: NonFiniteLoss | None = item("bad_loss", default=None)
    """A non-finite loss that the script gave up on before calling `backward`."""
    preflight: PreflightFacts | None = None
    """What the doctor measured besides; `None` if the run is not one of its copies."""
