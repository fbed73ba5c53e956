"""Steps that go non-finite for a known reason, and steps that only look as if they might.

Each fault is a small model with its batch. `op` is the operation that makes the first value which is not finite,
without `aten.`; the line that calls it (in backward, the line whose backward it is) is marked `# here`. A fault whose
value was bad before any operation names the `tensor` instead. The healthy ones end with a finite loss and finite
gradients, whatever happens on the way.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

INF = float("inf")


class Net(nn.Module):
    """A model whose forward is a function, with the parts it uses."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._forward_of = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *batch: Any) -> Any:
        return self._forward_of(self, *batch)


@dataclass
class Step:
    """What a fault or a healthy case builds."""

    model: nn.Module
    batch: tuple[Any, ...] = ()
    run: Callable[[], Any] | None = None
    """The step, if it is more than the model called on the batch."""

    def __call__(self) -> Any:
        return self.model(*self.batch) if self.run is None else self.run()


@dataclass(frozen=True)
class Fault:
    """A step with what is wrong in it."""

    name: str
    build: Callable[[], Step]
    op: str
    phase: str
    module: str = ""
    tensor: str = ""
    line: int = field(default=0)


FAULTS: list[Fault] = []
HEALTHY: dict[str, Callable[[], Step]] = {}


def fault(
    op: str = "", phase: str = "forward", *, module: str = "Net", tensor: str = ""
) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    def register(build: Callable[[], Step]) -> Callable[[], Step]:
        lines, first = inspect.getsourcelines(build)
        marked = [first + i for i, text in enumerate(lines) if "# here" in text]
        assert len(marked) == (0 if tensor else 1), build.__name__
        FAULTS.append(Fault(build.__name__, build, op, phase, module, tensor, marked[0] if marked else 0))
        return build

    return register


def healthy(build: Callable[[], Step]) -> Callable[[], Step]:
    HEALTHY[build.__name__] = build
    return build


# ---- forward ----------------------------------------------------------------------------------------------------


@fault("log")
def log_of_zero() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        probability = net.head(x).relu() * 0
        score = probability.log()  # here
        return -(score * 0.5).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("exp")
def exp_overflow() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        rate = torch.exp(net.head(x) * 0 + 100)  # here
        return (rate / rate.sum()).square().mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("_softmax")
def fully_masked_softmax() -> Step:
    def forward(net: Any, x: Tensor, mask: Tensor) -> Tensor:
        scores = net.query(x) @ net.key(x).T
        scores = scores.masked_fill(mask, -INF)
        weights = scores.softmax(-1)  # here
        return (weights @ x).square().mean()

    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    mask[3] = True
    return Step(Net(forward, query=nn.Linear(4, 4), key=nn.Linear(4, 4)), (torch.randn(6, 4), mask))


@fault("_softmax", module="Net")
def additive_mask_of_a_whole_row() -> Step:
    def forward(net: Any, x: Tensor, bias: Tensor) -> Tensor:
        scores = net.query(x) @ x.T + bias
        return (scores.softmax(-1) @ x).square().mean()  # here

    bias = torch.zeros(6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -INF)
    bias[2] = -INF
    return Step(Net(forward, query=nn.Linear(4, 4)), (torch.randn(6, 4), bias))


@fault("mul")
def mask_made_by_multiplying_with_inf() -> Step:
    def forward(net: Any, x: Tensor, keep: Tensor) -> Tensor:
        bias = (1.0 - keep) * -INF  # here
        return (net.head(x) + bias).softmax(-1).square().mean()

    keep = torch.ones(8, 3)
    keep[:, 2] = 0
    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4), keep))


@fault("addmm", module="second")
def fp16_overflow_in_a_matmul() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x).relu() * 1_000
        out = net.second(hidden)  # here
        return out.float().mean()

    torch.manual_seed(0)
    model = Net(forward, first=nn.Linear(16, 64), second=nn.Linear(64, 4)).half()
    with torch.no_grad():
        model.second.weight.fill_(20.0)
    return Step(model, (torch.rand(8, 16).half() + 1,))


@fault("_to_copy", module="Net")
def fp16_cast_of_a_large_value() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        scaled = net.head(x).square() * 1e6
        return scaled.half().float().mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4) + 3,))


@fault("bmm", module="Net")
def attention_in_half_precision() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        query, key = net.query(x), net.key(x)
        scores = torch.bmm(query, key.transpose(1, 2))  # here
        weights = (scores / 8).softmax(-1)
        return torch.bmm(weights, x).float().square().mean()

    model = Net(forward, query=nn.Linear(64, 64), key=nn.Linear(64, 64))
    with torch.no_grad():
        model.query.weight.copy_(torch.eye(64) * 60)
        model.key.weight.copy_(torch.eye(64) * 60)
    return Step(model.half(), (torch.ones(2, 5, 64).half(),))


@fault("div")
def division_by_a_zero_norm() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.head(x).relu()
        unit = hidden / hidden.norm(dim=1, keepdim=True)  # here
        return unit.square().mean()

    model = Net(forward, head=nn.Linear(4, 3))
    with torch.no_grad():
        model.head.bias.fill_(-100.0)
    return Step(model, (torch.randn(8, 4),))


@fault("div")
def normalized_by_a_sum_of_zeros() -> Step:
    def forward(net: Any, counts: Tensor) -> Tensor:
        share = counts / counts.sum(1, keepdim=True)  # here
        return net.head(share).square().mean()

    counts = torch.rand(8, 4)
    counts[5] = 0
    return Step(Net(forward, head=nn.Linear(4, 3)), (counts,))


@fault("div")
def division_of_integers() -> Step:
    def forward(net: Any, x: Tensor, hits: Tensor, tries: Tensor) -> Tensor:
        rate = hits / tries  # here
        return (net.head(x).squeeze(1) * rate).mean()

    return Step(
        Net(forward, head=nn.Linear(4, 1)), (torch.randn(3, 4), torch.tensor([1, 0, 2]), torch.tensor([2, 0, 4]))
    )


@fault("rsqrt")
def rsqrt_of_zero() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.head(x) * 0
        scale = torch.rsqrt(hidden.square().mean(1, keepdim=True))  # here
        return (hidden * scale).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("pow")
def power_of_a_negative_base() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return (net.head(x) - 10).pow(0.5).mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("acos")
def acos_out_of_range() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        cosine = F.cosine_similarity(net.head(x), x) * 1.5
        return torch.acos(cosine).mean()  # here

    model = Net(forward, head=nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(4))
    return Step(model, (torch.randn(8, 4),))


@fault("log1p")
def log1p_of_minus_one() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.log1p(-torch.ones_like(net.head(x)) + net.head(x) * 0).mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("logit")
def logit_of_one() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        probability = torch.sigmoid(net.head(x) + 100)
        return torch.logit(probability).mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("lgamma")
def lgamma_at_a_pole() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        concentration = net.head(x).relu() * 0
        return torch.lgamma(concentration).mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("native_batch_norm")
def batch_norm_of_a_constant_with_eps_zero() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        norm = net.norm
        running = (norm.running_mean, norm.running_var)
        out = torch.batch_norm(x, norm.weight, norm.bias, *running, False, 0.1, 0.0, False)  # here
        return net.head(out).square().mean()

    model = Net(forward, norm=nn.BatchNorm1d(4), head=nn.Linear(4, 3)).eval()
    model.norm.running_var[1] = 0.0  # a feature that never changed while it was trained
    return Step(model, (torch.randn(8, 4),))


@fault("native_layer_norm", module="norm")
def layer_norm_of_a_constant_with_eps_zero() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(net.norm(x)).square().mean()  # here

    constant = torch.randn(8, 4)
    constant[1] = 2.0
    return Step(Net(forward, norm=nn.LayerNorm(4, eps=0.0), head=nn.Linear(4, 3)), (constant,))


@fault("std")
def std_of_one_row() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.head(x)
        centred = hidden - hidden.mean(0)
        return (centred / (hidden.std(0) + 1e-6)).square().mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(1, 4),))


@fault("nll_loss_forward")
def no_target_left() -> Step:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.head(x), y, ignore_index=-100)  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4), torch.full((8,), -100)))


@fault("nll_loss_forward")
def class_weights_of_zero() -> Step:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        weight = torch.tensor([0.0, 1.0, 1.0])
        return F.cross_entropy(net.head(x), y, weight)  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)))


@fault("reciprocal")
def class_weights_of_absent_classes() -> Step:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        weight = 1.0 / torch.bincount(y, minlength=3)  # here
        return F.cross_entropy(net.head(x), y, weight, label_smoothing=0.1)

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)))


@fault("mul")
def exploding_recurrence() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        state = net.cell(x[0])
        for _ in range(12):
            state = state * state * 1e4  # here
        return state.mean()

    return Step(Net(forward, cell=nn.Linear(4, 3)), (torch.randn(5, 8, 4),))


@fault("mean")
def mean_of_nothing() -> Step:
    def forward(net: Any, x: Tensor, chosen: Tensor) -> Tensor:
        out = net.head(x)
        return out.mean() + out[chosen].mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4), torch.zeros(8, dtype=torch.bool)))


@fault("div", module="Net")
def bad_value_through_a_python_number() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.head(x)
        ratio = out.sum() / (out - out).sum()  # here
        return (out * ratio.item()).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("div", module="Net")
def bad_row_written_in_place() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.head(x)
        table = torch.empty(8, 3)
        table[:4] = out[:4]
        table[4:] = out[4:] / (out[4:] * 0)  # here
        return table[2:].mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("div")
def the_later_of_two_of_which_one_is_harmless() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.head(x)
        padded = torch.cat([out[:4], (out[4:] * 0).log().detach()])
        ratio = padded / torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 1]).unsqueeze(1)  # here
        return ratio[:4].mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


# ---- before any operation ---------------------------------------------------------------------------------------


@fault(phase="input", tensor="table.weight", module="")
def embedding_row_with_inf() -> Step:
    def forward(net: Any, tokens: Tensor) -> Tensor:
        return net.head(net.table(tokens)).square().mean()

    model = Net(forward, table=nn.Embedding(32, 4), head=nn.Linear(4, 3))
    with torch.no_grad():
        model.table.weight[17, 2] = INF
    return Step(model, (torch.tensor([[1, 17, 3]]),))


@fault(phase="input", tensor="batch[0]", module="")
def batch_with_nan() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(x).square().mean()

    x = torch.randn(8, 4)
    x[2] = float("nan")
    return Step(Net(forward, head=nn.Linear(4, 3)), (x,))


@fault(phase="input", tensor="norm.running_var", module="")
def broken_running_statistics() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(net.norm(x)).square().mean()

    model = Net(forward, norm=nn.BatchNorm1d(4), head=nn.Linear(4, 3)).eval()
    model.norm.running_var[1] = float("nan")
    return Step(model, (torch.randn(8, 4),))


# ---- backward ---------------------------------------------------------------------------------------------------


@fault("sqrt", "backward")
def sqrt_at_zero() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        change = net.head(x) - net.head(x)
        return torch.sqrt(change.square().sum(1)).mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("sqrt", "forward")
def where_with_a_bad_untaken_branch() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.head(x)
        root = torch.sqrt(out)  # here
        return torch.where(out > 0, root, torch.zeros_like(out)).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(16, 4),))


@fault("exp", "forward")
def homemade_softplus_with_where() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.head(x) + 200
        soft = torch.log(1 + torch.exp(out))  # here
        return torch.where(out > 20, out, soft).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("_linalg_eigh", "backward")
def eigenvectors_of_equal_eigenvalues() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        _, vectors = torch.linalg.eigh(net.matrix * 1.0)  # here
        return (x @ vectors).mean()

    return Step(Net(forward, matrix=torch.eye(4)), (torch.randn(8, 4),))


@fault("pow", "backward")
def norm_written_as_a_power_at_zero() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        change = net.head(x) - net.head(x)
        return change.square().sum(1).pow(0.5).mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("sqrt", "backward")
def gradient_penalty_of_a_zero_gradient() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((net.head(x) * 0).sum(), x, create_graph=True)
        return (slope.square().sum(1).sqrt() - 1).square().mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 2)), (torch.randn(8, 4),))


@fault("sqrt", "backward")
def spread_of_equal_values() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        spread = net.head(x).var(dim=0).sqrt()  # here
        return spread.mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.ones(8, 4),))


@fault("acos", "backward")
def acos_at_the_edge() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        cosine = net.head(x) * 0 + 1
        return torch.acos(cosine).mean()  # here

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("cumprod", "forward or backward")  # torch 2.13 takes the overflow from forward, 2.11 makes it anew
def cumprod_with_an_unused_overflow() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        factors = net.head(x) * 0 + torch.tensor([1e30, 1e30, 0.0])
        survival = torch.cumprod(factors, 1)  # here
        return (survival[:, 0] * 1e-30).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


class SquareRoot(torch.autograd.Function):
    """A square root with a backward of its own, as people write them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.clamp(min=0).sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return grad / (2 * root)  # SquareRoot


def _custom() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return SquareRoot.apply(net.head(x)).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


_lines, _first = inspect.getsourcelines(SquareRoot)
_marked = next(_first + i for i, text in enumerate(_lines) if "# SquareRoot" in text)
FAULTS.append(Fault("custom_autograd_function", _custom, "SquareRoot", "backward", "Net", line=_marked))


@fault("sqrt", "backward")
def recomputed_by_checkpointing() -> Step:
    def block(x: Tensor) -> Tensor:
        return torch.sqrt(x - x)  # here

    def forward(net: Any, x: Tensor) -> Tensor:
        return checkpoint(block, net.head(x) - 100, use_reentrant=False).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@fault("mul", "backward")
def loss_scale_too_large() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.head(x)
        return (out * 600.0).float().sum()  # here

    model = Net(forward, head=nn.Linear(4, 3)).half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(8, 4).half()
    return Step(model, (x,), lambda: scaler.scale(model(x)).backward())


# ---- optimizer --------------------------------------------------------------------------------------------------


@fault("addcdiv_", "optimizer", module="")
def adam_without_epsilon() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return (net.head(x) * 0).sum()

    model = Net(forward, head=nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.0, foreach=False)
    x = torch.randn(8, 4)

    def run() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()  # here

    return Step(model, (x,), run)


# ---- healthy ----------------------------------------------------------------------------------------------------


def _causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


@healthy
def causal_attention_with_masked_fill() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        scores = (net.query(x) @ x.T).masked_fill(_causal(6), -INF)
        return (scores.softmax(-1) @ x).square().mean()

    return Step(Net(forward, query=nn.Linear(4, 4)), (torch.randn(6, 4),))


@healthy
def mask_of_full_and_triu() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        mask = torch.full((6, 6), -INF).triu(1)
        return ((net.query(x) @ x.T + mask).softmax(-1) @ x).square().mean()

    return Step(Net(forward, query=nn.Linear(4, 4)), (torch.randn(6, 4),))


@healthy
def mask_by_where() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        scores = torch.where(_causal(6), -INF, net.query(x) @ x.T)
        return (scores.log_softmax(-1).exp() @ x).square().mean()

    return Step(Net(forward, query=nn.Linear(4, 4)), (torch.randn(6, 4),))


@healthy
def transformer_encoder_with_padding() -> Step:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    # A float mask beside a bool one is deprecated in torch, so both are float.
    floating = torch.zeros(3, 5).masked_fill(padding, -INF)
    return Step(model, (), lambda: model(x, mask=mask, src_key_padding_mask=floating).square().mean())


@healthy
def scaled_dot_product_attention_causal() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = net.qkv(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    return Step(Net(forward, qkv=nn.Linear(8, 24)), (torch.randn(2, 6, 8),))


@healthy
def nan_safe_where() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.head(x)
        safe = torch.where(out > 0, out, torch.ones_like(out))
        return torch.where(out > 0, safe.sqrt(), torch.zeros_like(out)).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@healthy
def log_of_clamped() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(x).relu().clamp(min=1e-6).log().mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@healthy
def nan_to_num_on_purpose() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(torch.nan_to_num(x, nan=0.0, posinf=1.0)).square().mean()

    x = torch.randn(8, 4)
    x[2, 1], x[3, 3] = float("nan"), INF
    return Step(Net(forward, head=nn.Linear(4, 3)), (x,))


@healthy
def nanmean_over_missing_targets() -> Step:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        known = ~y.isnan()
        return (net.head(x)[known] - y[known]).square().mean() + 0 * torch.nanmean(y)

    y = torch.randn(8, 3)
    y[2] = float("nan")
    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4), y))


@healthy
def minimum_with_an_infinite_diagonal() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.head(x)
        distance = (out[:, None] - out[None]).square().sum(-1)
        return distance.masked_fill(torch.eye(8, dtype=torch.bool), INF).min(1).values.mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@healthy
def overflow_that_a_sigmoid_absorbs() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        gate = 1 / (1 + torch.exp(-(net.head(x).detach() - 200)))
        return (net.head(x) * gate + net.head(x)).square().mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@healthy
def uninitialised_memory_filled_piece_by_piece() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out, table = net.head(x), torch.empty(8, 3)
        for i in range(8):
            table[i] = out[i]
        return (table + torch.empty_like(table).fill_(1.0) + torch.empty(8, 3).normal_()).mean()

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@healthy
def unused_embedding_row_with_inf() -> Step:
    def forward(net: Any, tokens: Tensor) -> Tensor:
        return net.table(tokens).square().mean()

    model = Net(forward, table=nn.Embedding(32, 4))
    with torch.no_grad():
        model.table.weight[17, 2] = INF
    return Step(model, (torch.tensor([[1, 16, 3]]),))


@healthy
def returned_logits_hold_a_mask() -> Step:
    def forward(net: Any, x: Tensor) -> dict[str, Tensor]:
        logits = net.head(x).masked_fill(torch.tensor([False, False, True]), -INF)
        return {"loss": F.cross_entropy(logits, torch.zeros(8, dtype=torch.long)), "logits": logits}

    return Step(Net(forward, head=nn.Linear(4, 3)), (torch.randn(8, 4),))


@healthy
def whole_step_with_scaler_and_dropout() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.dropout(net.norm(net.head(x)), 0.3).float().square().mean()

    model = Net(forward, head=nn.Linear(4, 3), norm=nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    x = torch.randn(8, 4)

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Step(model, (x,), run)


@healthy
def lstm_and_max_pool() -> Step:
    def forward(net: Any, x: Tensor) -> Tensor:
        out, _ = net.lstm(x)
        return F.max_pool1d(out.transpose(1, 2), 2, padding=1).square().mean()

    return Step(Net(forward, lstm=nn.LSTM(4, 6, batch_first=True)), (torch.randn(3, 5, 4),))
