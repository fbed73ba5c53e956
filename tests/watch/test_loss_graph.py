"""The gradients that the nodes of a graph receive and return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.watch import autograd_graph as graph
from surefoot.watch.loss_graph import NodeHooks


def observed(loss: Tensor) -> tuple[NodeHooks, list[list[float]]]:
    """The hooks after a backward, and for each node the sums of what it received, computed on the spot."""
    hooks, sums = NodeHooks(None, lambda probe, observe, *args: observe(*args)), []
    nodes = list(graph.nodes(loss.grad_fn))

    def note(made: Any, given: Any) -> None:
        if any(tensor is not None for tensor in made):
            sums.append([tensor.sum(dtype=torch.float32).item() for tensor in given if tensor is not None])

    handles = [*hooks.register(nodes), *(node.register_hook(note) for node in nodes)]
    loss.backward()
    for handle in handles:
        handle.remove()
    return hooks, sums


def test_known_sums_are_those_of_what_each_node_receives_however_autograd_adds_gradients_up() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    for _ in range(4):
        x = x + layer(x)
        x = x * x.sigmoid()
    hooks, sums = observed(x.square().mean())
    assert [[total.item() for total in given] for _, _, given, _ in hooks._seen] == sums


def test_the_first_node_that_makes_gradients_non_finite_is_found() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    hooks, _ = observed((2 * x).sqrt().sum())
    found = hooks.first_bad()
    assert found is not None
    assert found.op == "Sqrt"


def test_finite_gradients_have_no_such_node() -> None:
    hooks, _ = observed(torch.ones(2, requires_grad=True).exp().sum())
    assert hooks.first_bad() is None
