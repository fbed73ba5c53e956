"""Small training scripts that an error of the accelerator ends, and some that none does.

    surefoot run device_errors.py DEVICE CASE

The cases are the functions below whose names begin with `case_`.
"""

import json
import os
import sys

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

DEVICE, CASE = sys.argv[1:3]
CUDA = DEVICE == "cuda"
ROWS, NARROW, WIDE = 2_048, 256, 8_192
"""What `wide` leaves held is `ROWS * WIDE` numbers: 64 MiB."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide, self.out = nn.Linear(64, NARROW), nn.Linear(NARROW, WIDE), nn.Linear(WIDE, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.wide(self.narrow(x))))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(50, 32), nn.Linear(32, 10)

    def forward(self, tokens):
        return self.head(self.wte(tokens))


def limit(gib):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)


def steps(count, rows=lambda step: ROWS, then=lambda step, model: None):
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step in range(count):
        optimizer.zero_grad()
        loss = model(torch.randn(rows(step), 64, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        then(step, model)
    return model


def case_peak():
    """Prints the peak that the script itself reads: it has reset it once, and then used 1 GiB for a moment."""

    def then(step, model):
        if step == 2 and CUDA:
            torch.cuda.reset_peak_memory_stats()
        if step == 4 and CUDA:
            torch.empty(2**28, device=DEVICE)

    steps(40, then=then)
    print(json.dumps(torch.cuda.max_memory_allocated() if CUDA else 0))


def case_grows():
    """Each batch is larger than the one before, until one does not fit."""
    limit(2)
    steps(400, rows=lambda step: ROWS * (1 + step))


def case_too_large():
    """The first batch does not fit."""
    limit(2)
    steps(10, rows=lambda step: 40 * ROWS)


def case_not_fatal():
    """An error of CUDA after which the device works as before; its message mentions device-side assertions, too."""
    steps(40)
    torch.cuda.set_device(99)


def case_illegal():
    """A kernel of the script's own writes far beyond its memory."""
    from kernel import write_at

    def then(step, model):
        if step == 30:
            write_at[(1,)](torch.zeros(8, device=DEVICE), 1 << 42)

    steps(60, then=then)
    torch.cuda.synchronize()


def case_ranks():
    """Two ranks on one GPU, which NCCL refuses."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
    steps(12)
    dist.all_reduce(torch.ones(1, device=DEVICE))  # the collective
    torch.cuda.synchronize()


def tokens(at):
    torch._inductor.config.compile_threads = 1  # no pool of processes
    torch.manual_seed(0)
    model = torch.compile(Tokens().to(DEVICE), backend="inductor" if CUDA else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(60):
        ids = torch.randint(50, (8, 16), device=DEVICE)
        labels = torch.randint(10, (128,), device=DEVICE)
        if step == at:
            ids[3, 5] = 50
        loss = F.cross_entropy(model(ids).view(-1, 10), labels)  # the compiled call
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(json.dumps(loss.item()))


def case_compiled():
    """Nothing goes wrong."""
    tokens(at=None)


def case_compiled_misfit():
    """An id is beyond the table of a compiled model."""
    tokens(at=30)


globals()[f"case_{CASE}"]()
