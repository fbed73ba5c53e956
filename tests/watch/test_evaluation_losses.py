"""The losses of validation sets: each pass averaged over its rows, the sets of one step separate."""

from __future__ import annotations

import pytest

from watched import CLASSES, NET

LOOP = """
held = [(x[:40], y[:40]), (x[40:50], y[40:50])]
for epoch in range(3):
    for _ in range(4):
        optimizer.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); optimizer.step()
"""


def passes(watch, evaluation):
    ran = watch(CLASSES, NET, LOOP + evaluation)
    told = [float(word) for word in ran.output.split()]
    return ran.facts.get("evaluation_passes", []), told


def test_a_block_is_a_pass_weighted_by_its_rows(watch):
    found, told = passes(
        watch,
        """
    with torch.no_grad():
        values = [F.cross_entropy(model(a), b).item() * len(a) for a, b in held]
    print(sum(values) / 50)
    with torch.no_grad():
        print(F.cross_entropy(model(x[:8]), y[:8], reduction="sum").item() / 8)
        """,
    )
    assert [(each["step"], each["number"], each["rows"], each["calls"]) for each in found] == [
        (step, *rest) for step in (4, 8, 12) for rest in ((0, 50, 2), (1, 8, 1))
    ]
    assert [each["loss"] for each in found] == pytest.approx(told)


def test_many_blocks_of_one_batch_each_are_one_pass(watch):
    found, told = passes(
        watch,
        """
    total = 0.0
    for part in range(6):
        with torch.no_grad():
            total += F.cross_entropy(model(x[8 * part : 8 * part + 8]), y[8 * part : 8 * part + 8]).item()
    print(total / 6)
        """,
    )
    assert [(each["step"], each["rows"], each["calls"]) for each in found] == [(4, 48, 6), (8, 48, 6), (12, 48, 6)]
    assert [each["loss"] for each in found] == pytest.approx(told)


def test_losses_that_are_trained_on_or_not_one_number_are_no_pass(watch):
    found, _ = passes(
        watch,
        """
    with torch.no_grad():
        F.cross_entropy(model(x), y, reduction="none")
        """,
    )
    assert found == []


def test_a_loss_inside_a_training_step_is_no_pass_and_one_after_its_backward_is(watch):
    loop = """
for step in range(5):
    inner = F.cross_entropy(model(x), y)
    faster = [p - 0.1 * g for p, g in zip(model.parameters(), torch.autograd.grad(inner, model.parameters()))]
    with torch.no_grad():
        F.cross_entropy(model(x[:8]), y[:8])  # before the inner update: part of the step
    hidden = F.relu(F.linear(x, *faster[:2]))
    optimizer.zero_grad(); F.cross_entropy(F.linear(hidden, *faster[2:]), y).backward()
    with torch.no_grad():
        F.cross_entropy(model(x[:4]), y[:4])
    optimizer.step()
"""
    found = watch(CLASSES, NET, loop).facts["evaluation_passes"]
    assert [(each["step"], each["rows"]) for each in found] == [(step, 4) for step in range(5)]
