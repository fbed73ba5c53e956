"""Training with a framework that is killed at random times, and resumed from the framework's own checkpoints.

    PYTHONPATH=src:tests python benchmarks/trainer_kills.py [--framework NAME ...] [--kills 20] [--seed 0]

A small model is trained with the callback, and its process is ended with SIGKILL: after a random number of steps, and
then a random part of a tenth of a second later, so that some kills hit a checkpoint that is being written. The next
process resumes from the last checkpoint. When training has reached its end, it is compared with one that nobody killed:
weights bit for bit, counts of the guard, and the run log, which must contain every step once: the rows up to a
checkpoint are written before it, and later steps are repeated. If kills are left, it begins again in another folder.

With `ray`, one of two workers kills itself at random steps, and Ray restarts both; the logs of both are compared.

The training functions are those of `tests/trainers/killed.py` and `tests/trainers/ray_workers.py`. Exits with 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from trainers import killed, ray_workers

DELAY_S = 0.1
"""The longest time between the last counted step and the kill."""


def kill_repeatedly(framework: str, folder: Path, kills: int, seed: int) -> bool:
    """Kill and resume one framework's training; prints a line, and returns whether all of it was equal."""
    import torch

    from trainers.small_training import same

    train, chance, done, runs, torn = killed.preload(framework), random.Random(seed), 0, 0, 0
    for name in ("surefoot", "lightning.pytorch"):  # importing Lightning sets its level
        logging.getLogger(name).setLevel(logging.ERROR)
    (folder / "whole").mkdir(parents=True)
    killed.attempt(train, folder / "whole", None)
    whole, differences = torch.load(folder / "whole" / "ended.pt"), []
    while done < kills:
        runs += 1
        here = folder / f"killed-{runs}"
        here.mkdir()
        while done < kills:
            after, delay_s = chance.randint(1, 2 * killed.SAVE_EVERY + 1), chance.uniform(0, DELAY_S)
            if not killed.attempt(train, here, after, delay_s):
                break
            done += 1
            torn += _is_torn(framework, here)
        killed.attempt(train, here, None)
        ended = torch.load(here / "ended.pt")
        differences += [name for name in ended if not same(whole[name], ended[name])]
        logged = killed.logged_steps(here)
        missing = sorted(set(range(killed.STEPS)) - set(logged))
        differences += [f"no row of steps {missing}"] if missing else []
        differences += [] if len(logged) == len(set(logged)) else ["steps that were logged twice"]
    result = "equal" if not differences else f"DIFFERENT: {', '.join(sorted(set(differences)))}"
    while_saving = f", {torn} of them left an incomplete checkpoint" if framework in ("transformers", "trl") else ""
    print(
        f"{framework:13} {done} kills in {runs} runs of {killed.STEPS} steps{while_saving}: {result}",
        flush=True,
    )
    return not differences


def _is_torn(framework: str, folder: Path) -> bool:
    """Whether the process was killed while Transformers wrote a checkpoint."""
    return framework in ("transformers", "trl") and any(
        not (each / "trainer_state.json").exists() for each in folder.glob("checkpoint-*")
    )


def kill_workers(folder: Path, kills: int) -> bool:
    """Ray Train with two workers, one of which is killed; prints a line, and returns whether all of it was equal."""
    folder.mkdir(parents=True)
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    quiet |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [sys.executable, ray_workers.__file__, str(folder), str(kills)]
    path = os.pathsep.join(sys.path)
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | quiet | {"PYTHONPATH": path})
    if ended.returncode:
        print(f"ray           failed: {ended.stderr[-2000:]}")
        return False
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    is_equal = found["killed_equal"] and found["counts"] == found["counts_killed"] and found["kills"] == kills
    is_equal = is_equal and found["steps_killed"] == [list(range(ray_workers.STEPS))] * ray_workers.WORKERS
    print(f"{'ray':13} {found['kills']} kills in 1 run: {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return is_equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*killed.FRAMEWORKS, "ray"]
    parser.add_argument("--framework", choices=names, nargs="*", default=names)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    for framework in chosen.framework:
        with tempfile.TemporaryDirectory() as folder:
            if framework == "ray":
                results.append(kill_workers(Path(folder) / framework, chosen.kills))
            else:
                results.append(kill_repeatedly(framework, Path(folder) / framework, chosen.kills, chosen.seed))
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
