"""Under `surefoot run --guard`: one bad step in every kind of optimizer must leave no trace.

    surefoot run --guard guarded_steps.py DEVICE [healthy]

Each case trains twice from the same weights. The first run gets gradients that are not finite at two steps and calls
`step` all the same; the second does not call `step` there. With the guard both end on the same bits: parameters,
moments and step counts. The last line of stdout is JSON: the cases that differ, with what differs, and the number of
cases. With `healthy` nothing goes wrong, dropout draws random numbers, and the JSON holds a digest of how each case
ends: the same without surefoot.
"""

import copy
import hashlib
import json
import sys

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
CUDA = DEVICE == "cuda"
HEALTHY = sys.argv[2:] == ["healthy"]
STEPS, BAD = 6, () if HEALTHY else (0, 3)
"""The first step is bad too: an optimizer makes its state there."""


class Plain(nn.Module):
    """Two matrices and a vector; one of them has no gradient at some steps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)
        self.sometimes, self.drop = nn.Linear(4, 2, bias=False), nn.Dropout(0.2 if HEALTHY else 0.0)

    def forward(self, step):
        x = torch.linspace(-1, 1, 32, device=DEVICE).reshape(8, 4)
        out = self.second(self.drop(torch.tanh(self.first(x))))
        return (out + self.sometimes(x) if step % 2 != HEALTHY else out).square().mean() + out.mean()


class Table(nn.Module):
    """A table with sparse gradients, alone or beside a dense layer."""

    def __init__(self, dense):
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)
        self.dense = nn.Linear(4, 1, bias=False) if dense else None

    def forward(self, step):
        rows = self.table(torch.tensor([step % 8, 3, 3], device=DEVICE))
        return (rows if self.dense is None else self.dense(rows)).square().mean()


class Counting(Optimizer):
    """Not torch's: counts its steps in the group and decays parameters that have no gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        for group in self.param_groups:
            group["count"] += 1
            group.setdefault("made", True)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
        return loss


class Sharpness(Optimizer):
    """Not torch's: moves the parameters, evaluates the closure there, and moves them back."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            p.add_(0.05)
        with torch.enable_grad():
            loss = closure()
        for p in params:
            p.sub_(0.05)
            if p.grad is not None:
                p.sub_(0.1 * p.grad)
        return loss


class Derived(Adam):
    """Calls the `step` of its base after a step of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.999)
        return super().step(closure)


def has_fused(make):
    """Whether this torch has a fused kernel of an optimizer for the device."""
    tensor = torch.zeros(1, device=DEVICE, requires_grad=True)
    tensor.grad = torch.zeros_like(tensor)
    try:
        make([tensor], fused=True).step()
    except RuntimeError:
        return False
    return True


def torchs_own():
    """Every optimizer of torch, in every implementation that the device has."""
    kinds = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
    for kind in kinds:
        make = getattr(torch.optim, kind)
        options = {"weight_decay": 0.1} if kind != "Rprop" else {}
        options |= {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
        yield kind, make, options | {"foreach": False}
        yield f"{kind} foreach", make, options | {"foreach": True}
        if kind in ("Adam", "AdamW", "SGD") or (kind == "Adagrad" and has_fused(make)):
            yield f"{kind} fused", make, options | {"fused": True}
        if CUDA and kind not in ("SGD", "Adagrad"):
            yield f"{kind} capturable", make, options | {"capturable": True}
    yield "SGD fused, no momentum", SGD, {"fused": True}
    yield "Adam amsgrad fused", Adam, {"fused": True, "amsgrad": True}
    yield "SGD maximize nesterov", SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}
    yield "Adafactor", torch.optim.Adafactor, {}
    if hasattr(torch.optim, "Muon"):
        yield "Muon", torch.optim.Muon, {}


def cases():
    for name, make, options in torchs_own():
        yield name, Plain, lambda p, make=make, options=options: make(p, **options), {}
        yield f"{name}, closure", Plain, lambda p, make=make, options=options: make(p, **options), {"closure": True}
    yield "LBFGS", Plain, lambda p: torch.optim.LBFGS(p, max_iter=3), {"closure": True}
    search = lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe")  # noqa: E731
    yield "LBFGS strong_wolfe", Plain, search, {"closure": True}
    yield "SparseAdam", lambda: Table(False), lambda p: torch.optim.SparseAdam(p), {}
    yield "SparseAdam, closure", lambda: Table(False), lambda p: torch.optim.SparseAdam(p), {"closure": True}
    yield "SGD, a table beside a layer", lambda: Table(True), lambda p: SGD(p, lr=0.1), {}
    yield "Adagrad, a table beside a layer", lambda: Table(True), lambda p: torch.optim.Adagrad(p), {}
    for own in (Counting, Sharpness, Derived):
        if own is not Sharpness:
            yield own.__name__, Plain, own, {}
        yield f"{own.__name__}, closure", Plain, own, {"closure": True}
    for fused in (False, True):
        make = lambda p, fused=fused: torch.optim.AdamW(p, fused=fused)  # noqa: E731
        name = "fused" if fused else "not fused"
        yield f"a scaler, {name}, bad after unscale_", Plain, make, {"scaled": "after"}
        yield f"a scaler, {name}, overflow", Plain, make, {"scaled": "overflow"}
        yield f"a scaler, {name}, overflow before unscale_", Plain, make, {"scaled": "before"}
    yield "a hook that mends the gradient", Plain, mended, {"mended": True}
    if CUDA:
        yield "a gradient on a second device", TwoPlaces, lambda p: torch.optim.AdamW(p, foreach=False), {}


class TwoPlaces(nn.Module):
    """The bad gradient is on the device of the last parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)

    def to(self, device):
        self.first.to("cpu")
        self.second.to(device)
        return self

    def forward(self, step):
        return self.second(torch.tanh(self.first(torch.ones(3, 4))).to(DEVICE)).square().mean()


def mended(params):
    def mend(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.nan_to_num_(0.5, 0.5, 0.5)

    optimizer = SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(mend)
    return optimizer


def spoil(model):
    """One entry of one gradient."""
    gradient = [p.grad for p in model.parameters() if p.grad is not None][-1]
    values = gradient._values() if gradient.is_sparse else gradient
    values.view(-1)[1] = float("nan") if values.numel() % 2 else float("inf")


def train(model, optimizer, bad, closure=False, scaled="", mended=False):
    """`bad` is `spoil` (take the bad steps), `skip` (do not make them) or `mend` (as the hook would have it)."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=16.0, enabled=bool(scaled))
    returned = []
    for step in range(STEPS):
        spoiled = step in BAD

        def evaluate(step=step, spoiled=spoiled):
            optimizer.zero_grad()
            loss = model(step)
            scaler.scale(loss).backward()
            if spoiled and scaled != "after":
                spoil(model)
            return loss

        if spoiled and bad == "skip" and not scaled:
            continue
        if spoiled and bad == "skip" and scaled == "after":
            evaluate()
            scaler.unscale_(optimizer)
            scaler.update()
            continue
        if closure:
            returned.append(optimizer.step(closure=evaluate) if step % 2 else optimizer.step(evaluate))
            continue
        evaluate()
        if scaled in ("after", "before"):
            scaler.unscale_(optimizer)
        if scaled == "after" and spoiled:
            spoil(model)
        scaler.step(optimizer) if scaled else optimizer.step()
        scaler.update()
    return scaler, returned


def flat(value, path=""):
    """The tensors and numbers of a state, by path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    return {path: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value}


def differences(one, other):
    found = []
    for path in sorted({*one, *other}):
        a, b = one.get(path, "missing"), other.get(path, "missing")
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        else:
            same = type(a) is type(b) and a == b
        if not same:
            found.append(f"{path}: {a!r} / {b!r}"[:200])
    return found


def digest(*states):
    text = hashlib.sha256()
    for path, value in flat(states).items():
        shown = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        text.update(path.encode() + shown)
    return text.hexdigest()[:16]


def train_well():
    ends = {}
    for name, build, make, options in cases():
        torch.manual_seed(0)
        model = build().to(DEVICE)
        optimizer = make(list(model.parameters()))
        _, returned = train(model, optimizer, "spoil", **options)
        ends[name] = digest(model.state_dict(), optimizer.state_dict(), returned, torch.get_rng_state())
    print(json.dumps(ends))


def main():
    failed, count = {}, 0
    for name, build, make, options in cases():
        torch.manual_seed(0)
        model = build().to(DEVICE)
        twin = copy.deepcopy(model)
        ours, other = make(list(model.parameters())), make(list(twin.parameters()))
        scaler, returned = train(model, ours, "spoil", **options)
        # A scaler leaves its own overflows out; a hook that mends leaves nothing to leave out.
        alone = options.get("mended") or options.get("scaled") in ("overflow", "before")
        reference, _ = train(twin, other, "spoil" if alone else "skip", **options)
        wrong = differences(flat(model.state_dict()), flat(twin.state_dict()))
        wrong += differences(flat(ours.state_dict()), flat(other.state_dict()))
        wrong += differences(flat(scaler.state_dict()), flat(reference.state_dict()))
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            wrong.append("the parameters are not finite")
        if any(loss is None for loss in returned):
            wrong.append("step did not return the loss of its closure")
        if wrong:
            failed[name] = wrong[:4]
        count += 1
    print(json.dumps({"failed": failed, "cases": count}))


train_well() if HEALTHY else main()
