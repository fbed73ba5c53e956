"""Files of ranks, made by hand: what a comparison of ranks reads, and nothing else."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.rank_comparison import RankComparison
from surefoot.diagnose.rank_rules import rank_claims
from surefoot.record.facts import Fingerprints, GroupSettings, RankLoader, RankOptimizer, RankSetup, ReplicaLook
from surefoot.record.rank_file import RankFile

if TYPE_CHECKING:
    from pathlib import Path

STEPS = (0, 1, 2, 3, 5, 8, 12)
NAMES = ["0.weight", "0.bias", "2.weight"]


def prints(*values: int) -> Fingerprints:
    """Fingerprints of three tensors."""
    packed = b"".join(value.to_bytes(4, "little") for value in values)
    return Fingerprints(total=packed.hex(), each=base64.b64encode(packed).decode())


@dataclass
class MadeRank:
    """One rank. Each number stands for the bits of a tensor."""

    rank: int = 0
    world_size: int = 2
    steps: tuple[int, ...] = STEPS
    parallel: str = "ddp"
    optimizer: dict[str, Any] = field(default_factory=dict)
    setup: dict[str, Any] = field(default_factory=dict)
    looks: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What differs from the usual, by step; a step of -1 stands for all."""

    def write(self, top: Path) -> None:
        """Make the folder of this rank."""
        folder = top / f"rank{self.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        file = RankFile(folder)
        setup = RankSetup(
            rank=self.rank, world_size=self.world_size, torch="2.13", python="3.11", seed=self.rank, initialized=True
        )
        file.append(replace(setup, **self.setup))
        usual = RankOptimizer(
            number=0,
            type="AdamW",
            site="train.py:9",
            settings=[GroupSettings(values={"lr": 0.1, "weight_decay": 0.01})],
            parallel=self.parallel,
            names=NAMES,
            elements=1000,
            layout="aa",
        )
        file.append(replace(usual, **self.optimizer))
        for step in self.steps:
            file.append(self.look(step))
        file.close()

    def look(self, step: int) -> ReplicaLook:
        after = prints(step + 1, step + 1, step + 1).total
        usual = ReplicaLook(
            step=step,
            optimizer=0,
            backwards=step + 1,
            lr=[0.1],
            parameters=prints(step, step, step),
            gradients=prints(100 + step, 100 + step, 100 + step),
            moments=prints(200 + step, 200 + step, 200 + step),
            after=after,
            next=after,
            inputs=1000 * self.rank + step,
            targets=2000 * self.rank + step,
            wrapper_called=True if self.parallel == "ddp" else None,
            synchronized=True if self.parallel == "ddp" else None,
        )
        return replace(usual, **(self.looks.get(-1, {}) | self.looks.get(step, {})))


def write_ranks(top: Path, *ranks: MadeRank) -> list[Path]:
    """The folders of some ranks."""
    for each in ranks:
        each.write(top)
    return [top / f"rank{each.rank}" for each in ranks]


def write_run(folder: Path, facts: dict[str, Any] | Any, exit_code: int | None = 0) -> Path:
    """The folder of one process, with its facts."""
    folder.mkdir(parents=True, exist_ok=True)
    held = facts if isinstance(facts, dict) else facts.to_json()
    (folder / "facts.json").write_text(json.dumps(held, default=str))
    (folder / "run.json").write_text(json.dumps({"schema": 1, "exit_code": exit_code, "script": "train.py"}))
    return folder


def claims(tmp_path, *ranks):
    """The claims about these ranks by their code, without those that another one explains."""
    comparison = RankComparison(write_ranks(tmp_path, *ranks))
    found = rank_claims(comparison)
    explained = {code for rule, _ in found for code in rule.explains}
    return {rule.code: claim for rule, claim in found if rule.code not in explained}


def pair(**second):
    """Two ranks of DDP, the second with something of its own."""
    return MadeRank(0), MadeRank(1, **second)


def apart(since, rank, kinds=("parameters",)):
    """Looks of a rank whose parameters differ from a step on, in the last tensor."""
    steps = [step for step in (0, 1, 2, 3, 5, 8, 12) if step >= since]
    base = {"parameters": 0, "gradients": 100, "moments": 200}
    return {step: {kind: prints(base[kind] + step, base[kind] + step, 7000 + rank) for kind in kinds} for step in steps}


__all__ = ["NAMES", "STEPS", "MadeRank", "RankLoader", "apart", "claims", "pair", "prints", "write_ranks", "write_run"]
