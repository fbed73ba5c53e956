"""What the calls of modules leave held is put down to the innermost module, and no counter is asked for in vain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.watch.context import WatchContext, WatchOptions
from surefoot.watch.function_recorder import FunctionRecorder
from surefoot.watch.model_calls import ModelCalls
from surefoot.watch.module_hooks import ModuleHooks
from surefoot.watch.module_memory import MOST_MODULES, ModuleMemoryNotes

DEVICE = torch.device("cpu")


class Allocator:
    """The counters of an allocator: what is given out, and the most that ever was."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reads = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def level(self, device: torch.device) -> tuple[float, float]:
        self.reads += 1
        return float(self.allocated), float(self.peak)


class Layer(nn.Module):
    """Keeps some bytes, and uses some more while it runs."""

    def __init__(self, allocator: Allocator, kept: int, used: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.allocator, self.kept, self.used = allocator, kept, used

    def forward(self, x):
        self.allocator.take(self.kept + self.used)
        self.allocator.take(-self.used)
        if self.kept < 0:
            raise torch.OutOfMemoryError("no memory left")
        return x * self.weight


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        layer.allocator.take(7)  # what is done beside the layers
        return x


@pytest.fixture
def hooked():
    """Notes that a step's module hooks are filling, by the counters of an allocator."""
    allocator = Allocator()
    context = WatchContext(WatchOptions())
    context.module_memory = ModuleMemoryNotes(lambda: [DEVICE], allocator.level)
    recorder = FunctionRecorder(lambda *_: None, context.probes.safely)
    hooks = ModuleHooks(context, recorder, ModelCalls(0, context.registry, None), lambda: False)
    hooks.add()
    yield allocator, context
    hooks.remove()
    assert context.probes.problems == {}


def found(context):
    return {(each.step, each.module): (each.held, each.peak) for each in context.module_memory.as_facts()}


def test_each_module_has_what_it_left_held_itself_and_the_highest_level_while_it_ran(hooked):
    allocator, context = hooked
    allocator.take(1_000)
    model = Model(Layer(allocator, 100, used=500), Layer(allocator, 300), Layer(allocator, 0))
    model(torch.ones(1))
    assert found(context) == {
        (0, "model.layers.1"): (300, 1_400),
        (0, "model.layers.0"): (100, 1_600),
        (0, "model"): (7, 1_600),
    }
    context.state.steps = 4
    model.layers[0].kept = 900
    model(torch.ones(1))
    assert found(context)[4, "model.layers.0"] == (900, 2_807)
    assert found(context)[0, "model.layers.0"] == (100, 1_600)


def test_of_several_calls_in_a_step_the_one_that_left_most_counts(hooked):
    allocator, context = hooked
    model = Model(Layer(allocator, 100))
    for kept in (100, 250, 50):  # microbatches, whose memory the backward gives back
        model.layers[0].kept = kept
        model(torch.ones(1))
        allocator.take(-kept)
    assert found(context)[0, "model.layers.0"][0] == 250


def test_a_call_that_an_error_ends_is_noted_with_all_above_it(hooked):
    allocator, context = hooked
    model = Model(Layer(allocator, 400), Layer(allocator, -1))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.ones(1))
    assert found(context) == {(0, "model.layers.0"): (400, 799)}
    assert context.module_memory._call.running == []


def test_only_the_largest_of_each_step_are_kept(hooked):
    allocator, context = hooked
    model = Model(*(Layer(allocator, size) for size in range(1, 40)))
    for context.state.steps in range(3):
        model(torch.ones(1))
    held = [each.held for each in context.module_memory.as_facts() if each.step == 2]
    assert held == list(range(39, 39 - MOST_MODULES, -1))
    assert len(context.module_memory.as_facts()) == 3 * MOST_MODULES


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_nothing_is_noted():
    notes = ModuleMemoryNotes()
    notes.enter(1, "model")
    notes.leave(1, 0)
    assert notes.as_facts() == []
