"""How often findings are true, by cause: the counts of `surefoot.diagnose.calibration`.

    surefoot zoo mutate --half tuning --jobs 16 --json tuning.jsonl
    python benchmarks/calibration.py tuning.jsonl

Prints, for every cause, in how many mutants it was the first finding and in how many of these it was true; the same for
findings after the first, over runs; the share that is true by kind of evidence, in which every operator counts the same
(new faults are new operators, not more mutants of known ones); and the table to paste. Only the tuning half may be
used: the testing half shows whether the confidences hold where nothing was tuned.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from statistics import mean

from surefoot.diagnose.rules import RULES
from surefoot.diagnose.rules.last_resort import LAST_RESORT
from surefoot.zoo.mutation.figures import judge
from surefoot.zoo.mutation.operators import OPERATORS
from surefoot.zoo.mutation.runs import read_lines


def main(path: Path) -> None:
    """Count the findings of a file."""
    runs = read_lines(path)
    if any(run.half != "tuning" for run in runs):
        raise SystemExit(f"{path} holds runs of the testing half, on which nothing may be tuned.")
    first, true, later = Counter[str](), Counter[str](), Counter[bool]()
    kinds = {rule.code: rule.kind for rule in (*LAST_RESORT, *reversed(RULES))}
    by_kind: dict[str, dict[str, list[bool]]] = {}
    for held in judge(runs, OPERATORS):
        if held.counts_as == "left out":
            continue
        named = {run.named[0] for run in held.runs if run.named}
        first.update(named)
        true.update(named & held.true)
        for cause in named:
            operators = by_kind.setdefault(kinds[cause], {})
            operators.setdefault(held.runs[0].operator, []).append(cause in held.true)
        later.update(cause in held.true for run in held.runs for cause in run.named[1:])
    print(f"first: true in {true.total()} of {first.total()} mutants")
    print(f"further findings: true in {later[True]} of {later.total()} runs")
    for kind, operators in sorted(by_kind.items()):
        share = mean(mean(each) for each in operators.values())
        print(f"{kind}: true in {share:.2f} of the first findings, over {len(operators)} operators")
    print({cause: (true[cause], first[cause]) for cause in sorted(first)})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python benchmarks/calibration.py TUNING.jsonl")
    main(Path(sys.argv[1]))
