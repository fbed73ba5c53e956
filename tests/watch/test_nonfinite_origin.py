"""The origin of a non-finite loss, read off its graph: every undefined operation is named with its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from surefoot.watch.nonfinite_origin import find_origin
from surefoot.watch.parameter_registry import ParameterRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from surefoot.record.facts import NonFiniteLoss
    from watched import Nursery


def origin(loss: torch.Tensor, book: ParameterRegistry | None = None) -> NonFiniteLoss:
    return find_origin(loss, float(loss.detach()), book or ParameterRegistry(), {})


def weights(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


UNDEFINED: dict[str, tuple[Callable[[], torch.Tensor], str, int]] = {
    "log of 0": (lambda: (weights(0.0, 1.0) * 1).log().sum(), "Log", 1),
    "log of less": (lambda: (weights(-1.0, -2.0, 1.0) * 1).log().sum(), "Log", 2),
    "log2": (lambda: (weights(0.0) * 1).log2().sum(), "Log2", 1),
    "log10": (lambda: (weights(0.0) * 1).log10().sum(), "Log10", 1),
    "log1p": (lambda: (weights(-2.0) * 1).log1p().sum(), "Log1P", 1),
    "division": (lambda: (weights(1.0, 2.0) / (weights(0.0, 1.0) * 1)).sum(), "Div", 1),
    "acos": (lambda: (weights(1.5) * 1).acos().sum(), "Acos", 1),
    "asin": (lambda: (weights(-1.5) * 1).asin().sum(), "Asin", 1),
    "a root of less than 0": (lambda: (weights(-1.0) * 1).pow(0.5).sum(), "Pow", 1),
    "a negative power of 0": (lambda: (weights(0.0) * 1).pow(-2).sum(), "Pow", 1),
    "acosh": (lambda: (weights(0.5) * 1).acosh().sum(), "Acosh", 1),
    "atanh": (lambda: (weights(1.0) * 1).atanh().sum(), "Atanh", 1),
    "exp": (lambda: (weights(200.0) * 1).exp().sum(), "Exp", 1),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_an_operation_outside_its_domain_is_named_with_how_often(name: str) -> None:
    make, op, bad = UNDEFINED[name]
    found = origin(make())
    assert (found.kind, found.op, found.bad) == ("operation", op, bad)
    assert found.undefined_at


@pytest.mark.parametrize("name", ["sqrt", "rsqrt"])
def test_a_result_that_is_not_finite_betrays_an_operation_that_keeps_nothing_else(name: str) -> None:
    found = origin(getattr(weights(-3.0) * 1, name)().sum())
    assert (found.kind, found.op.lower(), found.nan) == ("operation", name, 1)


NORMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (16,)), "NativeLayerNorm"),
    "group norm": (lambda x: torch.nn.functional.group_norm(x, 2), "NativeGroupNorm"),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_layer_whose_variance_overflows_made_the_nan_and_not_the_data(name: str) -> None:
    normalise, op = NORMS[name]
    values = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)) * 1e27
    found = origin(normalise(values.requires_grad_() * 1).sum())
    assert (found.kind, found.op) == ("operation", op)


def test_the_first_of_two_culprits_is_named() -> None:
    value = weights(-1.0) * 1
    assert origin((value.log() / (weights(0.0) * 1)).sum()).op == "Log"


def test_a_product_in_half_precision_is_computed_again() -> None:
    left = (torch.full((4, 8), 300.0) * weights(1.0)).half()
    found = origin((left @ left.T).float().sum())
    assert (found.kind, found.op, found.dtype) == ("operation", "Mm", "float16")
    assert found.undefined_at == "results beyond 65504"
    assert found.largest == pytest.approx(720000)
    assert found.bad == 16


def test_a_softmax_over_nothing_is_reported_by_its_masked_rows() -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1], mask[3] = True, True
    scores = (torch.randn(4, 4) * weights(1.0)).masked_fill(mask, -torch.inf)
    found = origin(scores.softmax(-1).sum())
    assert (found.op, found.masked_rows) == ("Softmax", 2)


def test_a_softmax_whose_rows_are_partly_masked_is_not_to_blame() -> None:
    scores = (torch.randn(4, 4) * weights(1.0)).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    found = origin((scores.softmax(-1) - 2).log().sum())
    assert found.op == "Log"


def test_targets_that_are_all_ignored_are_reported_with_the_index_they_have() -> None:
    logits = torch.randn(4, 3) * weights(1.0)
    found = origin(torch.nn.functional.cross_entropy(logits, torch.full((4,), -100)))
    assert (found.all_ignored, found.ignore_index, found.bad) == (True, -100, 4)


def test_a_mean_over_an_empty_mask_is_a_count_of_zero() -> None:
    mask = torch.zeros(4)
    found = origin((torch.randn(4) * weights(1.0) * mask).sum() / mask.sum())
    assert found.empty_count


def test_a_row_of_nan_data_is_named_by_its_number() -> None:
    layer = torch.nn.Linear(4, 1)
    data = torch.randn(8, 4)
    data[5, 2] = torch.nan
    found = origin(layer(data).log_softmax(0).sum())
    assert (found.kind, found.rows, found.bad_rows, found.nan) == ("data", [5], 1, 1)


def test_a_nan_target_is_data_too() -> None:
    layer, target = torch.nn.Linear(4, 1), torch.randn(8, 1)
    target[2] = torch.nan
    found = origin(torch.nn.functional.mse_loss(layer(torch.randn(8, 4)), target))
    assert (found.kind, found.rows) == ("data", [2])


def test_a_weight_that_already_is_nan_is_named() -> None:
    layer, book = torch.nn.Linear(4, 1), ParameterRegistry()
    torch.nn.init.constant_(layer.weight, torch.nan)
    book.add_model(layer)
    found = origin(layer(torch.randn(8, 4)).log().sum(), book)
    assert (found.kind, found.parameters) == ("parameter", ["weight"])


@pytest.fixture
def gathered(tmp_path: Path) -> Iterator[tuple[torch.nn.Module, ParameterRegistry]]:
    """A model whose first weight is NaN, and whose gathered parameters FSDP frees after the forward."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model, book = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)), ParameterRegistry()
    torch.nn.init.constant_(model[0].weight, torch.nan)
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    book.add_model(model)
    for layer in model:
        layer.register_forward_pre_hook(lambda module, _: book.note_gathered(module))
    yield model, book
    dist.destroy_process_group()


def test_a_weight_that_fsdp_has_freed_again_is_named_by_its_shard(gathered) -> None:
    model, book = gathered
    found = origin(model(torch.randn(8, 4)).square().mean(), book)
    assert (found.kind, found.parameters) == ("parameter", ["0.weight"])


def test_a_weight_that_is_nan_in_the_shard_of_another_rank_is_not_taken_for_data(gathered) -> None:
    model, book = gathered
    loss = model(torch.randn(8, 4)).square().mean()
    with torch.no_grad():
        model[0].weight.to_local().fill_(1.0)  # this rank holds no NaN
    assert origin(loss, book).kind == "unknown"


def test_a_finite_additive_mask_of_minus_infinity_is_no_bad_data() -> None:
    scores = torch.randn(4, 4) * weights(1.0) + torch.zeros(4, 4).masked_fill(
        torch.ones(4, 4).triu(1).bool(), -torch.inf
    )
    found = origin((scores.softmax(-1) - 2).log().sum())
    assert (found.kind, found.op) == ("operation", "Log")


# The same in a script, where the line is known too

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
for step in range(6):
    given = torch.randn(8, 4)
    optimizer.zero_grad()
    out = layer(given)
    calm = (out.square() + 1).log().mean()
    bad = out.square() if step < 4 else out.square() - 100
    loss = calm + LOSS
    loss.backward()
    optimizer.step()
"""
LINES = {
    "log": "bad.log().mean()",
    "sqrt": "bad.sqrt().mean()",
    "div": "(calm / (bad.clamp_min(0).sum() if step > 3 else 1))",
    "pow": "bad.pow(1.5).mean()",
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_of_the_operation_is_the_one_that_ran(watch: Nursery, name: str) -> None:
    run = watch(SCRIPT.replace("LOSS", LINES[name]))
    found = run.names_first("loss.undefined-op", step=4, at="|loss = calm +", evidence={"op", "site", "call"})
    assert name in (found.evidence["call"], found.evidence["op"].lower())


def test_a_loss_seen_as_nan_and_given_up_before_backward_is_examined_all_the_same(watch: Nursery) -> None:
    give_up = "    if not torch.isfinite(loss):\n        raise SystemExit(3)\n    loss.backward()"
    run = watch(SCRIPT.replace("LOSS", LINES["log"]).replace("    loss.backward()", give_up))
    assert run.exit_code == 3
    assert run.first.cause == "loss.undefined-op"


def test_an_operation_that_the_sampled_step_did_not_have_gets_no_line_of_another_one() -> None:
    known = [("train.py:3", "body.drop", "dropout"), ("train.py:9", "", "mul")]
    as_sampled = (weights(1.0) * 2.0 * float("nan")).sum()
    found = find_origin(as_sampled, float("nan"), ParameterRegistry(), {"Mul": known})
    assert (found.site, found.call) == ("train.py:9", "mul")
    with_one_more = (weights(1.0) * 2.0 * 3.0 * float("nan")).sum()
    found = find_origin(with_one_more, float("nan"), ParameterRegistry(), {"Mul": known})
    assert (found.op, found.site, found.module, found.call) == ("Mul", None, None, None)
    assert found.sites == ["train.py:3", "train.py:9"]
    found = find_origin(with_one_more, float("nan"), ParameterRegistry(), {"Mul": known[:1] * 2})
    assert (found.site, found.call) == ("train.py:3", "dropout")
