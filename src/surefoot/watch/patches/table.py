"""The table of `docs/run.md`: every function that `surefoot run` observes or replaces, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.watch.guard import WHY_REPLICAS
from surefoot.watch.process_exit import WHY
from surefoot.watch.replica_looks import COLLECTIVES, WHY_COLLECTIVES, WHY_WRAPPER

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks

OBSERVED = "observed"
REPLACED = "replaced"


def table(wrapping: Hooks) -> str:
    """As Markdown."""
    rows = [(held.name, OBSERVED, held.why) for held in wrapping.hooked]
    rows.append(("os._exit", REPLACED, WHY))
    wrapper = "torch.nn.parallel.distributed.DistributedDataParallel"
    rows.append((f"{wrapper}.__init__", f"{OBSERVED} by `--guard`", WHY_REPLICAS))
    rows.append((f"{wrapper}._pre_forward", OBSERVED, WHY_WRAPPER))
    rows.extend((f"torch.distributed.{name}", OBSERVED, WHY_COLLECTIVES) for name in COLLECTIVES)
    lines = ["| function | | what surefoot learns from it |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {how} | {why} |" for name, how, why in sorted(rows))])
