"""A script that tells at which of its lines each of its objects dies. Run by `test_lifetimes`, plainly and watched.

What is not part of a cycle dies with its last reference: at the same line, whoever watches.
"""

import atexit
import gc
import sys
import weakref
from types import FrameType

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

gc.disable()  # the collector runs after so many allocations, ours included
died: list[str] = []
alive: list[tuple[str, weakref.ref]] = []


def born(name, thing):
    """Note the death of a thing, and whether it ever comes."""
    alive.append((name, weakref.ref(thing, lambda _: died.append(name))))
    return thing


def told(line):
    print(line, sorted(died))
    died.clear()


class Payload:
    """Something a batch, a function or a module carries along."""


class Rows(Dataset):
    def __init__(self):
        self.table = born("table", np.random.default_rng(0).normal(size=(64, 20_000)).astype(np.float32))

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        return torch.from_numpy(self.table[index, :6].copy()), index % 3


class Batch:
    def __init__(self, rows):
        self.x = torch.stack([row for row, _ in rows])
        self.y = torch.tensor([label for _, label in rows])
        self.raw = born("raw array", np.zeros((600, 600)))
        born("batch", self)
        born("batch.x", self.x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.payload = born("payload of a function", Payload())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Net(nn.Module):
    def __init__(self, custom):
        super().__init__()
        self.first, self.second, self.custom = nn.Linear(6, 16), nn.Linear(16, 3), custom
        self.payload = born("payload of a model", Payload())

    def forward(self, x):
        hidden = born("hidden", torch.tanh(self.first(x)))
        if self.custom:
            hidden = Double.apply(hidden)
        return born("logits", self.second(hidden))


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, x):
        return self.module(x)


def loss_of(model, x, y):
    logits = model(x)
    return nn.functional.cross_entropy(logits, y) + 0.01 * logits.pow(2).mean()


def train(custom):
    model = born("model", Net(custom))
    optimizer = born("optimizer", torch.optim.Adam(model.parameters(), lr=1e-2))
    schedule = born("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 5))
    loader = born("loader", DataLoader(born("rows", Rows()), batch_size=16, collate_fn=Batch))
    unrelated = born("unrelated", Payload())
    step = 0
    for _ in range(5):
        for batch in loader:
            x = born("x", batch.x + 0)
            y = batch.y
            del batch
            told(f"step {step}: batch deleted")
            loss = born("loss", loss_of(model, x, y))
            told(f"step {step}: forward")
            del x
            told(f"step {step}: x deleted")
            loss.backward()
            told(f"step {step}: backward")
            del loss, y
            told(f"step {step}: loss deleted")
            optimizer.step()
            told(f"step {step}: step")
            optimizer.zero_grad()
            if step == 3:
                del unrelated
                told(f"step {step}: unrelated deleted")
            step += 1
    del schedule
    told("schedule deleted")
    with torch.no_grad():
        model(torch.zeros(2, 6))
    told("evaluated")
    del loader
    told("loader deleted")
    del optimizer
    told("optimizer deleted")
    del model
    told("model deleted")


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layer = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        return born("token logits", self.head(self.layer(born("embedded", self.table(ids)))[0]))


def train_language():
    model = born("language model", LanguageModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        ids = born("ids", torch.randint(0, 11, (4, 9)))
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 11), ids[:, 1:].reshape(-1))
        del logits
        told(f"language {step}: logits deleted")
        del ids
        told(f"language {step}: ids deleted")
        loss.backward()
        told(f"language {step}: backward")
        optimizer.step()
        optimizer.zero_grad()
        del loss
        told(f"language {step}: done")


def wrap():
    """A wrapper for each step, as a short-lived `DistributedDataParallel` is."""
    model = Net(custom=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        wrapper = born("wrapper", Wrapper(model))
        loss_of(wrapper, torch.randn(4, 6), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        del wrapper
        told(f"wrapper {step}")


def fail():
    """A forward that raises in the middle."""
    model = born("failing model", Net(custom=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        model(torch.zeros(2, 5))
    except RuntimeError:
        told("failed")
    del model, optimizer
    told("failing model deleted")


def accumulate():
    """Several batches for one step, and a pass over data that no step follows."""
    model = Net(custom=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for part in range(4):
            x = born("part", torch.randn(4, 6))
            model(x).pow(2).mean().backward()
            del x
            told(f"part {step}.{part}")
        optimizer.step()
        told(f"accumulated {step}")
    for batch in DataLoader(Rows(), batch_size=16, collate_fn=Batch):
        model(batch.x)
    del batch
    told("pass over data")


@atexit.register
def count():
    gc.collect()
    told("end")
    print("alive", sorted(name for name, held in alive if held() is not None))
    kinds = (
        nn.Module,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        DataLoader,
        Dataset,
        Payload,
        Batch,
    )
    things = gc.get_objects()
    print("objects", sorted(type(thing).__name__ for thing in things if issubclass(type(thing), kinds)))
    codes = [thing.f_code for thing in things if type(thing) is FrameType]
    print("frames", [code.co_name for code in codes if code.co_filename == __file__ and code.co_name != "count"])


torch.manual_seed(0)
scenarios = sys.argv[1:] or ["train", "custom", "language", "wrap", "fail", "accumulate"]
for scenario in scenarios:
    if scenario in ("train", "custom"):
        train(custom=scenario == "custom")
    else:
        {"language": train_language, "wrap": wrap, "fail": fail, "accumulate": accumulate}[scenario]()
    told(scenario)
