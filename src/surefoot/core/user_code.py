"""Which source files are the user's, how a line of theirs is named, and the text of named lines and those around."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import token
import tokenize
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from surefoot.core.files import read_file
from surefoot.core.redaction import REDACTED, Redactor, is_secret_value

if TYPE_CHECKING:
    from types import CodeType, FrameType

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of this package."""
PACKAGES = ("site-packages", "dist-packages")
"""Folders that hold installed packages."""
_LIBRARIES = tuple(
    {os.path.realpath(path) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")
     if (path := sysconfig.get_path(key))}
    | {path + os.sep for key in ("stdlib", "purelib") if (path := sysconfig.get_path(key))}
)  # fmt: skip
MOST_LINES = 1_000
"""The maximum number of named lines whose text is kept, and of all lines with those around them."""
LINES_AROUND = 3
"""The number of lines before and after a named one that are kept."""
_LONGEST_LINE = 200
_LARGEST_FILE = 1 << 18
_places: dict[str, str] = {}
_texts: dict[str, list[bytes]] = {}
_shown: dict[str, list[str]] = {}
_named: dict[str, tuple[str, int]] = {}


def is_users(filename: str) -> bool:
    """Whether a source file belongs to the user: not to torch, the standard library or surefoot (except its zoo)."""
    return _own_files[filename]


class _OwnFiles(dict[str, bool]):
    """Whether each source file belongs to the user. A file that is looked up for the first time is judged."""

    def __missing__(self, filename: str) -> bool:
        known = self[filename] = _judge(filename)
        return known


_own_files = _OwnFiles()


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, from a frame outwards. Called for every recorded call, so in one loop."""
    known = _own_files
    while frame is not None and not known[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def variables(frame: FrameType) -> dict[str, object]:
    """The local variables of a running frame.

    Before Python 3.13, reading them creates a dictionary that stays with a function's frame: objects that the function
    deletes afterwards would live until it returns. The dictionary is emptied again, unless the script holds it too.
    """
    own = frame.f_locals
    found = dict(own)
    if type(own) is dict and frame.f_code.co_flags & _CO_OPTIMIZED and sys.getrefcount(own) <= _UNSHARED:
        own.clear()
    return found


def _references() -> int:
    own = sys._getframe().f_locals
    return sys.getrefcount(own)


_CO_OPTIMIZED = 1  # for a function; the variables of a module or a class are its namespace
_UNSHARED = _references()


class ScriptLine:
    """A line of code that was executed. There is one object for each line, so that it can be a key at no cost.

    Python computes the hash of a code object from all its constants, again at each use, and the number of a line from
    the beginning of its code: for a long script, each takes many microseconds.
    """

    __slots__ = ("code", "number")

    def __init__(self, code: CodeType, number: int) -> None:
        self.code, self.number = code, number


_lines: dict[tuple[str, CodeType, int], ScriptLine] = {}
_executed: dict[tuple[int, int], tuple[CodeType, ScriptLine]] = {}
"""The same lines, by the identity of a code object, which is kept alive, and the position in it."""
_MOST_EXECUTED = 1_024


def users_line(frame: FrameType | None) -> ScriptLine | None:
    """The line of the user's code that is being executed, from a frame outwards."""
    known = _own_files
    while frame is not None and not known[frame.f_code.co_filename]:
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    key = id(code), frame.f_lasti
    found = _executed.get(key)
    if found is None:
        if len(_executed) >= _MOST_EXECUTED:  # a script that executes new text again and again
            _executed.clear()
        number = frame.f_lineno
        found = _executed[key] = code, _lines.setdefault((code.co_filename, code, number), ScriptLine(code, number))
    return found[1]


def _judge(filename: str) -> bool:
    if filename.startswith("<") and not filename.startswith(("<ipython", "<stdin")):
        return False
    zoo = tuple(os.path.join(HERE, "zoo", name) for name in ("t", "ranks"))
    if filename.startswith(HERE + os.sep) and not filename.startswith(zoo):
        return False
    if filename.startswith(zoo):
        return True
    return not (filename.startswith(_LIBRARIES) or any(folder in filename for folder in PACKAGES))


def place(filename: str, line: int) -> str:
    """A file and line in readable form."""
    known = _places.get(filename)
    if known is None:
        relative = os.path.relpath(filename)
        known = _places[filename] = relative if not relative.startswith("..") else filename
        _texts[filename] = _lines_of(filename)
    name = f"{known}:{line}"
    if len(_named) < MOST_LINES:
        _named[name] = filename, line
    return name


def source_lines() -> dict[str, str]:
    """The text of each line that `place` has named and of those around it, without secrets, by file and line.

    Files are read at their first use: they may be edited later.
    """
    found: dict[str, str] = {}
    for name, (filename, line) in list(_named.items()):
        lines = _shown_lines(filename)
        for number in range(max(1, line - LINES_AROUND), min(line + LINES_AROUND, len(lines)) + 1):
            key = f"{name.rpartition(':')[0]}:{number}"
            if len(found) < MOST_LINES or number == line:
                found[key] = lines[number - 1][:_LONGEST_LINE]
    return {key: text for key, text in found.items() if text}


def _shown_lines(filename: str) -> list[str]:
    """The lines of a file of the user, without secrets."""
    known = _shown.get(filename)
    if known is None:
        lines = [line.decode("utf-8", "replace").expandtabs(4).rstrip() for line in _texts.get(filename, [])]
        known = _shown[filename] = without_secrets(lines)
    return known


def _lines_of(filename: str) -> list[bytes]:
    """The lines of a file; none if it cannot be read or is very large."""
    try:
        if not is_users(filename) or os.path.getsize(filename) > _LARGEST_FILE:
            return []
        return read_file(filename).splitlines()
    except (OSError, ValueError):
        return []


_LITERALS = {token.STRING, getattr(token, "FSTRING_MIDDLE", token.STRING)}
_SKIPPED = {
    tokenize.NL, tokenize.COMMENT, token.INDENT, token.DEDENT, token.STRING,
    getattr(token, "FSTRING_START", token.STRING), getattr(token, "FSTRING_END", token.STRING),
}  # fmt: skip
"""Tokens that can be between the name of a value and the value."""


def without_secrets(lines: Sequence[str]) -> list[str]:
    """The lines of a Python file with all secrets replaced; none if Python cannot divide it into tokens.

    `Redactor` works on single lines. Code can put a secret on another line than its name (`api_key = (` on one line,
    the value on the next), and a private key takes many lines. So the file is divided into tokens: a string that
    belongs to the name of a secret is removed, and so is a string of several lines that contains one.
    """
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    redact = Redactor(identity=False)
    shown = list(lines)
    for found in reversed(list(_secret_strings(tokens, redact))):
        (first, column), (last, end) = found.start, found.end
        rest = shown[last - 1][end:]
        shown[first - 1 : last] = [shown[first - 1][:column] + REDACTED, *[REDACTED] * (last - first)]
        shown[last - 1] += rest
    return [redact(line) for line in shown]


def _secret_strings(tokens: list[tokenize.TokenInfo], redact: Redactor) -> Iterator[tokenize.TokenInfo]:
    for place, found in enumerate(tokens):
        if found.type not in _LITERALS:
            continue
        name = _name_before(tokens, place)
        spans_lines = found.start[0] != found.end[0]
        value = found.string.strip("rRbBuUfF\"'")
        if is_secret_value(name, value) or (spans_lines and redact(found.string) != found.string):
            yield found


def _name_before(tokens: list[tokenize.TokenInfo], place: int) -> str:
    """The name that a string is assigned to: `NAME = (…`, `{"NAME": …`, `x["NAME"] = …`, `f("NAME", …`; or empty."""
    place -= 1
    while place >= 0 and (tokens[place].type in _SKIPPED or tokens[place].string in ("(", "+", "[")):
        place -= 1
    if place < 1 or tokens[place].string not in ("=", ":", ","):
        return ""
    place -= 1
    while place > 0 and (tokens[place].string == "]" or tokens[place].type in (tokenize.NL, tokenize.COMMENT)):
        place -= 1
    return tokens[place].string.strip("rRbBuUfF\"'") if tokens[place].type in (token.NAME, token.STRING) else ""
