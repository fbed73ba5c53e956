"""Diagnosis: the catalogue of causes, and the rules that find them.

The package can be called: `surefoot.diagnose(folder)` returns the diagnosis of a recorded run. The function and the
package have the same name, and Python sets `surefoot.diagnose` to the package when any of its modules is imported; so
the package itself is callable.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.diagnose.findings import Diagnosis


class _CallablePackage(ModuleType):
    def __call__(self, folder: str | Path) -> Diagnosis:
        """Diagnose the run that was recorded in a folder. Returns the result of `surefoot diagnose` as an object.

        Raises `UsageError` if it is not the folder of a run.
        """
        from surefoot.diagnose.engine import diagnose_folder

        return diagnose_folder(folder)


sys.modules[__name__].__class__ = _CallablePackage
