"""The files of a reproduction: `reproduce.py`, its tensors if they are too large for a literal, and a README."""

from __future__ import annotations

import json
import platform
import textwrap
from typing import TYPE_CHECKING

import torch

from surefoot.core.files import write_file
from surefoot.core.redaction import Redactor
from surefoot.replay.export.folder import README, SCRIPT, TENSORS, clear
from surefoot.replay.export.literals import literal, stored

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from surefoot.replay.export.program import Line, Program
    from surefoot.replay.export.trial import TrialResult
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


def write(folder: Path, program: Program, seen: TrialResult, origin: NonFiniteOrigin, said: str) -> str:
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
    write_file(folder / README, _readme(program, seen, origin, said, redact))
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
    words = f"{subject(program)} made {seen.counts} of {seen.numel:,} values."
    return words[0].upper() + words[1:] if program.backward else words


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


def _readme(program: Program, seen: TrialResult, origin: NonFiniteOrigin, said: str, redact: Redactor) -> str:
    device = next((str(leaf.device.type) for leaf in program.leaves.values()), "cpu")
    parts = [
        f"# {_headline(program, seen)}",
        "\n".join(f"    {line}" for line in _where(origin, redact)),
        _story(origin),
        "    python reproduce.py",
        "Exit code 1 and `reproduced: …` if it fails as recorded, 0 and `not reproduced: …` if every value is finite. "
        "It needs torch and nothing else.",
        said,
        f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {platform.system()} "
        f"{platform.machine()}",
    ]
    notes = [redact(note) for note in origin.notes]
    if notes:
        parts.insert(3, "TrialResult in the step: " + "; ".join(notes) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"
