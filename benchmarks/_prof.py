import cProfile
import pstats
import sys
import time
import traceback
import warnings

import torch

sys.path.insert(0, ".")
from gpt import *
from torch import nn

import surefoot as sf

warnings.simplefilter("always")


def show(m, c, f, l, file=None, line=None):
    if "synchronizing" in str(m):
        traceback.print_stack(limit=12)


warnings.showwarning = show
ps = parameter_list(GPT_124M, torch.float32, "cuda")
m = nn.ParameterList(ps)
o = torch.optim.AdamW(ps, lr=1e-9, fused=True)
st = sf.TrainingStabilizer(m, o, zero_grad=False)
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("warn")
for i in range(10):
    st.step()
torch.cuda.set_sync_debug_mode("default")
print("recorded", len(st._graphed._recorded), st._graphed._usable)
for _ in range(3):
    torch.cuda.synchronize()
    t = time.perf_counter()
    for i in range(100):
        st.step()
    a = time.perf_counter()
    torch.cuda.synchronize()
    b = time.perf_counter()
    print("host ms/step", (a - t) * 10, "total", (b - t) * 10)
p = cProfile.Profile()
p.enable()
for i in range(200):
    st.step()
p.disable()
pstats.Stats(p).sort_stats("tottime").print_stats(28)
from torch.profiler import ProfilerActivity, profile

torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CUDA]) as pr:
    for i in range(5):
        st.step()
    torch.cuda.synchronize()
print(pr.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))
