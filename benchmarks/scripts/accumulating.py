"""A loop as small GPT repositories write it: batches from a memory-mapped file through pinned memory, four microbatches
a step, a scheduled learning rate, a scaler that is there but off, a loss printed now and then."""

import math
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from gpt import GPT, Shape
from step_times import StepTimes

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHAPE = Shape(6, 384, 6, 512, 256) if CUDA else Shape(4, 128, 4, 256, 64)
BATCH, ACCUMULATE, STEPS = (32 if CUDA else 8), 4, (400 if CUDA else 160)
torch.manual_seed(0)
rng = np.random.default_rng(0)
file = Path(tempfile.mkdtemp()) / "train.bin"
(np.cumsum(rng.integers(0, 3, 200_000)) % SHAPE.vocabulary).astype(np.uint16).tofile(file)


def get_batch():
    data = np.memmap(file, dtype=np.uint16, mode="r")
    at = torch.randint(len(data) - SHAPE.context - 1, (BATCH,))
    x = torch.stack([torch.from_numpy(data[i : i + SHAPE.context].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + SHAPE.context].astype(np.int64)) for i in at])
    if CUDA:
        return x.pin_memory().to(DEVICE, non_blocking=True), y.pin_memory().to(DEVICE, non_blocking=True)
    return x, y


model = GPT(SHAPE).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=CUDA)
scaler = torch.amp.GradScaler(DEVICE, enabled=False)
context = torch.autocast("cuda", dtype=torch.bfloat16) if CUDA else nullcontext()
x, y = get_batch()
times = StepTimes(STEPS, waits=CUDA)
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    for _ in range(ACCUMULATE):
        with context:
            loss = model(x, y) / ACCUMULATE
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 50 == 0 and step < STEPS - 100:
        print(step, loss.item() * ACCUMULATE)
    times.step()
times.write()
