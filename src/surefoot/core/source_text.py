"""The text of a source file without the secrets in it, so that some of its lines can be shown in a report.

`Redactor` works on single lines. Code can put a secret on another line than its name (`api_key = (` on one line, the
value on the next), and a private key takes many lines. Here the file is divided into tokens: a string that belongs to
the name of a secret is removed, and so is a string of several lines that contains one.

Not covered: secrets in files that Python cannot divide into tokens. No line of these is shown.
"""

from __future__ import annotations

import io
import token
import tokenize
from collections.abc import Iterator, Sequence

from surefoot.core.redaction import REDACTED, Redactor, is_secret_value

_LITERALS = {token.STRING, getattr(token, "FSTRING_MIDDLE", token.STRING)}
_SKIPPED = {
    tokenize.NL, tokenize.COMMENT, token.INDENT, token.DEDENT, token.STRING,
    getattr(token, "FSTRING_START", token.STRING), getattr(token, "FSTRING_END", token.STRING),
}  # fmt: skip
"""Tokens that can be between the name of a value and the value."""


def without_secrets(lines: Sequence[str]) -> list[str]:
    """The lines of a Python file with all secrets replaced; none if it is not Python."""
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
