"""An examination leaves model, optimizer, random streams and loader as they were, bit for bit."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doctor_faults import carries_state, keeps_graphs, label_too_large, nan_in_a_later_batch
from doctor_healthy import build, clusters
from surefoot.doctor.examine import examine

FAST = {"seconds": 0.1}


def fingerprint(model, optimizer, loader):
    """Everything that can be read of a setup, as bytes."""
    hooks = [
        (sorted(m._forward_hooks), sorted(m._forward_pre_hooks), sorted(m._backward_hooks)) for m in model.modules()
    ]
    gradients = [None if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]
    generator = getattr(loader, "generator", None)
    return pickle.dumps(
        {
            "parameters": [(n, p.detach().float().numpy().tobytes()) for n, p in model.named_parameters()],
            "versions": [p._version for p in model.parameters()],
            "buffers": [(n, b.numpy().tobytes()) for n, b in model.named_buffers()],
            "gradients": gradients,
            "requires": [p.requires_grad for p in model.parameters()],
            "modes": [m.training for m in model.modules()],
            "hooks": hooks,
            "optimizer": {k: str(v) for k, v in optimizer.state_dict().items()},
            "attributes": sorted(vars(optimizer)),
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": str(np.random.get_state()),
            "python": random.getstate(),
            "generator": None if generator is None else generator.get_state().numpy().tobytes(),
        }
    )


def trained_a_little(model, loader, loss_fn, optimizer):
    """So that there are gradients, moments and statistics to be lost."""
    batch = next(iter(loader))
    out = model(**batch) if isinstance(batch, dict) else model(batch[0])
    loss = out.loss if loss_fn is None else loss_fn(out, batch[-1])
    loss.backward()
    optimizer.step()


SETUPS = ("mlp", "cnn", "lstm", "vae", "own_loss", "frozen_body", "warming_up", "label_smoothing_sum")
"""One of each: dropout, batch norm, a recurrence, noise, keywords, frozen weights, a schedule, momentum."""


@pytest.mark.parametrize("name", SETUPS)
def test_a_healthy_setup_is_left_as_it_was(name):
    model, loader, loss_fn, optimizer = build(name)
    trained_a_little(model, loader, loss_fn, optimizer)
    before = fingerprint(model, optimizer, loader)
    examine(model, loader, loss_fn, optimizer, **FAST)
    assert fingerprint(model, optimizer, loader) == before


@pytest.mark.parametrize("setup", [label_too_large, nan_in_a_later_batch, keeps_graphs, carries_state])
def test_a_broken_setup_is_left_as_it_was(setup):
    torch.manual_seed(0)
    model, loader, loss_fn, optimizer = setup()
    before = fingerprint(model, optimizer, loader)
    examine(model, loader, loss_fn, optimizer, **FAST)
    assert fingerprint(model, optimizer, loader) == before
    assert getattr(model, "history", []) == []
    assert getattr(model, "state", None) is None


def test_what_a_loss_function_that_knows_the_model_does_to_it_is_undone():
    model, loader, _, optimizer = build("cnn")

    def loss_fn(prediction, y):
        with torch.no_grad():
            model[0].weight.mul_(1.01)
        return nn.functional.cross_entropy(prediction, y) + 1e-4 * model[0].weight.square().sum()

    weights = [p.detach().clone() for p in model.parameters()]
    examine(model, loader, loss_fn, optimizer, **FAST)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_graph_that_waits_for_its_backward_still_runs():
    model, loader, loss_fn, optimizer = build("mlp")
    x, y = next(iter(loader))
    loss = loss_fn(model(x), y)
    examine(model, loader, loss_fn, optimizer, **FAST)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_training_continues_bitwise_as_if_nobody_had_looked():
    def run(look):
        model, loader, loss_fn, optimizer = build("cnn")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for step, (x, y) in enumerate(loader):
            if look and step == 5:
                examine(model, loader, loss_fn, optimizer, **FAST)
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        return model.state_dict()

    one, other = run(False), run(True)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_model_in_eval_mode_stays_there():
    model, loader, loss_fn, optimizer = build("mlp")
    model.eval()
    examine(model, loader, loss_fn, optimizer, **FAST)
    assert not any(module.training for module in model.modules())


def test_a_loaders_own_generator_is_put_back():
    model, loader, loss_fn, optimizer = build("mlp")
    loader = DataLoader(loader.dataset, 32, shuffle=True, generator=torch.Generator().manual_seed(3))
    expected = [y for _, y in DataLoader(loader.dataset, 32, shuffle=True, generator=torch.Generator().manual_seed(3))]
    examine(model, loader, loss_fn, optimizer, **FAST)
    assert all(torch.equal(a, b) for a, (_, b) in zip(expected, loader, strict=True))


def test_persistent_workers_are_not_disturbed():
    model, loader, loss_fn, optimizer = build("mlp")
    loader = DataLoader(loader.dataset, 32, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    seen = [next(iterator)[1]]
    assert examine(model, loader, loss_fn, optimizer, **FAST).notes == ()
    seen += [y for _, y in iterator]
    expected = [y for _, y in DataLoader(loader.dataset, 32)]
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


class StatefulLoader:
    """A loader that remembers where it is, as torchdata's does."""

    def __init__(self, batches):
        self.batches, self.position = batches, 0

    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_a_loader_that_remembers_its_position_gets_it_back():
    model, loader, loss_fn, optimizer = build("mlp")
    stateful = StatefulLoader(list(loader))
    stateful.position = 3
    examine(model, stateful, loss_fn, optimizer, **FAST)
    assert stateful.position == 3


def test_an_iterator_loses_a_few_batches_and_a_note_says_so():
    model, loader, loss_fn, optimizer = build("mlp")
    batches = iter(list(loader))
    examination = examine(model, batches, loss_fn, optimizer, **FAST)
    assert len(list(batches)) == len(loader) - 4
    assert "4 batches were taken" in examination.notes[0]


def test_the_batches_themselves_are_not_written_to():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x):
            return self.layer(x.mul_(2.0))

    x, y = clusters(64)
    batches = [(x, y)]
    before = copy.deepcopy(batches)
    model = InPlace()
    examine(model, batches, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), **FAST)
    assert torch.equal(batches[0][0], before[0][0])


def test_the_examined_data_set_may_be_tiny():
    x, y = clusters(8)
    model = nn.Linear(16, 4)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    examination = examine(
        model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), seconds=0.5
    )
    assert examination["forward"].status == "pass"
