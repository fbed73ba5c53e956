"""Which hand-written residual blocks are post-norm, by their source."""

import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.build import advise_normalization
from surefoot.build.residual_order import post_norms


class Block(nn.Module):
    def __init__(self, norm_first=False, order="post"):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.drop = nn.Dropout(0.1)
        self.norm_first, self.order = norm_first, order

    def attend(self, x):
        return self.drop(self.attn(x, x, x)[0])

    def attend_normed(self, x):
        return self.attend(self.norm1(x))


class PostNorm(Block):
    def forward(self, x):
        x = self.norm1(x + self.drop(self.attn(x, x, x)[0]))
        return self.norm2(x + self.mlp(x))


class PostNormInSteps(Block):
    def forward(self, x, mask=None):
        residual = x
        if mask is not None:
            out, _ = self.attn(x, x, x, attn_mask=mask)
        else:
            out, _ = self.attn(x, x, x)
        x = residual + self.drop(out)
        x = self.norm1(x)
        x += F.gelu(self.mlp(x)).clone()
        return self.norm2(x)


class PostNormWithMethod(Block):
    def forward(self, x):
        return self.norm1(self.attend(x) + x)


class PreNorm(Block):
    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y)[0]
        return x + self.mlp(self.norm2(x))


class PreNormAndFinalNorm(Block):
    def forward(self, x):
        y = self.norm1(x)
        x = x + self.drop(self.attn(y, y, y)[0])
        x = x + self.mlp(self.norm2(x))
        return self.norm3(x)


class PreNormInMethod(Block):
    def forward(self, x):
        x = x + self.attend_normed(x)
        return self.norm3(x)


class NormOfBranch(Block):
    """Swin v2: the norm is behind the branch and before the sum."""

    def forward(self, x):
        x = x + self.norm1(self.attn(x, x, x)[0])
        return x + self.norm2(self.mlp(x))


class NormOfTwoBranches(Block):
    def forward(self, x):
        return x + self.norm1(self.mlp(x) + self.attend(x))


class SumUsedAgain(Block):
    def forward(self, x):
        x = x + self.mlp(x)
        return x + self.attend(self.norm1(x))


class EmbeddingOfPositions(Block):
    """The positions depend on the length of the input, not on its values."""

    def forward(self, x):
        positions = torch.ones(1, x.shape[1], 16) * x.size(1)
        return self.norm1(x + self.mlp(positions))


class UnknownFunction(Block):
    def forward(self, x):
        return self.norm1(x + run(self.mlp, x))


class Chosen(Block):
    def forward(self, x):
        if self.norm_first:
            x = x + self.mlp(self.norm1(x))
        else:
            x = self.norm1(x + self.mlp(x))
            x = self.norm2(x + self.attend(x))
        return x


class ChosenByReturn(Block):
    def forward(self, x):
        if self.order == "pre":
            return x + self.mlp(self.norm1(x))
        return self.norm1(x + self.mlp(x))


class ChosenByArgument(Block):
    def forward(self, x, norm_first=True):
        if norm_first:
            return x + self.mlp(self.norm1(x))
        return self.norm1(x + self.mlp(x))


def run(module, x):
    return module(x)


@pytest.mark.parametrize(
    ("block", "norms"),
    [
        (PostNorm(), ["norm1", "norm2"]),
        (PostNormInSteps(), ["norm1", "norm2"]),
        (PostNormWithMethod(), ["norm1"]),
        (Chosen(norm_first=False), ["norm1", "norm2"]),
        (ChosenByReturn(order="post"), ["norm1"]),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_norms_of_plain_residuals_are_found(block, norms):
    assert list(post_norms(block)) == [("", norms)]
    assert block(torch.randn(2, 3, 16)).isfinite().all()


@pytest.mark.parametrize(
    "block",
    [
        PreNorm(),
        PreNormAndFinalNorm(),
        PreNormInMethod(),
        NormOfBranch(),
        NormOfTwoBranches(),
        SumUsedAgain(),
        EmbeddingOfPositions(),
        UnknownFunction(),
        Chosen(norm_first=True),
        ChosenByReturn(order="pre"),
        ChosenByArgument(),
    ],
    ids=lambda block: type(block).__name__,
)
def test_other_orders_and_what_cannot_be_read_are_not_reported(block):
    assert list(post_norms(block)) == []


class Stack(nn.Module):
    def __init__(self, block, count):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.final = nn.LayerNorm(16)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.final(x)


class Inline(nn.Module):
    """Blocks without a class of their own, and a final norm after the last residual."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(8))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.final = nn.LayerNorm(16)

    def forward(self, x):
        for index in range(8):
            x = x + self.layers[index](self.norms[index](x))
        return self.final(x)


def test_hand_written_post_norm_layers_are_advised_against():
    (advice,) = advise_normalization(Stack(PostNorm, 8), batch_size=32)
    assert (advice.where, advice.severity) == ("blocks.0.norm1", "warning")
    assert "8 post-norm layers" in advice.problem
    assert "`x + branch(norm(x))`" in advice.advice
    assert advise_normalization(Stack(PostNorm, 5), batch_size=32) == []


@pytest.mark.parametrize("model", [Stack(PreNorm, 12), Stack(PreNormAndFinalNorm, 12), Inline()])
def test_pre_norm_models_and_their_final_norm_get_no_advice(model):
    assert advise_normalization(model, batch_size=32) == []


def test_a_forward_without_source_gets_no_advice():
    space = {"nn": nn, "Block": Block}
    exec("class Typed(Block):\n    def forward(self, x):\n        return self.norm1(x + self.mlp(x))\n", space)
    assert list(post_norms(space["Typed"]())) == []


def test_reading_a_long_forward_takes_no_exponential_time():
    lines = "".join("        x = x + self.mlp(x)\n" for _ in range(200))
    source = f"class Long(Block):\n    def forward(self, x):\n{lines}        return self.norm1(x)\n"
    linecache.cache["<long>"] = (len(source), None, source.splitlines(keepends=True), "<long>")
    space = {"Block": Block}
    exec(compile(source, "<long>", "exec"), space)
    assert list(post_norms(space["Long"]())) == [("", ["norm1"])]
