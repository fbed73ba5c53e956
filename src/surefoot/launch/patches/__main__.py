"""Print the table of `docs/run.md`: every function that `surefoot run` hears of, and why.

    python -m surefoot.launch.patches

A test compares the two, so that the table cannot be out of date.
"""

from surefoot.launch.patches import install
from surefoot.launch.patches.table import table
from surefoot.launch.watcher import Watcher

print(table(install(Watcher())))
