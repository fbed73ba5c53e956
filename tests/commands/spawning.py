"""A script that starts its ranks with `torch.multiprocessing.spawn`. Run by `test_spawned_run`, plainly and watched."""

import faulthandler
import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train():
    """Train on the rows of this rank, and return the bits of the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x.sum(1, keepdim=True))
    if dist.is_initialized():
        loader = DataLoader(rows, 32, sampler=DistributedSampler(rows), num_workers=1)
    else:
        loader = DataLoader(rows, 32)
    for inputs, targets in loader:
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


def worker(rank, count, how, place):
    """One spawned process."""
    faulthandler.dump_traceback_later(900, exit=True)
    torch.set_num_threads(1)
    if how == "computes":
        print("computed", torch.arange(4).sum().item(), flush=True)
        return
    if how == "alone":
        print(train(), flush=True)
        return
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=count)
    if how == "fails" and rank == 1:
        nn.Linear(6, 16)(torch.zeros(2, 3))
    Path(f"{place}-{rank}.txt").write_text(train())
    dist.destroy_process_group()


if __name__ == "__main__":
    _, how, place = sys.argv
    count = 1 if how in ("computes", "alone") else 2
    mp.spawn(worker, args=(count, how, place), nprocs=count)
    if how == "computes":
        print(train())
