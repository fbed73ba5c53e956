"""`surefoot bisect` with a budget that is used up when a file appears, however fast the machine is.

python budgeted.py FILE bisect ...
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from surefoot.__main__ import main
from surefoot.experiments import baseline, bisect, trials
from surefoot.experiments import processes as children

FILE = sys.argv.pop(1)


class Time:
    """The clock that the budget is counted on."""

    sleep, strftime, time = time.sleep, time.strftime, time.time

    @staticmethod
    def monotonic() -> float:
        return time.monotonic() + 1e9 * os.path.exists(FILE)


bisect.LEAST_SECONDS = 1e6  # no experiment is ended because the machine is busy
for module in (baseline, bisect, children, trials):
    module.time = Time
sys.argv[0] = "surefoot"
main()
