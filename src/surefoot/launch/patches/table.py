"""The table of `docs/run.md`: every function that `surefoot run` hears of or replaces, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.launch.guard import WHY_REPLICAS, WHY_STEP
from surefoot.launch.leaving import WHY

if TYPE_CHECKING:
    from surefoot.launch.patches.wrapping import Wrapping

HEARD = "heard of"
REPLACED = "replaced"


def table(wrapping: Wrapping) -> str:
    """As Markdown."""
    rows = [(held.name, HEARD, held.why) for held in wrapping.heard]
    rows.append(("os._exit", REPLACED, WHY))
    rows.append(("torch.optim.optimizer.Optimizer.profile_hook_step", f"{REPLACED} by `--guard`", WHY_STEP))
    rows.append(
        ("torch.nn.parallel.distributed.DistributedDataParallel.__init__", f"{HEARD} by `--guard`", WHY_REPLICAS)
    )
    lines = ["| function | | what is learned |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {how} | {why} |" for name, how, why in sorted(rows))])
