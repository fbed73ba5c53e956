"""Training against evaluation data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from recorded import SITE, look, run
from surefoot.diagnose.rules import data_splits

if TYPE_CHECKING:
    from watched import Nursery


def a_pass(rows: list[int], grad: bool, step: int, mean: float = 0.0, std: float = 1.0, **more: Any) -> dict[str, Any]:
    features = {"count": len(rows), "mean": [mean] * 4, "std": [std] * 4}
    base = {"model": "model", "step": step, "grad": grad, "grad_mode": grad, "site": SITE, "rows": rows}
    return base | {"features": features, "inputs": [{"shape": [len(rows), 4], "grad": False}], "outputs": []} | more


def split_run(evaluated: list[list[int]], trained: int = 200, apart: bool = False, **changes: float) -> Any:
    """A run that was evaluated on some batches: all at once, or each at a step of its own (`apart`)."""
    prints = list(range(trained))
    stream = {"notes": [], "rows": {"0": {"prints": prints, "first": prints, "whole": True}}}
    looks = [look(s, passes=[a_pass(prints[s * 20 : s * 20 + 20], True, s)]) for s in range(8)]
    evaluations = [
        a_pass(rows, False, 50 + i * apart, block=1 + i * apart, block_passes=1, **changes)
        for i, rows in enumerate(evaluated)
    ]
    return run(stream=stream, sampled_steps=looks, evaluations=evaluations)


def test_an_evaluation_that_shares_some_rows_with_training_leaks() -> None:
    claim = data_splits.leakage(split_run([list(range(180, 240))]))
    assert claim is not None
    assert claim.evidence["shared"] == 20


def test_an_evaluation_of_other_rows_does_not_leak() -> None:
    assert data_splits.leakage(split_run([list(range(300, 360))])) is None


def test_the_accuracy_on_the_training_set_is_no_leak() -> None:
    assert data_splits.leakage(split_run([list(range(200)), list(range(300, 360))])) is None
    assert data_splits.leakage(split_run([list(range(200))])) is None


def test_a_validation_set_within_the_training_set_leaks() -> None:
    assert data_splits.leakage(split_run([list(range(40, 90))])) is not None


def test_training_batches_that_are_shown_again_are_no_leak() -> None:
    last_batches = [list(range(start, start + 20)) for start in (20, 60, 140, 80)]
    assert data_splits.leakage(split_run(last_batches, apart=True)) is None
    assert data_splits.leakage(split_run([list(range(40, 90))] * 4, apart=True)) is not None, "the same rows each time"


def test_rows_that_all_look_alike_tell_nothing() -> None:
    held = split_run([list(range(180, 240))])
    for seen in held.sampled.steps:
        rows = seen.model_calls[0].rows
        assert rows is not None
        rows[:] = [1] * 20
    assert data_splits.leakage(held) is None


def test_inputs_of_another_scale_are_another_pipeline() -> None:
    claim = data_splits.split_mismatch(split_run([list(range(300, 360))], mean=5.0, std=6.0))
    assert claim is not None


def test_a_mild_shift_between_the_splits_is_fine() -> None:
    assert data_splits.split_mismatch(split_run([list(range(300, 360))], mean=0.6, std=1.4)) is None


def test_huge_rows_in_a_few_training_batches_are_no_other_pipeline() -> None:
    held = split_run([list(range(300, 360))])
    del held.sampled.steps[7:]
    for seen in held.sampled.steps[:3]:
        features = seen.model_calls[0].features
        features.mean[:], features.std[:] = [60.0] * 4, [240.0] * 4
    assert data_splits.split_mismatch(held) is None
    for seen in held.sampled.steps:
        features = seen.model_calls[0].features
        features.mean[:], features.std[:] = [60.0] * 4, [240.0] * 4
    assert data_splits.split_mismatch(held) is not None


NOT_FINITE = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 8); y = x[:, :1]
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x[BAD] = VALUE
for step in range(60):
    rows = torch.randint(200, (32,))
    optimizer.zero_grad()
    loss = F.mse_loss(model(x[rows]), y[rows]); loss.backward()
    optimizer.step()
    if step % 10 == 9:
        with torch.no_grad(): held = F.mse_loss(model(x[200:]), y[200:])
"""


@pytest.mark.parametrize("value", ["float('nan')", "-float('inf')", "float('inf')"])
@pytest.mark.parametrize("bad", ["230", ":200:5"])
def test_inputs_that_are_not_finite_are_no_other_pipeline(watch: Nursery, bad: str, value: str) -> None:
    run = watch(NOT_FINITE.replace("BAD", bad).replace("VALUE", value))
    assert "data.split-mismatch" not in [finding.cause for finding in run.diagnosis.findings]


def test_another_scale_is_named_although_one_feature_is_not_finite() -> None:
    held = split_run([list(range(300, 360))], mean=5.0, std=6.0)
    for each in held.facts.evaluations:
        assert each.features is not None
        each.features.mean[0] = float("nan")
    assert data_splits.split_mismatch(held) is not None


def test_folds_of_a_cross_validation_are_not_in_each_others_training(watch: Nursery) -> None:
    run = watch(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        torch.manual_seed(0)
        x = torch.randn(160, 8)
        y = x[:, :3].argmax(1)
        for fold in torch.randperm(160).split(40):
            rest = torch.tensor([row for row in range(160) if row not in fold.tolist()])
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            for epoch in range(8):
                for rows in rest[torch.randperm(120)].split(20):
                    loss = F.cross_entropy(model(x[rows]), y[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                model(x[fold])
        """
    )
    assert run.causes == []


def test_rows_at_the_end_of_a_large_evaluation_are_seen_to_leak(watch: Nursery) -> None:
    run = watch(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        torch.manual_seed(0)
        x = torch.randn(300, 8)
        y = x[:, :3].argmax(1)
        held = torch.cat([torch.randn(600, 8), x])
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for epoch in range(8):
            for rows in torch.randperm(300).split(30):
                loss = F.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                model(held)
        """
    )
    assert run.causes == ["data.leakage"]


@pytest.mark.parametrize("other", [0, 1000])
def test_a_graph_that_is_passed_as_a_whole_is_no_leak(other: int) -> None:
    """Only the first 256 of its 400 nodes have a fingerprint in training, and every second one in the evaluation."""
    nodes = list(range(400))
    whole = {"inputs": [{"shape": [400, 4], "grad": False}]}
    stream = {"notes": [], "rows": {"0": {"prints": nodes[:256], "first": [0] * 256, "whole": False}}}
    looks = [look(s, passes=[a_pass(nodes[:256], True, s, **whole)]) for s in range(8)]
    evaluated = nodes[:100:2] + [other + node for node in nodes[100::2]]
    evaluation = a_pass(evaluated, False, 50, block=1, block_passes=1, **whole)
    claim = data_splits.leakage(run(stream=stream, sampled_steps=looks, evaluations=[evaluation]))
    assert (claim is not None) == bool(other), "with other rows in it, those that are shared leak"


WINDOWS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
text = torch.randint(0, 20, (3000,))
splits = {"train": text[:2500], "val": text[2500:]}


def batch(split):
    start = torch.randint(len(splits[split]) - 9, (16, 1)) + torch.arange(8)
    return splits[split][start], splits[split][start + 1]


model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    if step % 10 == 0:
        with torch.no_grad():
            for split in splits:
                for _ in range(3):
                    x, y = batch(split)
                    F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    x, y = batch("train")
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_random_windows_of_the_training_text_are_no_leak_when_they_are_evaluated(watch: Nursery) -> None:
    assert "data.leakage" not in watch(WINDOWS).causes


NODES = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(200, 8); y = x[:, :3].argmax(1)
is_training = torch.rand(200) < 0.6
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    output = model(x)
    loss = F.cross_entropy(output[USED], y[USED])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        held = F.cross_entropy(model(x)[~is_training], y[~is_training])
"""


def test_a_training_mask_that_is_not_applied_leaks_the_nodes_that_are_evaluated(watch: Nursery) -> None:
    run = watch(NODES.replace("USED", ":"))
    assert run.first.cause == "data.leakage"
    assert run.first.evidence["trained"] == 200


def test_nodes_behind_a_mask_are_not_leaked(watch: Nursery) -> None:
    assert "data.leakage" not in watch(NODES.replace("USED", "is_training")).causes
