"""`RunFacts`: everything that a run records for a diagnosis, and the parts that are not about one step or event.

Each recorder writes the parts that it observes. Parts that were not observed are empty or `None`, which is not
evidence: a rule that needs them makes no finding.
"""

from __future__ import annotations

from typing import NamedTuple

from surefoot.core.formats import FACTS
from surefoot.record.facts.calls import ModelCall, TensorSummary
from surefoot.record.facts.codec import Facts, item
from surefoot.record.facts.data import DrawnBatch, LoaderFacts, Permutation, StepDataFacts
from surefoot.record.facts.events import Event, NonFiniteLoss
from surefoot.record.facts.experiments import ExperimentFacts
from surefoot.record.facts.models import ModelFacts, ParameterFacts
from surefoot.record.facts.optimizers import ClippingFacts, LossScalerFacts, OptimizerFacts, SchedulerFacts, StepSeries
from surefoot.record.facts.preflight import PreflightFacts
from surefoot.record.facts.sampled_steps import EvaluationBlock, SampledStep

WHOLE_SCRIPT, STEPS_ONLY, TRAINING = "script", "steps", "training"


class Seeds(Facts):
    """At which steps each generator of random numbers was seeded."""

    torch: list[int] = item(factory=list)
    """`torch.manual_seed`."""
    python: list[int] = item(factory=list)
    """`random.seed`."""
    numpy: list[int] = item(factory=list)
    """`numpy.random.seed`."""


class PolicyEntropy(Facts):
    """The entropy of a policy whose log-probabilities were trained on."""

    step: int
    """The step."""
    backward: int
    """The number of backward calls so far."""
    entropy: float
    """The mean entropy, in nats."""
    actions: int
    """The number of actions."""


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


class PolicyDivergence(Facts):
    """The KL divergence of a learned distribution from a fixed one."""

    step: int
    """The step."""
    backward: int
    """The number of backward calls so far."""
    site: str
    """The line of the script."""
    kl: float
    """The mean divergence."""


class EvaluationPass(Facts):
    """One pass over a validation set: calls of a loss function without gradients, between two steps."""

    step: int
    """The number of steps that had been made."""
    number: int
    """Which of the passes after that step it is."""
    function: str
    """The loss function."""
    loss: float | None = item(null=True)
    """The mean over the rows."""
    rows: int
    """The number of rows that the predictions had."""
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


class GuardFacts(Facts):
    """What `surefoot run --guard` did."""

    checked: int
    """The number of steps that it checked."""
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
    """The torch function that raised, if its arguments are recorded."""
    arguments: CrashArguments | None = None
    """Its arguments."""
    locals: dict[str, TensorSummary] | None = None
    """The tensors among the local variables, if the arguments are not known."""
    computed: list[str] = item(factory=list)
    """Those among them that are results of recorded operations: they have no `.grad`."""
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


class RunFacts(Facts):
    """Everything that was observed in one run. Nothing in it is a judgement."""

    schema: int = FACTS.version
    """The version of the format."""
    scope: str = item(default=WHOLE_SCRIPT)
    """What was observed: `script`; `training` if nothing before it was; `steps` if only steps of optimizers were."""
    began_at: int = item(default=0)
    """The number of steps that the guard had counted when observation began, of a `training`."""
    steps: int = 0
    """The number of steps that were made; where optimizers take turns, one for each round."""
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
    """The sampled steps."""
    events: list[Event] = item(factory=list, always=True)
    """What happened, in order."""
    evaluations: list[ModelCall] = item(factory=list, always=True)
    """Calls of models without gradients, between the steps."""
    evaluation_calls: list[EvaluationBlock] = item(factory=list)
    """What was called in some of the blocks without gradients: losses, and what drops at random."""
    evaluation_passes: list[EvaluationPass] = item(factory=list)
    """The losses of evaluation passes."""
    evaluation_blocks: int = 0
    """How many blocks without gradients called a model, by the share of those that were watched."""
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
    """The batches that they returned."""
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
    source_lines: dict[str, str] = item(factory=dict)
    """The text of the lines of the script that the facts name, by file and line."""
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
