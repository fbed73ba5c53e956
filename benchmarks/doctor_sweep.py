"""How often the preflight names the fault, and how often it finds one where there is none.

    PYTHONPATH=src:tests python benchmarks/doctor_sweep.py [--seeds N] [--seconds S] [NAME ...]

Every setup of `tests/doctor_faults.py` and `tests/doctor_healthy.py`, with several seeds; one line per miss, then the
counts and the time. The tests take one seed of a part of these.
"""

from __future__ import annotations

import argparse
import time

import torch

from doctor_faults import FAULTS
from doctor_healthy import HEALTHY
from surefoot.doctor.examine import examine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these setups")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="what one examination may take")
    parser.add_argument("--times", action="store_true", help="one line per examination")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    expected = [(setup.__name__, setup, cause) for setup, cause in FAULTS]
    expected += [(name, setup, None) for name, setup in HEALTHY.items()]
    counts = {"faults": [0, 0], "healthy": [0, 0]}
    began = time.monotonic()
    for name, setup, cause in expected:
        if asked.names and name not in asked.names:
            continue
        for seed in range(asked.seeds):
            right, took = _try(name, setup, cause, seed, asked.seconds)
            kind = counts["healthy" if cause is None else "faults"]
            kind[0] += right
            kind[1] += 1
            if asked.times:
                print(f"{took:6.2f} s  {name} seed {seed}", flush=True)
    for kind, (right, total) in counts.items():
        words = "named first" if kind == "faults" else "without a warning"
        print(f"{kind}: {right} of {total} {words}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if all(right == total for right, total in counts.values()) else 1


def _try(name: str, setup, cause: str | None, seed: int, seconds: float) -> tuple[bool, float]:
    torch.manual_seed(seed)
    start = time.process_time()
    examination = examine(*setup(), seconds=seconds)
    first = examination.causes[:1]
    right = examination.ok and not first if cause is None else first == (cause,)
    if not right:
        said = ", ".join(examination.causes) or "nothing"
        print(f"MISSED  {name} seed {seed}: expected {cause or 'nothing'}, got {said}")
    return right, time.process_time() - start


if __name__ == "__main__":
    raise SystemExit(main())
