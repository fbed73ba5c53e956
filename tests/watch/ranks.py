"""A script for two ranks that trains in many distributed ways. Run by `test_ranks`, plainly and watched.

Each rank writes the bits of every loss and how many collectives there were. A hang ends with the stacks of all threads.
"""

import faulthandler
import gc
import os
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

faulthandler.dump_traceback_later(900, exit=True)
torch.set_num_threads(1)
rank, place = int(os.environ["RANK"]), Path(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
lines: list[str] = []


def tell(*words):
    lines.append(" ".join(map(str, words)))


def collectives():
    """How many this rank has started so far."""
    return dist.group.WORLD._get_sequence_number_for_group() + mesh.get_group()._get_sequence_number_for_group()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def train(name, model, steps=28, before_step=lambda: None, bad_at=None, bad=1000.0):
    """Steps with a loss on one rank that stands far out, or is not finite, once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(16, 6, generator=numbers)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        if step == bad_at and rank == 0:
            loss = loss * bad
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        tell(name, step, loss.item().hex())
    tell(name, "collectives", collectives())


def sharded(**settings):
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def short_lived_wrappers():
    """A wrapper for each step. Those that live on take part in every later backward."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    numbers = torch.Generator().manual_seed(rank)
    held = []
    for step in range(20):
        wrapper = DistributedDataParallel(model)
        held.append(weakref.ref(wrapper))
        x = torch.randn(16, 6, generator=numbers)
        loss = (wrapper(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del wrapper
        gc.collect()
        tell("wrappers", step, loss.item().hex())
    tell("wrappers", "alive", sum(each() is not None for each in held), "collectives", collectives())


class Unused(nn.Module):
    """A part of it takes part in every other step only."""

    def __init__(self):
        super().__init__()
        self.net, self.extra, self.count = network(), nn.Linear(6, 1), 0

    def forward(self, x):
        self.count += 1
        return self.net(x) + self.extra(x) if self.count % 2 else self.net(x)


def compressed():
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def tensor_parallel():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(network(), mesh, plan)


def clipped(name, model):
    train(name, model, 6, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def clipped_by_value(name, model):
    train(name, model, 4, lambda: nn.utils.clip_grad_value_(model.parameters(), 0.1))


def hybrid():
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    return fully_shard(network(), mesh=both)


def kept_whole():
    """Parameters stay gathered after the backward: whoever shards them alone gathers them alone."""
    model = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    return model


scenarios = {
    "reshard": lambda name: train(name, sharded(), bad_at=22),
    "whole": lambda name: train(name, sharded(reshard_after_forward=False), bad_at=22),
    "wrappers": lambda name: short_lived_wrappers(),
    "tensor parallel": lambda name: train(name, tensor_parallel(), bad_at=22),
    "unused": lambda name: train(name, DistributedDataParallel(Unused(), find_unused_parameters=True), 24, bad_at=22),
    "compressed": lambda name: train(name, compressed(), 4),
    "clipped": lambda name: clipped(name, sharded()),
    "clipped by value": lambda name: clipped_by_value(name, sharded()),
    "hybrid": lambda name: train(name, hybrid(), 6),
    "not finite": lambda name: train(name, kept_whole(), 6, bad_at=3, bad=float("nan")),
}
for name in sys.argv[2:] or scenarios:
    scenarios[name](name)
    gc.collect()
(place / f"rank{rank}.txt").write_text("\n".join(lines))
faulthandler.cancel_dump_traceback_later()
dist.destroy_process_group()
