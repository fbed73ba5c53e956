"""Ray Train with two workers, as a program of its own: they train bare and guarded, and are killed and resumed.

    python ray_workers.py FOLDER KILLS

One worker is killed `KILLS` times; Ray starts both anew, and they go on from the last checkpoint. It prints how the
run ended, as JSON, compared with one that nobody killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

STEPS, BATCH, SAVE_EVERY, WORKERS = 48, 8, 5, 2
BAD_ROW = BATCH * 2 * 21 + 3
"""A row of a batch that only one of the workers gets: the other must leave the same step out."""


def train(folder: Path, *, guarded: bool, faults: dict[int, float], kills: list[int], name: str) -> dict[str, Any]:
    """One run, from the last checkpoint that Ray knows; returns how this worker ended."""
    import ray.train
    import torch
    from ray.train.torch import prepare_model

    import surefoot as sf
    from trainers.small_training import LR, Linear, Rows

    model = prepare_model(Linear())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rank, begin = ray.train.get_context().get_world_rank(), 0
    checkpoint = ray.train.get_checkpoint() if kills else None
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    guard = sf.trainers.ray.GuardedWorker(model, optimizer, Path(name), diagnose=False) if guarded else None
    rows = Rows(BATCH * WORKERS * STEPS, faults)
    for step in range(begin, STEPS):
        part = slice(BATCH * (WORKERS * step + rank), BATCH * (WORKERS * step + rank + 1))
        loss = model(rows.x[part], rows.labels[part])["loss"]
        if guard is not None:
            guard.observe(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if guard is not None and kills:
            _report(guard, model, optimizer, step + 1, rank, folder)
            _die(kills, step + 1, rank, folder)
    weights = {key: value.clone() for key, value in model.module.state_dict().items()}
    counts = {} if guard is None else guard.training.attachments[0].counts
    if guard is not None:
        guard.finish()
    return {"weights": weights, "counts": counts}


def _report(guard: Any, model: Any, optimizer: Any, step: int, rank: int, folder: Path) -> None:
    """Rank 0 saves model and optimizer, as in Ray's own examples; the other one gives no checkpoint."""
    import torch
    from ray.train import Checkpoint

    if step % SAVE_EVERY:
        return
    saved = folder / f"saving-{step}"
    if rank == 0:
        saved.mkdir(exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, saved / "state.pt")
    guard.report({"step": step}, Checkpoint.from_directory(saved) if rank == 0 else None)


def _die(kills: list[int], step: int, rank: int, folder: Path) -> None:
    """End this process as the machine would, once at each of these steps."""
    import ray.train

    done = folder / f"killed-{step}"
    if rank == 1 and step in kills and not done.exists():
        done.touch()
        ray.train.get_all_reported_checkpoints()  # waits until Ray has the checkpoints so far
        os.kill(os.getpid(), signal.SIGKILL)


def on_worker(config: dict[str, Any]) -> None:
    """What every worker runs: first what nobody interrupts, then the run whose second worker dies, again and again."""
    import torch

    folder, broken = Path(config["folder"]), {"guarded": True, "faults": config["faults"]}
    runs: dict[str, dict[str, Any]] = {"bare": {"guarded": False, "faults": {}, "kills": []}}
    runs |= {"healthy": {"guarded": True, "faults": {}, "kills": []}, "whole": {**broken, "kills": []}}
    runs |= {"killed": {**broken, "kills": config["kills"]}}
    for name, settings in runs.items():
        result = folder / f"{name}-{torch.distributed.get_rank()}.pt"
        if not result.exists():  # nor has the other worker's been written
            torch.save(train(folder, name=name, **settings), result)
            torch.distributed.barrier()


def _logged_steps(folder: Path) -> list[int]:
    import surefoot as sf

    return sf.load_run(folder).scalars.column("step").to_pylist()


def main(folder: Path, kills: int) -> None:
    import ray
    import torch
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from trainers.small_training import same

    steps = sorted(random.Random(7).sample(range(2, STEPS), kills))
    config = {"folder": str(folder), "faults": {BAD_ROW: float("nan")}, "kills": steps}
    session = ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error")
    failures = FailureConfig(max_failures=kills)
    settings = RunConfig(name="run", storage_path=str(folder / "storage"), failure_config=failures)
    scaling = ScalingConfig(num_workers=WORKERS)
    result = TorchTrainer(on_worker, train_loop_config=config, scaling_config=scaling, run_config=settings).fit()
    ray.shutdown()
    shutil.rmtree(session.address_info["session_dir"], ignore_errors=True)
    ended = {path.stem: torch.load(path) for path in folder.glob("*-?.pt")}
    found = {
        "healthy_equal": same(ended["bare-0"]["weights"], ended["healthy-0"]["weights"]),
        "counts_healthy": ended["healthy-1"]["counts"],
        "counts": [ended[f"whole-{rank}"]["counts"] for rank in range(WORKERS)],
        "counts_killed": [ended[f"killed-{rank}"]["counts"] for rank in range(WORKERS)],
        "kills": len(list(folder.glob("killed-*"))) - WORKERS,
        "killed_equal": all(
            same(ended[f"whole-{rank}"]["weights"], ended[f"killed-{rank}"]["weights"]) for rank in range(WORKERS)
        ),
        "steps_killed": [_logged_steps(folder / f"storage/run/killed/rank{rank}") for rank in range(WORKERS)],
        "reported": result.metrics,
        "logs": sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("run.json")),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]))
