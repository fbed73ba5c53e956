"""The files of a reproduction: `reproduce.py`, its tensors, and a README.

A few values are written as a literal, a constant tensor as a constant, and all others to a file.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surefoot.core.files import write_file
from surefoot.core.redaction import Redactor
from surefoot.errors import UsageError
from surefoot.keep.checkpoint.tree import STORED_AS_IS

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.replay.export.program import Line, Program, TrialResult
    from surefoot.replay.locate.frames import Place
    from surefoot.replay.locate.result import NonFiniteOrigin

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip

_LOADER = '''
def load(name):
    """The tensors of a safetensors file: the length of its header, the header in JSON, then the values."""
    data = bytearray((Path(__file__).parent / name).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {{}}
    for name, about in json.loads(data[8:start]).items():
        begin, end = about["data_offsets"]
        dtype = {dtypes}[about["dtype"]]
        tensors[name] = torch.frombuffer(data[start + begin : start + end], dtype=dtype).reshape(about["shape"])
    return tensors


tensors = load("{file}")
'''

_ENDING = """
made = [{made}]
kinds = {{"NaN": torch.isnan, "Inf": torch.isposinf, "-Inf": torch.isneginf}}
counts = {{kind: sum(int(is_kind(values).sum()) for values in made) for kind, is_kind in kinds.items()}}
said = " and ".join(f"{{count:,}} {{kind}}" for kind, count in counts.items() if count)
if not said:
    print("not reproduced: every value is finite; recorded were {recorded} (torch {version})")
    sys.exit(0)
said += f" of {{sum(values.numel() for values in made):,}} values"
if counts != {counts}:
    said += ", recorded were {recorded}"
sys.exit(f"reproduced: {subject} made {{said}}")
"""


SCRIPT, TENSORS, README = "reproduce.py", "tensors.safetensors", "README.md"


def usable(folder: Path) -> Path:
    """The folder, if it does not exist, is empty, or contains a reproduction that may be replaced."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a reproduction is a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SCRIPT).exists():
        raise UsageError(f"{folder} contains other files. Use an empty or new folder")
    return folder


def clear(folder: Path) -> None:
    """Remove the files of a reproduction."""
    for name in (SCRIPT, TENSORS, README):
        (folder / name).unlink(missing_ok=True)


_LONGEST_SECONDS = 300
_ALONE = """
import importlib.util, json, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "surefoot":
            raise ImportError("a reproduction must not need surefoot")

sys.meta_path.insert(0, Refuse())
if importlib.util.find_spec("torch") is None:  # a torch that only PYTHONPATH or the user's own site knows
    sys.path += json.loads(sys.argv[2])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def fails_alone(folder: Path) -> tuple[bool, str]:
    """Whether the script fails exactly as recorded in a process that cannot import surefoot, and its last output."""
    command = [sys.executable, "-I", "-c", _ALONE, str(folder / SCRIPT), json.dumps(sys.path)]
    try:
        ended = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LONGEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"it did not finish within {_LONGEST_SECONDS} seconds"
    printed = (ended.stderr.strip() or ended.stdout.strip() or "nothing").splitlines()[-1]
    exactly = printed.startswith("reproduced: ") and ", recorded were " not in printed
    return ended.returncode == 1 and exactly, printed


def write(folder: Path, program: Program, seen: TrialResult, origin: NonFiniteOrigin, printed: str) -> str:
    """Write the folder; returns the text of the script."""
    redact = Redactor()
    folder.mkdir(parents=True, exist_ok=True)
    large = {name: leaf for name, leaf in program.leaves.items() if literal(leaf) is None}
    text = _script(program, seen, origin, large, redact)
    clear(folder)
    if large:
        from safetensors.torch import save

        write_file(folder / TENSORS, save(stored(large)[0]))
    write_file(folder / SCRIPT, text)
    write_file(folder / README, _readme(program, seen, origin, printed, redact))
    return text


def subject(program: Program) -> str:
    """What made the bad values, as a phrase."""
    return f"the backward of {program.title}" if program.backward else program.title


def _script(
    program: Program, seen: TrialResult, origin: NonFiniteOrigin, large: dict[str, Tensor], redact: Redactor
) -> str:
    words = stored(large)[1]
    lines = [_headline(program, seen), "", *_where(origin, redact), ""]
    lines += ["Needs only torch. Exit code 1: it failed as recorded; 0: it did not."]
    lines = [*(f"# {_printable(line)}".rstrip() for line in lines), ""]  # no text of the program's can end a comment
    body = "\n".join(line.text for line in program.lines)
    imports = ["sys"] + (["json"] if large else [])
    lines += [f"import {name}" for name in sorted(imports)]
    lines += ["from pathlib import Path"] if large else []
    lines += ["", "import torch"] + (["from torch.nn import functional as F"] if "F." in body else [])
    if large:
        kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in stored(large)[0].values()}
        known = ", ".join(f'"{code}": torch.{kind}' for code, kind in _DTYPES.items() if kind in kinds)
        lines += ["", *_LOADER.format(dtypes="{" + known + "}", file=TENSORS).splitlines()]
    lines += [""]
    for kind in sorted({leaf.device.type for leaf in program.leaves.values()} - {"cpu", "meta"}):
        lines += [
            f"if not torch.{kind}.is_available():",
            f'    print("this failed on a {kind.upper()} device, and there is none here")',
            "    sys.exit(2)",
        ]
    lines += [*_settings()]
    for name, leaf in program.leaves.items():
        lines.append(f"{name} = {words.get(name) or literal(leaf)}")
    lines += [""] if program.leaves else []
    lines += [_annotated(line, redact) for line in program.lines]
    ending = _ENDING.format(
        made=", ".join(program.made),
        recorded=seen.counts,
        version=torch.__version__,
        counts=json.dumps(dict(zip(("NaN", "Inf", "-Inf"), seen.counts, strict=True))),
        subject=subject(program),
    )
    return "\n".join(lines) + ending


def _headline(program: Program, seen: TrialResult) -> str:
    text = f"{subject(program)} made {seen.counts} of {seen.numel:,} values."
    return text[0].upper() + text[1:] if program.backward else text


def _settings() -> list[str]:
    """Settings of a process that change how operations compute."""
    lines = []
    if torch.get_default_dtype() != torch.float32:
        lines.append(f"torch.set_default_dtype({torch.get_default_dtype()})")
    if torch.get_float32_matmul_precision() != "highest":
        lines.append(f'torch.set_float32_matmul_precision("{torch.get_float32_matmul_precision()}")')
    return lines


def _annotated(line: Line, redact: Redactor) -> str:
    if line.ran is None or line.ran.place is None:
        return line.text
    return f"{line.text}  # {_printable(_place(line.ran.place, redact))}"


def _printable(text: str) -> str:
    """Without characters that end a line, end the file (a zero byte) or change the reading direction."""
    return "".join(each if each.isprintable() else " " for each in text)


def _place(place: Place, redact: Redactor) -> str:
    return " ".join(f"{redact.path(place.file)}:{place.line}".split())


def _where(origin: NonFiniteOrigin, redact: Redactor) -> list[str]:
    """Where in the program it happened."""
    if origin.phase == "input":
        return textwrap.wrap(redact(f"The {origin.op} was not finite before any operation."), 110)
    found = []
    if origin.file:
        inside = f" in `{origin.function}`" if origin.function else ""
        found.append(f"{redact.path(origin.file)}:{origin.line}{inside}: {redact(origin.source)}".rstrip(": "))
    if origin.module:
        found.append(f"In the module `{origin.module}`.")
    return [" ".join(line.split()) for line in found]


def _story(origin: NonFiniteOrigin) -> str:
    """What happened in the whole step."""
    before = origin.phase == "input"
    happened = "had" if before else f"({origin.phase}) made"
    subject = f"the {origin.op}" if before else origin.op
    way = " -> ".join(origin.path)
    return f"In the step, {subject} {happened} {origin.counts} of {origin.numel:,} values, passed on by: {way}."


def _readme(program: Program, seen: TrialResult, origin: NonFiniteOrigin, printed: str, redact: Redactor) -> str:
    device = next((str(leaf.device.type) for leaf in program.leaves.values()), "cpu")
    parts = [
        f"# {_headline(program, seen)}",
        "\n".join(f"    {line}" for line in _where(origin, redact)),
        _story(origin),
        "    python reproduce.py",
        "Exit code 1 and `reproduced: …` if it fails as recorded, 0 and `not reproduced: …` if every value is finite. "
        "It needs torch and nothing else.",
        printed,
        f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {platform.system()} "
        f"{platform.machine()}",
    ]
    notes = [redact(note) for note in origin.notes]
    if notes:
        parts.insert(3, "TrialResult in the step: " + "; ".join(notes) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


MOST_VALUES = 32
"""A tensor with at most this many values is written into the script."""
_PLAIN = (torch.float32, torch.int64, torch.bool)


def literal(tensor: Tensor) -> str | None:
    """The tensor as an expression that recreates it bitwise; `None` if it belongs in a file."""
    eight_bits = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    if tensor.is_complex() or eight_bits or tensor.dtype not in STORED_AS_IS:
        return None
    extras = "" if tensor.dtype in _PLAIN else f", dtype={tensor.dtype}"
    extras += "" if tensor.device.type == "cpu" else f', device="{tensor.device.type}"'
    for text in _candidates(tensor.cpu()):
        words = f"torch.{text.removesuffix(')')}{extras})"
        if _makes(words, tensor):
            return words
    return None


def _candidates(tensor: Tensor) -> list[str]:
    shape = ", ".join(map(str, tensor.shape)) or "()"
    if tensor.numel() == 0:
        return [f"zeros({shape})", f"zeros(({shape},), dtype={tensor.dtype})"]
    found = []
    values = tensor.flatten()
    first = values[0].item()
    if tensor.numel() > 2 and bool((values == first).all()):
        if tensor.dtype != torch.bool:
            found += [f"zeros({shape})"] if first == 0 else [f"ones({shape})"] if first == 1 else []
        found.append(f"full({tuple(tensor.shape)}, {_number(first, tensor.dtype)})")
    if tensor.numel() <= MOST_VALUES:
        found.append(f"tensor({_nested(tensor.tolist(), tensor.dtype)})")
    return found


def _nested(values: Any, dtype: torch.dtype) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(_nested(each, dtype) for each in values) + "]"
    return _number(values, dtype)


def _number(number: Any, dtype: torch.dtype) -> str:
    """The shortest decimal that is this number in its own precision."""
    if not isinstance(number, float):
        return repr(number)
    if not math.isfinite(number):
        return f'float("{number}")'
    if dtype == torch.float64:
        return repr(number)
    short = repr(float(str(np.float16(number) if dtype == torch.float16 else np.float32(number))))
    again = torch.tensor(float(short), dtype=dtype)
    return short if again.item() == number else repr(number)


def _makes(text: str, tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # as without `torch.set_default_device`
        again = eval(text, {"torch": torch})
    same_kind = again.dtype == tensor.dtype and again.shape == tensor.shape and again.device == tensor.device
    return bool(same_kind and _bits(again).equal(_bits(tensor)))


def _bits(tensor: Tensor) -> Tensor:
    """The bits that must agree; all NaN values count as equal."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def stored(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors for the file, and how the script gets each from there."""
    kept, words = {}, {}
    for name, tensor in tensors.items():
        text = f'tensors["{name}"]'
        plain = tensor.detach().cpu().contiguous()
        if plain.is_complex():
            plain, text = torch.view_as_real(plain).contiguous(), f"torch.view_as_complex({text})"
        kept[name] = plain
        words[name] = text if tensor.device.type == "cpu" else f'{text}.to("{tensor.device.type}")'
    return kept, words
