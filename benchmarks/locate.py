"""Who names the operation: `find_nonfinite`, anomaly mode, and transformers' `DebugUnderflowOverflow`.

    python benchmarks/locate.py

Every fault of `nonfinite_faults.py` is run under each. *found*: something was reported. *op*: the operation that made
the first bad value was named (for a tensor that was bad from the start: the tensor). *line*: so was the line that
called it. Time is that of the search over that of the same step without it (forward and backward), the median of the
faults. Those are tiny steps, where the cost of looking at an operation is many times that of the operation; so the same
is timed on a transformer as well.

Anomaly mode names the function whose backward returned NaN, and prints the forward call as a warning; it is credited
with the operation if the function is that operation's, and with the line if it is the last of the user's that it
prints. `DebugUnderflowOverflow` names modules; it is credited with the operation if it stops at the innermost module
around it (and not at the whole model), and with a tensor if it says that this one is bad. It has no lines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import re
import time
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

import nonfinite_faults
import torch
from nonfinite_faults import FAULTS, HEALTHY, Fault, Step

import surefoot

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot import NonFiniteOrigin

HAS_TRANSFORMERS = find_spec("transformers") is not None


@dataclass(frozen=True)
class Judgement:
    """What one tool made of one fault."""

    found: bool = False
    op: bool = False
    line: bool = False
    seconds: float = 0.0


def judge_ours(fault: Fault, found: NonFiniteOrigin | None) -> Judgement:
    if found is None:
        return Judgement()
    if fault.tensor:
        right = found.tensor == fault.tensor
        return Judgement(True, right, right)
    op = found.op.split(" -> ")[-1].split(".")[1] if "." in found.op else ""
    forward_op = found.forward_op.split(".")[1] if found.forward_op else ""
    right = found.phase in fault.phase.split() and fault.op in (op, forward_op, found.op.split("Backward")[0])
    return Judgement(True, right, found.line == fault.line and found.file == nonfinite_faults.__file__)


def ours(fault: Fault, step: Step) -> Judgement:
    return judge_ours(fault, surefoot.find_nonfinite(step, model=step.model))


def run_step(step: Step) -> None:
    out = step()
    if isinstance(out, torch.Tensor) and out.requires_grad and step.run is None:
        out.backward()


def anomaly(fault: Fault, step: Step) -> Judgement:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                run_step(step)
        except RuntimeError as error:
            named = re.search(r"Function '(\w+?)Backward\d*'", str(error))
            op = named is not None and _plain(named.group(1)) == _plain(fault.op.removesuffix("_forward"))
            trace = "".join(str(each.message) for each in said)
            lines = re.findall(r'nonfinite_faults\.py", line (\d+)', trace)
            return Judgement(True, op, bool(lines) and int(lines[-1]) == fault.line)
    return Judgement()


def transformers(fault: Fault, step: Step) -> Judgement:
    from transformers.debug_utils import DebugUnderflowOverflow  # takes a second, and tests import this module

    DebugUnderflowOverflow(step.model)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            run_step(step)
        except ValueError as error:
            if "inf/nan" not in str(error):
                raise
            return Judgement(True, _names_it(fault, said.getvalue()))
        except NotImplementedError:  # it takes the absolute value of everything, masks included
            return Judgement()
    return Judgement()


def _names_it(fault: Fault, said: str) -> bool:
    if fault.tensor:
        return any(f"{name} has" in said for name in (fault.tensor.rsplit(".", 1)[-1], "input[0]"))
    frames = re.findall(r"^ +(\S*) \w+$", said, re.MULTILINE)
    return "forward" in fault.phase and fault.module != "Net" and frames[-1:] == [fault.module]


def _plain(name: str) -> str:
    """`LinalgEigh` and `_linalg_eigh` are one name."""
    return name.replace("_", "").lower()


def timed(tool: Callable[[Fault, Step], Judgement], fault: Fault, repeats: int) -> Judgement:
    judged, seconds = Judgement(), []
    for _ in range(repeats):
        torch.manual_seed(0)
        step = fault.build()
        began = time.perf_counter()
        judged = tool(fault, step)
        seconds.append(time.perf_counter() - began)
    return Judgement(judged.found, judged.op, judged.line, median(seconds))


def plain(fault: Fault, step: Step) -> Judgement:
    run_step(step)
    return Judgement()


def mark(judged: Judgement) -> str:
    return " ".join("yes" if each else "-" for each in (judged.found, judged.op, judged.line))


def compare(repeats: int) -> dict[str, dict[str, Judgement]]:
    tools: dict[str, Any] = {"find_nonfinite": ours, "detect_anomaly": anomaly}
    if HAS_TRANSFORMERS:
        tools["DebugUnderflowOverflow"] = transformers
    for tool in (plain, *tools.values()):  # the first use of each loads things
        timed(tool, FAULTS[0], 2)
    return {
        fault.name: {name: timed(tool, fault, repeats) for name, tool in {"plain": plain, **tools}.items()}
        for fault in FAULTS
    }


def table(results: dict[str, dict[str, Judgement]]) -> list[str]:
    tools = [name for name in next(iter(results.values())) if name != "plain"]
    lines = [f"| fault | {' | '.join(f'{tool}: found, op, line' for tool in tools)} |", "|---" * (len(tools) + 1) + "|"]
    for name, row in results.items():
        cells = " | ".join(", ".join(mark(row[tool]).split()) for tool in tools)
        lines.append(f"| {name.replace('_', ' ')} | {cells} |")
    totals = []
    for tool in tools:
        rows = [row[tool] for row in results.values()]
        ratio = median(row[tool].seconds / row["plain"].seconds for row in results.values())
        counts = ", ".join(str(sum(getattr(each, what) for each in rows)) for what in ("found", "op", "line"))
        totals.append(f"**{counts} of {len(rows)}; {ratio:.1f} x**")
    return [*lines, f"| **total; time** | {' | '.join(totals)} |"]


def false_alarms() -> list[str]:
    alarmed = []
    for name, build in HEALTHY.items():
        torch.manual_seed(0)
        step = build()
        found = surefoot.find_nonfinite(step, model=step.model)
        if found is not None:
            alarmed.append(f"{name}: {found}")
    return alarmed


def transformer(fails: bool) -> Step:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    batch = torch.randn(16, 64, 256)
    scale, floor = (0.0, 0.0) if fails else (1.0, 1e-6)
    return Step(model, (batch,), lambda: (model(batch).square() * scale + floor).log().mean())


def transformer_times(repeats: int) -> list[str]:
    lines = []
    for fails in (False, True):
        fault = Fault("transformer", lambda fails=fails: transformer(fails), "log", "forward")
        usual = timed(lambda _, step: step().backward() or Judgement(), fault, repeats).seconds
        searched = timed(ours, fault, repeats)
        watched = timed(anomaly_of_loss, fault, repeats).seconds
        kind = "log of zero at the end" if fails else "healthy"
        lines.append(
            f"transformer, 6 layers of width 256, 16 x 64 tokens, {kind}: plain step {usual:.2f} s, "
            f"find_nonfinite {searched.seconds / usual:.1f} x, detect_anomaly {watched / usual:.1f} x"
        )
    return lines


def anomaly_of_loss(fault: Fault, step: Step) -> Judgement:
    with contextlib.suppress(RuntimeError), torch.autograd.detect_anomaly():
        step().backward()
    return Judgement()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results = compare(arguments.repeats)
    print(f"torch {torch.__version__}, {platform.machine()} CPU, {torch.get_num_threads()} threads\n")
    print("\n".join(table(results)))
    if not HAS_TRANSFORMERS:
        print("\ntransformers is not installed: DebugUnderflowOverflow was not run.")
    print("\n" + "\n".join(transformer_times(3)))
    alarms = false_alarms()
    print(f"\nhealthy steps: {len(HEALTHY)}, alarms: {len(alarms)}")
    print("\n".join(alarms))


if __name__ == "__main__":
    main()
