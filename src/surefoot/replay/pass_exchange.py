"""The JSON that a replay and the process of one pass exchange: the order of the pass, and its answer.

`processes` writes the order and reads the answer, `worker` reads the order and writes the answer. An answer has `error`
if its status is `failed`, and the other keys if it is `ran`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from surefoot.record.incidents.environment import Hardware, Switches, Versions
    from surefoot.record.incidents.summary import IncidentPrints
    from surefoot.replay.export.export import ReproductionData
    from surefoot.replay.locate.result import OriginData
    from surefoot.replay.tensor_difference import TensorDifference


class PassOrder(TypedDict):
    """What one pass is ordered to run."""

    incident: str
    """The folder of the incident."""
    script: str | None
    """The script that trains."""
    module: str | None
    """The module that trains, in place of a script."""
    arguments: list[str]
    """The arguments of the script or module."""
    target: str | None
    """`module:function`, in place of a script."""
    locate: bool
    """Whether to look for the first bad operation."""
    export: str | None
    """The folder for a reproduction, if one is wanted."""
    answer: str
    """The file that the answer is written to."""
    scratch: str
    """The folder that the pass may write to."""
    began: float
    """When the replay began, in seconds since the epoch: older files are the user's."""
    writable: list[str]
    """Other folders that the script may write to."""


class PassAnswer(TypedDict, total=False):
    """What one pass found."""

    status: Literal["failed", "ran"]
    """Whether the step was run."""
    notes: list[str]
    """What could not be done as recorded."""
    error: str
    """Why the step was not run."""
    prints: IncidentPrints
    """The fingerprints of losses, inputs and gradients."""
    differences: dict[str, TensorDifference]
    """How the gradients differ from the recorded ones, where those were kept."""
    versions: Versions
    """The versions of everything that computes."""
    hardware: Hardware
    """The device of the step, and the host's processor."""
    switches: Switches
    """The settings that decide which kernels run."""
    origin: OriginData | None
    """The first bad operation; `None` if every value is finite."""
    reproduction: ReproductionData
    """The script that was written, or why none was."""
