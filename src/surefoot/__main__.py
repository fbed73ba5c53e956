"""The command line, also as `python -m surefoot`.

`run` is handled before anything else is imported: the script's arguments belong to the script.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Call `surefoot run`, or one of the other commands."""
    if sys.argv[1:2] == ["--version"]:
        from surefoot.core.version import VERSION

        print(f"surefoot {VERSION}")
        return
    if sys.argv[1:2] == ["run"]:
        from surefoot.commands.run import main as run

        run(sys.argv[2:])
    from surefoot.cli import main as answer

    answer()


if __name__ == "__main__":
    main()
