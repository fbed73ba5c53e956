"""Print the table of `docs/run.md`: every function whose calls `surefoot run` observes, and why.

    python -m surefoot.watch.patches

A test compares the two, so that the table cannot be out of date.
"""

from surefoot.watch.patches import install
from surefoot.watch.patches.table import table
from surefoot.watch.watcher import Watcher

print(table(install(Watcher())))
