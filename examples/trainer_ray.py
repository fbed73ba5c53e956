"""Ray Train with two workers, guarded. One row of the data set is NaN, and one worker is killed during the run.

    python examples/trainer_ray.py

Needs `pip install -e ".[ray]"`. Runs offline on a CPU.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf

EPOCHS = 3


def train(config: dict) -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    labels = x[:, :4].argmax(1)
    x[500, 3] = float("nan")
    loader = prepare_data_loader(DataLoader(TensorDataset(x, labels), batch_size=16, shuffle=True))
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, rank = 0, ray.train.get_context().get_world_rank()
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    with sf.trainers.ray.GuardedWorker(model, optimizer, "surefoot") as guard:
        loss_fn = guard.watched(F.cross_entropy)
        for epoch in range(first, EPOCHS):
            loader.sampler.set_epoch(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
            if epoch == 1 and first == 0 and rank == 1:
                ray.train.get_all_reported_checkpoints()  # waits until Ray has the one of the first epoch
                os.kill(os.getpid(), signal.SIGKILL)  # as when a machine is lost
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                    torch.save(state, Path(folder) / "state.pt")
                    checkpoint = Checkpoint.from_directory(folder)
                counts = guard.training.attachments[0].counts
                guard.report({"epoch": epoch, "steps": counts["steps"], "applied": counts["applied"]}, checkpoint)


def main() -> None:
    storage = tempfile.mkdtemp()
    # Ray starts all workers anew if this takes longer than a minute, again and again on a machine that is too busy.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    settings = RunConfig(name="run", storage_path=storage, failure_config=FailureConfig(max_failures=2))
    metrics = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=settings).fit().metrics
    run = Path(storage) / "run" / "surefoot"
    for event in sf.load_run(run / "rank0").events:
        if event.event in ("skip", "resume"):
            print(f"step {event.step}: {event.summary}")
    print(f"{metrics['applied']:.0f} of {metrics['steps']:.0f} steps applied; see: surefoot report {run}")
    ray.shutdown()


if __name__ == "__main__":
    main()
