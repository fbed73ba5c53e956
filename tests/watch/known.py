"""What a script can tell about functions of torch, as JSON. Run under `python` and under `surefoot run`.

known.py NAME...    the functions to look at, as `docs/run.md` names them
"""

import builtins
import collections
import contextlib
import copy
import hashlib
import importlib
import inspect
import json
import os
import pickle
import random
import sys
import time
import types
import warnings

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch import randperm as imported_before
from torch.distributions import Categorical, Normal, kl_divergence
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset


def find(name):
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise LookupError(name)


def places():
    """Everywhere that anything is held by a module, by its `id`."""
    found = collections.defaultdict(list)
    for name, module in sorted(sys.modules.items()):
        if name.startswith(("torch", "random", "os", "posix")) and isinstance(module, types.ModuleType):
            for key, held in list(vars(module).items()):
                found[id(held)].append(f"{name}.{key}")
    return found


def same_after(change, value):
    try:
        return change(value) is value
    except Exception as error:
        return type(error).__name__


def told(value, held_at):
    inner = inspect.unwrap(value)
    code = getattr(inner, "__code__", None)
    try:
        source = hashlib.md5(inspect.getsource(value).encode()).hexdigest()
    except Exception as error:
        source = type(error).__name__
    return {
        "type": str(type(value)) if not isinstance(value, types.BuiltinFunctionType) else "builtin",
        "repr": repr(value).split(" at 0x")[0],
        "signature": str(inspect.signature(value)),
        "source": source,
        "names": [value.__module__, value.__qualname__, value.__name__],
        "doc": str(value.__doc__),
        "defaults": repr(getattr(inner, "__defaults__", None)),
        "annotations": repr(getattr(inner, "__annotations__", None)),
        "attributes": sorted(vars(inner)) if hasattr(inner, "__dict__") and code else None,
        "is_wrapped": inner is not value,
        "closure": len(getattr(inner, "__closure__", None) or ()),
        "place": [code.co_filename, code.co_firstlineno, code.co_name] if code else None,
        "parameters": list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) if code else None,
        "globals": sorted(inner.__globals__) if code else None,
        "pickled": same_after(lambda f: pickle.loads(pickle.dumps(f)), value),
        "copied": same_after(copy.deepcopy, value),
        "aliases": held_at[id(value)],
        "resolved": str(resolve_name(value)),
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.first(x))))


def train(steps=16):
    """A loop with a bit of everything; its losses."""
    torch.manual_seed(0)
    x, net = torch.randn(64, 4), Net()
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    while len(losses) < steps:
        for rows, labels in loader:
            logits = net(rows)
            policy = Categorical(logits=logits)
            loss = F.cross_entropy(logits, labels) - 0.01 * policy.log_prob(policy.sample()).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            nn.utils.clip_grad_value_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            net(x)
    return losses[:steps]


# ---- devices, modes, transforms, compilers -------------------------------------------------------------------------


def devices():
    calls = {"randperm": (4,), "rand": (2,), "zeros": (2,), "arange": (3,), "tensor": (1.0,), "full": ((2,), 1.0)}
    found = {}
    with torch.device("meta"):
        for name, args in calls.items():
            found[name] = str(getattr(torch, name)(*args).device)
        found["imported before"] = str(imported_before(4).device)
    torch.set_default_device("meta")
    found["default"] = str(torch.randperm(4).device)
    torch.set_default_device(None)
    found["after"] = str(torch.randperm(4).device)
    return found


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen[str(resolve_name(func) or func.__name__)] += 1
        torch.rand(1)  # a draw: losses change if anybody else's calls come by here
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def modes():
    found = {}
    for kind in (Counting, Dispatched):
        mode = kind()
        with mode:
            found[kind.__name__] = [train(), sorted(mode.seen.items())]
    overridable = torch.overrides.get_overridable_functions()
    found["overridable"] = [torch.randperm in torch.utils._device._device_constructors()] + [
        value in overridable[torch.Tensor] for value in (torch.Tensor.backward, torch.Tensor.register_hook)
    ]
    return found


def transforms():
    def entropy(logits):
        return Categorical(logits=logits, validate_args=False).log_prob(torch.tensor(1)).sum()

    logits = torch.arange(6.0).reshape(2, 3)
    found = [torch.func.vmap(entropy)(logits).tolist(), torch.func.grad(entropy)(logits[0]).tolist()]

    def distance(mean):
        return kl_divergence(Normal(mean, 1.0, validate_args=False), Normal(0.0, 1.0, validate_args=False)).sum()

    return [*found, torch.func.vmap(torch.func.grad(distance))(logits).tolist()]


def compiled():
    found = {}
    model = nn.Linear(3, 3)

    def clips(x):
        model(x).sum().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def policy(x):
        with torch.no_grad():
            y = model(x)
        return Categorical(logits=y, validate_args=False).log_prob(torch.zeros(2)) + torch.randperm(2)

    def distance(x):
        return kl_divergence(Normal(x, 1.0, validate_args=False), Normal(0.0, 1.0, validate_args=False))

    for function in (clips, policy, distance):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        faster = torch.compile(function, backend="eager")
        for _ in range(3):
            faster(torch.ones(2, 3))
        found[function.__name__] = {
            key: dict(held)
            for key, held in torch._dynamo.utils.counters.items()
            if key in ("frames", "stats", "graph_break", "unimplemented", "recompiles")
        }
    whole = torch.compile(model, backend="eager")
    found["module"] = [
        whole(torch.ones(2, 3)).shape[1],
        str(torch._dynamo.explain(policy)(torch.ones(2, 3)).graph_break_count),
    ]
    return found


def scripted():
    def seeded(n: int):
        torch.manual_seed(3)
        return torch.randperm(n)

    return [torch.jit.script(seeded)(5).tolist(), str(torch.jit.script(seeded).graph).split("#")[0]]


# ---- warnings ------------------------------------------------------------------------------------------------------


def warned():
    """Everything that warns, with the file and line that the warning names."""

    def schedule():
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
        torch.optim.lr_scheduler.StepLR(optimizer, 1).step(3)

    def twice():
        nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward(create_graph=True)

    def workers():
        DataLoader(TensorDataset(torch.ones(4)), num_workers=99)

    def leaf():
        (nn.Linear(1, 1)(torch.ones(1, 1)) * 2).grad  # noqa: B018

    def clipping():
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)

    def replaced():
        torch.cuda.amp.GradScaler()
        torch.amp.GradScaler("cuda")
        torch.set_default_tensor_type(torch.FloatTensor)

    def hooks():
        model = nn.Linear(1, 1)
        model.register_backward_hook(lambda *given: None)
        model(torch.ones(1, 1, requires_grad=True)).sum().backward()

    def grads():
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad((x * x).sum(), x, only_inputs=False)
        torch.autograd.backward((x * x).sum(), grad_tensors=None, grad_variables=torch.tensor(1.0))

    found = []
    for call in (schedule, twice, workers, leaf, clipping, replaced, hooks, grads):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(Exception):
                call()
        found += [[call.__name__, each.filename, each.lineno, str(each.message)[:60]] for each in caught]
    return found


# ---- what the script replaces --------------------------------------------------------------------------------------

COUNTS = collections.Counter()
METHODS = ("to", "detach", "float", "double", "abs", "max", "min", "mean", "sum", "std", "item", "tolist", "reshape",
           "numel", "dim", "is_floating_point", "clone", "cpu", "sort", "unique", "norm", "any", "all", "argmax",
           "__len__", "__float__", "__getitem__", "__ne__", "__truediv__", "__bool__", "__hash__")  # fmt: skip
FUNCTIONS = {
    torch: ("stack", "isfinite", "is_grad_enabled", "unique", "equal", "_foreach_norm", "no_grad", "is_tensor"),
    torch.linalg: ("vector_norm",),
    F: ("softmax",),
    nn.Module: ("parameters", "named_parameters", "_named_members", "named_modules", "modules", "state_dict"),
    builtins: ("round", "sorted", "hash", "open"),
    time: ("monotonic", "time", "perf_counter"),
    random: ("random",),
}


def swapped():
    """Parameters of a model in training that are swapped for others, which torch refuses if anything refers to them."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    model = nn.Linear(4, 2)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4, dtype=dtype)).square().mean()
            loss.backward()
            optimizer.step()
    torch.__future__.set_swap_module_params_on_conversion(False)
    return [str(model.weight.dtype), loss.item()]


def replaced():
    """Losses, and how often each replaced function was called, all of which draw random numbers."""
    before = []
    draw, inside = torch.rand, [False]

    def replace(owner, name):
        original, key = getattr(owner, name), f"{getattr(owner, '__name__', owner)}.{name}"
        before.append((owner, name, vars(owner).get(name, before)))

        def drawing(*args, **kwargs):
            if not inside[0]:
                inside[0] = True
                try:
                    COUNTS[key] += 1
                    draw(1)
                finally:
                    inside[0] = False
            return original(*args, **kwargs)

        setattr(owner, name, drawing)

    for name in METHODS:
        replace(torch.Tensor, name)
    for owner, names in FUNCTIONS.items():
        for name in names:
            replace(owner, name)
    try:
        losses = train()
    finally:
        for owner, name, value in reversed(before):
            delattr(owner, name) if value is before else setattr(owner, name, value)
    return [losses, sorted(COUNTS.items())]


def subclassed():
    """A tensor subclass with methods, and `__torch_function__`, of its own."""
    counts = collections.Counter()

    class Own(torch.Tensor):
        def detach(self):
            counts["detach"] += 1
            torch.rand(1)
            return super().detach()

        def float(self):
            counts["float"] += 1
            return super().float()

        @property
        def shape(self):
            counts["shape"] += 1
            return super().shape

        def __len__(self):
            counts["len"] += 1
            return super().__len__()

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            counts["function"] += 1
            return super().__torch_function__(func, types, args, kwargs)

    class Dispatching(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            counts[str(func)] += 1
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    losses = []
    for kind in (Own, Dispatching):
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(12):
            x = (
                torch.randn(8, 4).as_subclass(Own)
                if kind is Own
                else torch.Tensor._make_subclass(kind, torch.randn(8, 4))
            )
            loss = net(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [losses, sorted(counts.items())]


def objects():
    """Objects of torch's that calls leave as they were."""
    loader = iter(DataLoader(TensorDataset(torch.ones(8)), 4))
    next(loader)
    policy = Categorical(logits=torch.ones(3, requires_grad=True))
    policy.log_prob(torch.tensor(1))
    context = torch.no_grad()
    with context:
        inside = sorted(vars(context))
    return [sorted(vars(loader)), sorted(vars(policy)), inside, os._exit is sys.modules["posix"]._exit]


if __name__ == "__main__":
    train()
    results = {"functions": {}}
    found = {name: getattr(*find(name)) for name in sys.argv[1:]}
    held_at = places()
    for name, value in found.items():
        results["functions"][name] = told(value, held_at)
    for part in (devices, objects, modes, transforms, warned, replaced, subclassed, scripted, compiled, swapped):
        results[part.__name__] = part()
    held_at = places()
    results["aliases"] = {
        name: held_at[id(value)] for name, value in vars(torch).items() if isinstance(value, types.BuiltinFunctionType)
    }
    if "surefoot.watch.patches" in sys.modules:
        from surefoot.watch.patches import installed
        from surefoot.watch.patches.table import table

        print(json.dumps({"table": table(installed[0])}), file=sys.stderr)
    print(json.dumps(results))
