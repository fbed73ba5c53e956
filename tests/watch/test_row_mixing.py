"""Where rows of a batch begin to affect each other, measured in real scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from watched import CLASSES

if TYPE_CHECKING:
    from watched import Nursery

STEPS = """
model = MODEL
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(16):
    rows = torch.randint(len(x), (ROWS,))
    optimizer.zero_grad()
    F.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
print([p.double().sum().item() for p in model.parameters()])
"""
DEEP = "nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.LAYER, nn.Linear(5, 3))"


def script(layer: str, rows: int = 32) -> str:
    return STEPS.replace("MODEL", DEEP.replace("LAYER", layer)).replace("ROWS", str(rows))


def measured(facts: dict[str, Any]) -> list[dict[str, Any]]:
    roots = [root for step in facts["sampled_steps"] for root in step["roots"]]
    return [root["row_mixing"] for root in roots if root.get("row_mixing")]


def test_the_call_that_mixes_rows_is_named_with_both_gradients(watch: Nursery) -> None:
    found = measured(watch(CLASSES, script("Softmax(dim=0)")).facts)
    assert [(mixing["calls"], mixing["rows"], mixing["module"]) for mixing in found[:1]] == [
        (["softmax"], 32, "model.2")
    ]
    assert 0 < found[0]["from_others"] < found[0]["from_own"]


def test_batch_statistics_are_measured_too(watch: Nursery) -> None:
    found = measured(watch(CLASSES, script("BatchNorm1d(5)")).facts)
    assert found[0]["calls"] == ["batch_norm"]


@pytest.mark.parametrize(("layer", "rows"), [("Softmax(dim=1)", 32), ("Softmax(dim=0)", 3), ("Softmax(dim=0)", 8)])
def test_separate_rows_small_batches_and_ambiguous_shapes_give_no_fact(watch: Nursery, layer: str, rows: int) -> None:
    assert measured(watch(CLASSES, script(layer, rows)).facts) == []


def test_the_extra_backward_changes_no_parameter(watch: Nursery) -> None:
    run = watch(CLASSES, script("Softmax(dim=0)"))
    here: dict[str, Any] = {}
    lines: list[str] = []
    exec(
        compile(CLASSES + script("Softmax(dim=0)").replace("print(", "lines.append("), "plain", "exec"),
        here | {"lines": lines},
        here,
    )
    assert run.output.strip() == str(lines[0])
