"""The table of `docs/run.md`: every function that `surefoot run` observes or replaces, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.watch.guard import WHY_REPLICAS
from surefoot.watch.process_exit import WHY

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks

OBSERVED = "observed"
REPLACED = "replaced"


def table(wrapping: Hooks) -> str:
    """As Markdown."""
    rows = [(held.name, OBSERVED, held.why) for held in wrapping.hooked]
    rows.append(("os._exit", REPLACED, WHY))
    rows.append(
        ("torch.nn.parallel.distributed.DistributedDataParallel.__init__", f"{OBSERVED} by `--guard`", WHY_REPLICAS)
    )
    lines = ["| function | | what is learned |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {how} | {why} |" for name, how, why in sorted(rows))])
