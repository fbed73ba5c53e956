"""Does the exported script of each fault fail by itself, and how small is it?

    python benchmarks/export.py

Every fault of `nonfinite_faults.py` is exported. *fails alone*: the script, run by `python -I` in a fresh process that
refuses to import surefoot, says that it made the same kinds of value as here, and as many. *operations*: calls of
torch's that compute; *lines*: of the script, imports and the count at its end included. *tensors*: bytes of everything
the step read that was there before it (weights, batch, moments), and of everything the script begins with, whether it
is written into the script or lies beside it.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
import warnings
from pathlib import Path

import torch
from nonfinite_faults import FAULTS, Fault

import surefoot


def export(fault: Fault, folder: Path) -> tuple[str, bool, bool]:
    """A row of the table, whether the script fails alone, and whether it is smaller."""
    torch.manual_seed(0)
    step = fault.build()
    began = time.perf_counter()
    name = fault.name.replace("_", " ")
    try:
        made = surefoot.export_reproduction(step, folder / fault.name, model=step.model)
    except surefoot.UsageError as error:
        return f"| {name} | {error} | - | - | - | no |", False, False
    if made is None:
        return f"| {name} | nothing was found | - | - | - | no |", False, False
    seconds = time.perf_counter() - began
    sizes = f"{made.came_from_bytes:,} → {made.tensor_bytes:,}"
    what = f"{made.title}: {made.counts}"
    alone = made.checked.startswith("reproduced: ")
    told = f"{'yes' if alone else 'no'}, {seconds:.1f} s"
    row = f"| {name} | {what} | {made.operations} | {made.lines} | {sizes} | {told} |"
    return row, alone, made.tensor_bytes < made.came_from_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="leave the folders here")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {platform.machine()} CPU, {torch.get_num_threads()} threads\n")
    print("| fault | the script | operations | lines | tensors, bytes | fails alone, time |\n|---|---|---|---|---|---|")
    failing = smaller = 0
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            row, alone, small = export(fault, arguments.keep or Path(scratch))
            failing, smaller = failing + alone, smaller + small
            print(row, flush=True)
    print(f"\n{failing} of {len(FAULTS)} fail by themselves; {smaller} are smaller than what they came from")


if __name__ == "__main__":
    main()
