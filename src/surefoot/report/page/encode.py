"""Encoding of numbers and text in the page: JSON that is safe inside a script element, and packed bytes.

JSON has no NaN: non-finite values are written as strings, as in the other files of a run folder. Numbers keep six
digits, more than a chart shows. Every character with a meaning in HTML is escaped.
"""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

from surefoot.record.run_folder import json_values

if TYPE_CHECKING:
    from surefoot.report.page.columns import Numbers

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def embedded(value: Any) -> str:
    """JSON that is safe inside a script element, whatever strings it contains."""
    return as_text(value).translate(_ESCAPES)


def as_text(value: Any) -> str:
    """Compact JSON in plain ASCII: line separators and lone surrogates are escaped too."""
    return json.dumps(json_values(value), separators=(",", ":"), allow_nan=False, default=str)


def numbers(values: Numbers) -> list[Any]:
    """A column of the page: six digits, integers without a decimal point, strings for non-finite values."""
    return [number(value) for value in values.tolist()]


def number(value: float) -> Any:
    """A number of the page: six digits, an integer without a decimal point, a string for a non-finite value."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def packed(values: Numbers) -> str:
    """Bytes for a typed array, little-endian."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little.tobytes()).decode("ascii")
