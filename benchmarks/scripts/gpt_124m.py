"""GPT-2 of 124M parameters, bf16 autocast, microbatch 8, fused AdamW, its own clip.

As an argument: `compiled`, or `graphs` for compiled code in CUDA graphs.
"""

import sys

import torch
from gpt import GPT, GPT_124M
from step_times import StepTimes

STEPS = 400
torch.manual_seed(0)
model = GPT(GPT_124M).cuda()
forward = torch.compile(model) if "compiled" in sys.argv else model
if "graphs" in sys.argv:
    forward = torch.compile(model, mode="reduce-overhead")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
data = torch.randint(GPT_124M.vocabulary, (64, GPT_124M.context + 1), device="cuda")
times = StepTimes(STEPS)
for step in range(STEPS):
    at = 8 * (step % 8)
    batch = data[at : at + 8]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = forward(batch[:, :-1], batch[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    times.step()
times.write()
