"""GPT-2 of 124M parameters as in `gpt_124m`, with the whole step captured in one CUDA graph by hand.

Nothing of Python runs in a replayed step, so `surefoot run` sees the steps before the capture and no others.
"""

import torch
from gpt import GPT, GPT_124M
from step_times import StepTimes

STEPS, WARM_UP = 400, 3
torch.manual_seed(0)
model = GPT(GPT_124M).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=True)
data = torch.randint(GPT_124M.vocabulary, (64, GPT_124M.context + 1), device="cuda")
batch = data[:8].clone()


def train() -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(WARM_UP):
        train()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = train()
times = StepTimes(STEPS)
for step in range(STEPS):
    at = 8 * (step % 8)
    batch.copy_(data[at : at + 8])
    graph.replay()
    times.step()
times.write()
if not torch.isfinite(loss):
    raise SystemExit(f"the loss of the last replay is {loss.item()}")
