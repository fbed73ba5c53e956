"""What one of several ranks records so that the ranks can be compared later: `rank.jsonl`.

Each rank writes its own file and starts no collective. Ranks record the same steps, which are chosen by number
(`guard.model_sampling`), and compute the same fingerprints, which are equal if the bits are (`observe.fingerprints`).
"""

from __future__ import annotations

from surefoot.record.facts.codec import Facts, item
from surefoot.record.facts.optimizers import GroupSettings

WRAPPED, SHARDED, UNWRAPPED = "ddp", "sharded", "none"


class RankLoader(Facts):
    """A data loader that a rank iterates."""

    sampler: str
    """The class of its sampler."""
    rows: int | None = item(null=True)
    """The length of its dataset."""
    batch_size: int | None = item(null=True)
    """Its batch size."""


class RankSetup(Facts):
    """What a rank runs, at its first look."""

    rank: int
    """Its number."""
    world_size: int
    """The number of ranks."""
    initialized: bool = False
    """Whether `torch.distributed` was initialized."""
    torch: str = ""
    """The version of torch."""
    python: str = ""
    """The version of Python."""
    device: str = ""
    """The name of the device that it trains on."""
    code: dict[str, str] = item(factory=dict)
    """The script and the modules of its author, each with a hash of its text."""
    seed: int | None = None
    """What torch's generator was last seeded with."""
    loaders: list[RankLoader] = item(factory=list)
    """The data loaders."""


class RankOptimizer(Facts):
    """One optimizer of a rank, and which of its parameters can be compared."""

    number: int
    """Its number, in the order in which optimizers were made."""
    type: str
    """The name of its class."""
    site: str = ""
    """The line of the script that made it."""
    settings: list[GroupSettings] = item(factory=list)
    """The settings of its first eight parameter groups, at the first look."""
    parallel: str = UNWRAPPED
    """`ddp` if DistributedDataParallel averages its gradients, `sharded` if each rank holds a part of a parameter."""
    members: list[int] | None = None
    """The ranks of DDP's process group; `None` for all."""
    names: list[str] = item(factory=list)
    """Its parameters that every rank holds whole, in their order."""
    elements: int = 0
    """How many numbers these are."""
    layout: str = ""
    """A hash of their shapes and types."""
    has_own_hook: bool = False
    """Whether DDP has a communication hook that need not make gradients equal on all ranks."""


class Fingerprints(Facts):
    """The fingerprints of the parameters of one optimizer, or of their gradients or moments."""

    total: str
    """One for all of them together."""
    each: str = ""
    """One of 32 bits for each, in base64; empty if they were not kept."""


class ReplicaLook(Facts):
    """One optimizer at one step, before it steps unless said otherwise."""

    step: int
    """The step of the run."""
    optimizer: int
    """The number of the optimizer."""
    backwards: int
    """How many backwards there have been."""
    lr: list[float | None] = item(factory=list)
    """The learning rate of each of its first eight parameter groups."""
    parameters: Fingerprints
    """The parameters."""
    gradients: Fingerprints
    """Their gradients, as the step uses them."""
    moments: Fingerprints
    """The optimizer's state."""
    after: str | None = None
    """The parameters after the step: the total."""
    next: str | None = None
    """The parameters before the following step: the total."""
    has_gradients: bool = True
    """Whether any gradient is other than 0."""
    scale: float | None = None
    """The loss scale."""
    skips: int = 0
    """How many steps a gradient scaler has skipped."""
    inputs: int | None = None
    """A fingerprint of the inputs of the last backward."""
    targets: int | None = None
    """A fingerprint of its targets."""
    wrapper_called: bool | None = None
    """Whether the forward of DDP has ever run; `None` without DDP."""
    synchronized: bool | None = None
    """Whether the last forward of DDP asked for gradients to be averaged; `None` without DDP."""
    unsynchronized_steps: int = 0
    """How many steps so far, up to this one, followed a forward of DDP that did not ask for averaged gradients."""
    gradients_changed: bool | None = None
    """Whether averaged gradients were changed in place between the backward and the step; `None` if not known."""
    uneven: bool = False
    """Whether ranks may have taken different numbers of steps: DDP's `join()` is active, or was."""
    communicated: int = 0
    """How many numbers the script itself has sent through collectives so far."""
