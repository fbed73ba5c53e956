"""Where the command line begins. `run` is answered before anything is imported: the script's arguments are its own."""

from __future__ import annotations

import sys


def main() -> None:
    """Hand over to `surefoot run`, or to the other commands."""
    if sys.argv[1:2] == ["--version"]:
        from surefoot import __version__

        print(f"surefoot {__version__}")
        return
    if sys.argv[1:2] == ["run"]:
        from surefoot.launch.command import main as run

        run(sys.argv[2:])
    from surefoot.cli import main as answer

    answer()
