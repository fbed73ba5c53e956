"""The loss of a step of several backwards is the script's loss, whether or not the script divides it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from surefoot.watch.accumulated_loss import StepLosses
from watched import CLASSES, NET

if TYPE_CHECKING:
    from watched import Nursery, Watched

EVEN = """
MADE
for step in range(30):
    optimizer.zero_grad()
    for _ in range(4):
        rows = torch.randint(len(x), (32,))
        loss = LOSS
        BACKWARD
    STEP
"""


def even(loss: str, backward: str = "loss.backward()", step: str = "optimizer.step()", made: str = "") -> str:
    return EVEN.replace("LOSS", loss).replace("BACKWARD", backward).replace("STEP", step).replace("MADE", made)


def losses(run: Watched) -> list[Any]:
    found: list[Any] = run.facts["optimizers"][0]["series"]["loss"]
    return found


PLAIN = "F.cross_entropy(model(x[rows]), y[rows])"
DIVIDED = {
    "divided": even(f"{PLAIN} / 4"),
    "multiplied": even(f"0.25 * {PLAIN}"),
    "divided by a tensor": even(f"{PLAIN} / torch.tensor(4.0)"),
    "a sum over the targets of all": even('F.cross_entropy(model(x[rows]), y[rows], reduction="sum") / 128'),
    "scaled": even(f"{PLAIN} / 4", "scaler.scale(loss).backward()", "scaler.step(optimizer); scaler.update()",
                   'scaler = torch.amp.GradScaler("cpu")'),
    "the last one in a closure": even(
        f"{PLAIN} / 4", "loss.backward() if _ < 3 else optimizer.step(lambda: (loss.backward(), loss)[1])", "pass"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVIDED)
def test_microbatches_that_were_divided_add_up_to_the_loss(watch: Nursery, name: str) -> None:
    whole = losses(watch(CLASSES, NET, even(PLAIN)))
    divided = losses(watch(CLASSES, NET, DIVIDED[name]))
    assert divided[0] == pytest.approx(whole[0], rel=1e-4)
    assert divided[-1] == pytest.approx(whole[-1], rel=0.8)  # a gradient a quarter as large, to Adam nearly the same
    assert len(divided) == 30


def test_the_short_window_at_the_end_of_an_epoch_shows_the_loss_too(watch: Nursery) -> None:
    run = watch(
        CLASSES,
        NET,
        """
        for epoch in range(4):
            for count, rows in enumerate(torch.randperm(256).split(20)):
                loss = F.cross_entropy(model(x[rows]), y[rows]) / 4
                loss.backward()
                if count % 4 == 3 or count == 12:
                    optimizer.step(); optimizer.zero_grad()
        """,
    )
    series = losses(run)
    assert run.facts["optimizers"][0]["series"]["backwards"][:4] == [4, 4, 4, 1]
    assert series[3] == pytest.approx(series[2], rel=0.3)


OWN_WEIGHT = {
    "half of one loss": ("optimizer.zero_grad(); loss = 0.5 * LOSS; loss.backward(); optimizer.step()", 0.5),
    "two losses of a weight each": (
        "optimizer.zero_grad(); (0.5 * LOSS).backward()\n    (0.25 * LOSS).backward(); optimizer.step()", 0.375,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_WEIGHT)
def test_weights_that_are_part_of_the_objective_stay_in_the_loss(watch: Nursery, name: str) -> None:
    line, share = OWN_WEIGHT[name]
    loss = "F.cross_entropy(model(x), y)"
    run = watch(CLASSES, NET, f"first = float({loss})", "for step in range(20):\n    " + line.replace("LOSS", loss))
    plain = watch(CLASSES, NET, f"first = float({loss})", "for step in range(20):\n    "
                  f"optimizer.zero_grad(); loss = {loss}; loss.backward(); optimizer.step()")  # fmt: skip
    assert losses(run)[0] == pytest.approx(share * losses(plain)[0], rel=1e-4)


class Copy:
    """A number that is being copied from a device."""

    def __init__(self, value: float, arrived: bool = True) -> None:
        self.value, self.arrived = value, arrived

    def has_arrived(self, within: float = 0.0) -> bool:
        return self.arrived

    def wait(self) -> float:
        return self.value


def test_the_loss_of_a_step_on_a_device_is_made_of_the_copies_of_its_values() -> None:
    losses, last = StepLosses(), Copy(4.0, arrived=False)
    losses.add(torch.tensor(2.0), 0.5, Copy(1.0))  # a value other than the copy's shows which of them is used
    losses.add(torch.tensor(2.0), 0.5, last)
    loss = losses.close_step(0)
    assert not loss.has_arrived()
    last.arrived = True
    assert loss.has_arrived()
    assert loss.wait() == 5.0


def test_microbatches_on_a_device_that_are_not_divided_are_averaged() -> None:
    losses = StepLosses()
    losses.add(torch.tensor(0.0), 1.0, Copy(1.0))
    losses.add(4.0, 1.0, Copy(4.0))  # arrived in time
    assert losses.close_step(0).wait() == 2.5


def test_an_optimizer_without_a_backward_of_its_own_gets_the_last_loss_of_a_device() -> None:
    losses = StepLosses()
    losses.add(torch.tensor(0.0), 1.0, Copy(3.0))
    assert losses.close_step(0) is losses.close_step(0)


def test_values_that_arrived_in_time_are_numbers() -> None:
    losses = StepLosses()
    losses.add(3.0, 1.0, Copy(3.0))
    assert losses.close_step(0) == 3.0
