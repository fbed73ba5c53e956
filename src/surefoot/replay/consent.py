"""What may be run again: only what the user has named, and nothing that came with the incident.

An incident may come from a stranger, who chose its contents: a script, a module, arguments. So they are shown, with the
checksum of the file, and run only if the user names them (`--script train.py ARGS`) or confirms a question at a
terminal. Code in the folder that the incident came in, the whole run folder, is never run, however it is reached: by a
path with links or dots in it, as a module, from the working directory, or through `PYTHONPATH`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.core.redaction import is_redacted
from surefoot.core.user_code import is_users
from surefoot.diagnose.terminal import printable
from surefoot.errors import UsageError
from surefoot.record.incidents.bundle import INCIDENTS
from surefoot.replay.processes import Order

if TYPE_CHECKING:
    from surefoot.record.incidents.environment import ScriptFacts
    from surefoot.record.incidents.summary import IncidentFacts

_LONGEST_SHOWN = 300
_LONGEST_ASKED = 4_000
"""The maximum length of the question in characters: users do not read longer text before they agree."""


def order_for(
    folder: Path,
    facts: IncidentFacts,
    script: str | None,
    arguments: tuple[str, ...],
    target: str | None,
    module: str | None = None,
    ask: Callable[[str], bool] | None = None,
) -> Order:
    """What runs the step: the named target, script or module, or the recorded one if `ask` returns true."""
    if sum(each is not None for each in (script, module, target)) > 1:
        raise UsageError("use only one of --script, --module and --target")
    tree = received(folder)
    _refuse(
        Path.cwd(), tree, "the working directory", "change to the folder of your own script, and name it from there"
    )
    if target is not None:
        place, _, _ = target.rpartition(":")
        for file in [Path(place)] if os.path.exists(place) else files_of(place):
            _refuse(file, tree, f"the target {target!r}")
        return Order(folder, target=target)
    if module is not None:
        return _module_order(folder, module, arguments, tree)
    if script is not None:
        if not Path(script).exists():
            raise UsageError(f"there is no script {script!r} here")
        _refuse(Path(script), tree, f"the script {script!r}")
        return Order(folder, script=script, arguments=arguments)
    return _recorded(folder, facts["script"], arguments, tree, ask)


def _module_order(folder: Path, module: str, arguments: tuple[str, ...], tree: Path) -> Order:
    files = files_of(module)
    if not files:
        raise UsageError(f"there is no module {module!r} here")
    for file in files:
        _refuse(file, tree, f"the module {module!r}")
    return Order(folder, script=module, module=True, arguments=arguments)


def _recorded(
    folder: Path,
    recorded: ScriptFacts,
    arguments: tuple[str, ...],
    tree: Path,
    ask: Callable[[str], bool] | None,
) -> Order:
    """What the incident names, if it is the user's code below the working directory, and the user agrees."""
    words = recorded.get("arguments")
    given = bool(arguments)
    arguments = arguments or tuple(str(word) for word in (words if isinstance(words, list) else []))
    order, files, option, what = _named(folder, recorded, arguments, tree)
    for file in files:
        _refuse(file, tree, what)
        if not _is_below_here(file):
            raise UsageError(
                f"the incident names {what}, which is not yours or not below the working directory, so it is not run. "
                "Change to the folder where it was started, or set --script or --target"
            )
    words_shown = " ".join(map(_quoted, arguments))
    line = f"{option} -- {words_shown}" if arguments else option
    if not given and (recorded.get("redacted") or any(map(is_redacted, arguments))):
        raise UsageError(
            f"an argument of the script was redacted when the incident was written. Pass all of them: {_shown(line)}"
        )
    with_these = f"with the arguments {words_shown}" if arguments else "without arguments"
    shown = f"{what} (SHA-256 {_checksum(files[-1])}) {with_these}"
    if len(shown) > _LONGEST_ASKED:
        raise UsageError(
            f"the arguments in the incident are {len(words_shown):,} characters long, too long to be shown and agreed "
            f"to. If you want to run the script, name it with the arguments it needs: {_shown(option)} -- ARGS"
        )
    if ask is None:
        raise UsageError(f"the incident names {shown}. It is not run without your consent: name it, as in `{line}`")
    if not ask(f"The incident {_shown(str(folder))} names {shown}."):
        raise UsageError("nothing was run")
    return order


def _named(
    folder: Path, recorded: ScriptFacts, arguments: tuple[str, ...], tree: Path
) -> tuple[Order, list[Path], str, str]:
    """The module or script that an incident names: its order, its files, its option, and a phrase."""
    module, path = recorded.get("module"), recorded.get("path")
    if isinstance(module, str) and module:
        order = _module_order(folder, module, arguments, tree)
        return order, files_of(module), f"--module {_quoted(module)}", f"the module {module!r}"
    if not isinstance(path, str) or not path:
        raise UsageError("the incident names no script. Set --script train.py or --target module:function")
    if not os.path.isfile(path):
        raise UsageError(
            f"the recorded script {path!r} does not exist here. Change to the folder where it was "
            "started, or set --script or --target"
        )
    order = Order(folder, script=path, arguments=arguments)
    return order, [Path(path)], f"--script {_quoted(path)}", f"the script {path!r}"


def ask_at_terminal(text: str) -> bool:
    """Whether the user at the terminal says yes."""
    sys.stderr.write(f"{text}\nIt runs with your permissions. Run it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def asking() -> Callable[[str], bool] | None:
    """How to ask, if there is a terminal."""
    return ask_at_terminal if sys.stdin.isatty() and sys.stderr.isatty() else None


def received(incident: Path) -> Path:
    """The folder that an incident came in: its run folder, or the incident itself if it is alone."""
    here = Path(os.path.realpath(incident))
    if here.parent.name != INCIDENTS:
        return here
    run = here.parent.parent
    is_rank = run.name.startswith("rank") and run.name.removeprefix("rank").isdigit()
    return run.parent if is_rank else run


def import_path(tree: Path) -> list[str]:
    """The entries of `PYTHONPATH` that a replay may import from: all but the folder the incident came in."""
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return [each for each in given if not _is_inside(Path(each), tree)]


def _is_inside(path: Path, tree: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(tree)


def _refuse(file: Path, tree: Path, what: str, way_out: str = "") -> None:
    if _is_inside(file, tree):
        raise UsageError(
            f"{_shown(what)} is inside {tree}, the folder that the incident came in; nothing in it is run. "
            + (way_out or "Name a script of your own with --script; if this code is yours, move the incident elsewhere")
        )


def _is_below_here(file: Path) -> bool:
    real = Path(os.path.realpath(file))
    return real.is_relative_to(Path.cwd().resolve()) and is_users(str(real))


def files_of(module: str) -> list[Path]:
    """The files that running a module would begin with, its parent packages included; nothing is run to find them."""
    found: list[Path] = []
    search: list[str] | None = [os.getcwd(), *sys.path]
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, search)
        if spec is None:
            return []
        search = list(spec.submodule_search_locations or [])
        found += [Path(place) for place in ([spec.origin] if spec.origin else search) if os.path.exists(place)]
    if search:
        found += [main for place in search if (main := Path(place) / "__main__.py").is_file()]
    return found


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    if file.is_file():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _quoted(word: str) -> str:
    """One argument as shell text; control and invisible characters are escaped, as in `$'a\nb'`."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, word)) + "'"


def _escaped(character: str) -> str:
    number = ord(character)
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    if character == "\n":
        return "\\n"
    if number < 0x80 or 0xDC80 <= number <= 0xDCFF:  # the latter is how Python represents a byte that is not text
        return f"\\x{number & 0xFF:02x}"
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def _shown(text: str) -> str:
    """Text from an untrusted file: without control characters, and shortened."""
    plain = printable(text.replace("\n", " "))
    return plain if len(plain) <= _LONGEST_SHOWN else f"{plain[:_LONGEST_SHOWN]}…"
