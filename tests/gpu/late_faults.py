"""One case of training in which a step beyond every early window goes wrong.

    surefoot run [--guard] late_faults.py DEVICE CASE FAULT
    python late_faults.py DEVICE all leave-out

`FAULT` is `nan` (a number in the batch of step `AT` is not finite), `gradient` (an entry of one of its gradients is
not), `spike` (its targets are far off), or `leave-out`: the script itself leaves the batch of step `AT` out. The last
line of stdout is JSON: for each case, a digest of parameters, moments and step counts at its end. Under `--guard`,
`nan` and `gradient` end on the bits of `leave-out`.
"""

import hashlib
import json
import sys

import torch
import torch._inductor.config
from torch import nn
from torch.utils.data import DataLoader

AT, STEPS = 1_005, 1_030
OPTIMIZERS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW compiled model": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "Adam scaler": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "Adam scaler fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "LBFGS closure": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=4),
    "SGD closure": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
DEVICE, CASE, FAULT = sys.argv[1:4]


def batches():
    """One batch per step, on the device; that of step `AT` is spoiled."""
    rows = torch.randn(STEPS, 32, 8, generator=torch.Generator().manual_seed(1))
    answers = rows.sum(2, keepdim=True) / 4
    if FAULT == "nan":
        rows[AT, 3, 5] = float("nan")
    if FAULT == "spike":
        answers[AT] += 1e3
    return DataLoader(list(zip(rows.to(DEVICE), answers.to(DEVICE), strict=True)), batch_size=None)


def build(case):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(DEVICE)
    if "compiled" not in case:
        return model, model
    torch._inductor.config.compile_threads = 1  # no pool of processes
    return model, torch.compile(model, backend="inductor" if DEVICE == "cuda" else "aot_eager")


def train(case):
    model, called = build(case)
    optimizer = OPTIMIZERS[case](model.parameters())
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled="scaler" in case)
    for step, (x, y) in enumerate(batches()):
        if step == AT and FAULT == "leave-out":
            continue

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = (called(x) - y).square().mean()  # the loss
            scaler.scale(loss).backward()
            return loss

        if "closure" in case:
            optimizer.step(evaluate)
            continue
        evaluate()
        scaler.unscale_(optimizer)
        if step == AT and FAULT == "gradient":
            model[2].weight.grad[0, 3] = float("nan")
        scaler.step(optimizer)
        scaler.update()
    return digest(model.state_dict(), optimizer.state_dict()["state"])


def digest(*states):
    text = hashlib.sha256()
    for path, value in flat(states):
        shown = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        text.update(path.encode() + shown)
    return text.hexdigest()[:16]


def flat(value, path=""):
    """The tensors and numbers of a state, by path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from flat(item, f"{path}/{number}")
    else:
        yield path, value.detach().cpu() if isinstance(value, torch.Tensor) else value


print(json.dumps({case: train(case) for case in (OPTIMIZERS if CASE == "all" else [CASE])}))
