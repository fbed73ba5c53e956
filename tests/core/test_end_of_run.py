"""The package itself says how runs are concluded: layers below do not know."""

from __future__ import annotations

import surefoot
from surefoot.core import end_of_run


def test_importing_the_package_sets_how_runs_are_concluded():
    assert end_of_run.conclude is surefoot._conclude
