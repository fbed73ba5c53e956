"""What makes a step fit into memory, and which modules should stay in float32.

    python benchmarks/fit_in_memory.py

First table: the bytes that autograd keeps for the backward pass of a small transformer (counted through
`saved_tensors_hooks`, each storage once, parameters left out), whole, in microbatches, with recomputed blocks, and with
both; and the time of a step beside the plain one. Second table: the same model in bf16 and fp16 autocast, one kind of
module at a time; the error is the distance of the gradient from that in float32, relative to its norm.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, ROWS, BLOCKS, WORDS = 64, 64, 8, 8, 256


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then two linear layers, each added to its input."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embedding, blocks, norm and output layer; `recompute` is how many blocks are recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.recompute = 0

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i < self.recompute else block(x)
        return self.head(self.norm(x))


def step(model: Decoder, ids: Tensor, pieces: int) -> tuple[int, float]:
    """The largest number of bytes kept for a backward pass, and the seconds of forward and backward."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    most, began = 0, time.perf_counter()
    for part in ids.chunk(pieces):
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) * len(part) / len(ids)
        most = max(most, sum(kept.values()))
        loss.backward()
    return most, time.perf_counter() - began


def memory(model: Decoder, ids: Tensor) -> None:
    """Print the first table."""
    rows = []
    for name, pieces, recompute in (
        ("whole batch", 1, 0),
        ("2 microbatches", 2, 0),
        ("4 microbatches", 4, 0),
        ("half of the blocks recomputed", 1, BLOCKS // 2),
        ("all blocks recomputed", 1, BLOCKS),
        ("2 microbatches, all blocks recomputed", 2, BLOCKS),
    ):
        model.recompute = recompute
        tries = []
        for _ in range(4):
            model.zero_grad()
            tries.append(step(model, ids, pieces))
        gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        rows.append((name, tries[0][0], min(seconds for _, seconds in tries), gradient))
    model.recompute = 0
    _, plain, seconds, reference = rows[0]
    print(f"{'':40s} {'kept for backward':>18s} {'of plain':>9s} {'time':>6s} {'gradient differs by':>20s}")
    for name, kept, took, gradient in rows:
        error = float((gradient - reference).norm() / reference.norm())
        print(f"{name:40s} {kept / 2**20:14.1f} MiB {kept / plain:9.2f} {took / seconds:6.2f} {error:20.1e}")


def precision(model: Decoder, ids: Tensor) -> None:
    """Print the second table."""
    kinds = {
        "linear layers of attention": lambda name: name.endswith(("qkv", "out")),
        "linear layers of the MLP": lambda name: name.endswith(("up", "down")),
        "LayerNorm": lambda name: "norm" in name,
        "output layer": lambda name: name == "head",
    }
    reference = gradient_of(model, ids)
    print(f"\n{'in half precision alone':40s} {'bf16: error':>18s} {'fp16: error':>18s}")
    for kind, chosen in kinds.items():
        errors = []
        for dtype in (torch.bfloat16, torch.float16):
            hooks = [cast(module, dtype) for name, module in model.named_modules() if chosen(name)]
            errors.append(float((gradient_of(model, ids) - reference).norm() / reference.norm()))
            for module, forward in hooks:
                module.forward = forward  # type: ignore[method-assign]
        print(f"{kind:40s} {errors[0]:18.1e} {errors[1]:18.1e}")


def cast(module: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, object]:
    """Let a module compute in another type, inputs and weights, and return float32; returns it with its own forward."""
    forward = module.forward

    def lower(x: Tensor) -> Tensor:
        weights = {name: each.to(dtype) for name, each in module.named_parameters()}
        module.forward = forward  # type: ignore[method-assign]
        try:
            return torch.func.functional_call(module, weights, (x.to(dtype),)).float()
        finally:
            module.forward = lower  # type: ignore[method-assign]

    module.forward = lower  # type: ignore[method-assign]
    return module, forward


def gradient_of(model: Decoder, ids: Tensor) -> Tensor:
    """The gradient of all parameters, in one vector."""
    model.zero_grad()
    F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).clone()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    torch.manual_seed(0)
    decoder, tokens = Decoder(), torch.randint(0, WORDS, (ROWS, LENGTH + 1))
    memory(decoder, tokens)
    precision(decoder, tokens[:4])
