"""Print the table of `docs/run.md`: every function that `surefoot run` observes or replaces, and why.

    python -m surefoot.watch.patches.table

A test compares the two, so that the table cannot be out of date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.watch.guard import WHY_REPLICAS
from surefoot.watch.process_exit import WHY
from surefoot.watch.replica_looks import COLLECTIVES, WHY_COLLECTIVES, WHY_WRAPPER

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks

_SPAWNED = "in a spawned process: "
_SPAWNING = (
    ("torch.multiprocessing.spawn.start_processes", "which processes the script spawns"),
    ("multiprocessing.spawn.get_preparation_data", "a process of `start_processes` also gets the options of the run"),
    ("torch.multiprocessing.spawn._wrap", f"{_SPAWNED}how its function ends"),
    ("torch.distributed.init_process_group", f"{_SPAWNED}when it is connected with others"),
    ("traceback.format_exc", f"{_SPAWNED}frames of surefoot are removed from the traceback that the parent gets"),
)
"""See `commands.spawned_run`."""
OBSERVED = "observed"
REPLACED = "replaced"


def table(wrapping: Hooks) -> str:
    """As Markdown."""
    rows = [(held.name, OBSERVED, held.why) for held in wrapping.hooked]
    rows.append(("os._exit", REPLACED, WHY))
    wrapper = "torch.nn.parallel.distributed.DistributedDataParallel"
    rows.append((f"{wrapper}.__init__", f"{OBSERVED} by `--guard`", WHY_REPLICAS))
    rows.append((f"{wrapper}._pre_forward", OBSERVED, WHY_WRAPPER))
    rows.extend((name, OBSERVED, why) for name, why in _SPAWNING)
    rows.extend((f"torch.distributed.{name}", OBSERVED, WHY_COLLECTIVES) for name in COLLECTIVES)
    lines = ["| function | | what surefoot learns from it |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {how} | {why} |" for name, how, why in sorted(rows))])


if __name__ == "__main__":
    from surefoot.watch.patches import install
    from surefoot.watch.watcher import Watcher

    print(table(install(Watcher())))
