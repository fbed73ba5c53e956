"""What every golden file needs: where the files are, how values become text, and how text is compared.

A golden file holds what surefoot did when the file was written. A refactoring leaves all of them as they are. Whoever
changes behaviour on purpose rewrites them with `python tests/goldens/write.py` and reviews the difference.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent
VERSION_1 = FOLDER / "v1"
"""Files written by the first version of each format. Never rewritten: a changed format gets a new folder."""
LONGEST = 24
"""A tensor or a list of numbers with more elements is shown by its hash."""


def compare(name: str, text: str) -> None:
    """Fail unless `text` is byte for byte what the golden file holds."""
    path = FOLDER / name
    assert path.is_file(), f"{name} is missing: write it with `.venv/bin/python tests/goldens/write.py`"
    golden = path.read_text(encoding="utf-8")
    if text != golden:
        lines = difflib.unified_diff(golden.splitlines(), text.splitlines(), f"goldens/{name}", "now", lineterm="", n=2)
        shown = "\n".join(list(lines)[:80])
        raise AssertionError(f"{shown}\n\nIf that is meant: .venv/bin/python tests/goldens/write.py {name}")


# ---- values as text -----------------------------------------------------------------------------------------------


def described(value: Any, digits: int | None = None) -> str:
    """Every leaf of a nested value on a line of its own: its path, its kind and its exact value.

    With `digits`, floating point numbers are rounded: the last bits of a computation depend on the processor.
    """
    return "".join(f"{path} = {leaf}\n" for path, leaf in _leaves(value, "", digits))


def _leaves(value: Any, path: str, digits: int | None) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key), digits)
    elif isinstance(value, (list, tuple)) and value and not _is_long(value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", digits)
    else:
        yield path, _leaf(value, digits)


def _is_long(value: list[Any] | tuple[Any, ...]) -> bool:
    return len(value) > LONGEST and all(isinstance(item, (bool, int, float, str)) for item in value)


def _leaf(value: Any, digits: int | None) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return _array(value, digits)
    if isinstance(value, (list, tuple)) and value:
        return f"{type(value).__name__} of {len(value)} {_hash(repr([_number(item, digits) for item in value]))}"
    if isinstance(value, bytes) and len(value) > 2 * LONGEST:
        return f"bytes[{len(value)}] {_hash(value.hex())}"
    if isinstance(value, (bool, int, float)):
        return repr(_number(value, digits))
    return repr(value)


def _array(value: Tensor | np.ndarray, digits: int | None) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    listed = value.tolist()
    flat = _flat(listed if isinstance(listed, list) else [listed])
    rounded = [_number(item, digits) for item in flat]
    if len(rounded) > LONGEST and len(set(map(repr, rounded))) == 1:
        return f"{kind}{list(value.shape)} all {rounded[0]!r}"
    shown = repr(rounded) if len(rounded) <= LONGEST else _hash(repr(rounded))
    return f"{kind}{list(value.shape)} {shown}"


def _flat(values: list[Any]) -> list[Any]:
    return [leaf for item in values for leaf in (_flat(item) if isinstance(item, list) else [item])]


def _number(value: Any, digits: int | None) -> Any:
    if digits is None or not isinstance(value, float) or not math.isfinite(value):
        return value
    return float(f"{value:.{digits}g}")


def _hash(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


# ---- JSON ---------------------------------------------------------------------------------------------------------


def shortened(value: Any) -> Any:
    """The same JSON value with a hash in the place of what is too long to read."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) > LONGEST:
            return {
                "first": shortened(value[0]),
                "last": shortened(value[-1]),
                "of": len(value),
                "hash": _hash_of(value),
            }
        return [shortened(item) for item in value]
    if isinstance(value, str) and len(value) > 1000:
        return {"text": value[:40], "of": len(value), "hash": _hash(value)}
    return value


def _hash_of(value: Any) -> str:
    return _hash(json.dumps(value, separators=(",", ":")))


def as_json(value: Any) -> str:
    """Indented, with short lists on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    short = re.compile(r"\[\n\s+((?:[^\[\]{}\"\n]+\n\s*)+)\]")
    return short.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"
