"""The graph under a tensor is read without being changed, kept alive or run."""

import gc
import weakref

import torch

from surefoot.watch import autograd_graph as graph
from surefoot.watch.script_hooks import script_hooks


def a_loss():
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    return weight, (weight.log() * weight).sum()


def test_every_node_is_visited_once_nearest_to_the_root_first():
    weight, loss = a_loss()
    found = [graph.op(node) for node in graph.nodes(loss.grad_fn)]
    assert found == ["Sum", "Mul", "Log", "AccumulateGrad"]
    assert graph.leaves(loss.grad_fn)[0] is weight


def test_what_was_computed_first_comes_first():
    _, loss = a_loss()
    assert [graph.op(node) for node in graph.leaves_first(loss.grad_fn)] == ["AccumulateGrad", "Log", "Mul", "Sum"]


def test_a_long_chain_does_not_exhaust_the_stack_and_ends_at_the_limit(monkeypatch):
    value = torch.ones((), requires_grad=True)
    for _ in range(5_000):
        value = value + 1
    assert len(graph.leaves_first(value.grad_fn)) == 5_001
    monkeypatch.setattr(graph, "MOST_NODES", 100)
    assert len(list(graph.nodes(value.grad_fn))) == 100
    assert len(graph.leaves_first(value.grad_fn)) < 100


def test_a_tensor_without_a_graph_has_no_nodes():
    assert list(graph.nodes(None)) == []
    assert graph.leaves_first(None) == []


def test_saved_tensors_are_read_by_name_until_backward_frees_them():
    weight, loss = a_loss()
    log = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    assert graph.saved(log)["self"] is weight
    loss.backward()
    assert graph.saved(log) == {}


def test_saved_tensors_are_not_read_where_the_script_packs_them_itself(monkeypatch):
    unpacked = []
    monkeypatch.setattr(script_hooks, "saved", True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked.append):
        _, loss = a_loss()
    assert graph.saved(loss.grad_fn.next_functions[0][0]) == {}
    assert unpacked == []


def test_a_number_belongs_to_who_gave_it_and_dies_with_the_node():
    _, loss = a_loss()
    mine, other = object(), object()
    graph.mark(loss.grad_fn, mine, 7)
    assert graph.number_of(loss.grad_fn, mine) == 7
    assert graph.number_of(loss.grad_fn, other) is None
    gone = weakref.ref(loss)
    del loss
    gc.collect()
    assert gone() is None


def test_the_kind_of_backward_is_no_part_of_an_operation():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    x = torch.ones(2, requires_grad=True)
    assert graph.op(Doubled.apply(x).grad_fn) == "Doubled"
    assert graph.op(torch.nn.functional.gelu(x).grad_fn) == "Gelu"
