"""Precision, accumulation and memory, on real scripts; and those that only look like trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"


# Half precision

HALF = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, given):
        hidden = F.relu(self.inner(given.half()))
        hidden = SCALED
        return self.outer(hidden).float()

model = Net().half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_product_beyond_65504_is_named_with_its_line(watch: Nursery) -> None:
    run = watch(START, HALF.replace("SCALED", "(hidden * 300) * (hidden * 300)"), LOOP)
    found = run.names_first("precision.fp16-overflow", step=0, at="|hidden = (hidden * 300)", evidence={"overflows"})
    assert found.evidence["overflows"][0]["infinite"] > 0


AUTOCAST = """
for step in range(60):
    rows = torch.randint(len(x), (32,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model(x[rows]), y[rows])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_a_finite_input_that_overflows_in_the_cast_is_no_fault_of_the_data(watch: Nursery) -> None:
    run = watch(START, "x[:, 3] *= 3e4", NET, AUTOCAST)
    assert run.first.cause == "precision.fp16-overflow"
    assert "data.nonfinite-input" not in run.causes


def test_an_input_that_was_infinite_before_the_cast_is(watch: Nursery) -> None:
    assert watch(START, "x[:, 3] = torch.inf", NET, AUTOCAST).first.cause == "data.nonfinite-input"


def test_half_weights_that_stay_in_range_do_not_overflow(watch: Nursery) -> None:
    run = watch(START, HALF.replace("SCALED", "hidden"), LOOP)
    assert not {"precision.fp16-overflow", "precision.fp16-underflow"} & set(run.causes)


def test_a_mask_that_overflows_on_purpose_is_healthy(watch: Nursery) -> None:
    masked = """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.scores, self.outer = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 3)

            def forward(self, given):
                mask = (torch.arange(32) > 20).half() * 1e9
                weights = (self.scores(given).half() - mask).softmax(-1).float()
                return self.outer(F.relu(self.inner(given)) * weights * 20)

        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        """
    run = watch(START, masked, LOOP)
    assert run.causes == []


def test_gradients_below_the_smallest_half_are_named_with_their_share(watch: Nursery) -> None:
    small = "loss_of = lambda given, target: F.cross_entropy(given, target) * 1e-7"
    run = watch(START, small, HALF.replace("SCALED", "hidden").replace("lr=0.1", "lr=1e5"), LOOP)
    found = run.names_first("precision.fp16-underflow", step=0, at="inner.weight", evidence={"zeros", "largest"})
    assert found.evidence["zeros"] > 0.3


def test_zero_gradients_in_single_precision_did_not_underflow(watch: Nursery) -> None:
    run = watch(START, NET, "nn.init.constant_(model[0].bias, -20.0)", LOOP)
    assert "precision.fp16-underflow" not in [finding.cause for finding in run.diagnosis.findings]


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_updates_that_round_to_nothing_are_named_with_their_share(watch: Nursery, kind: str) -> None:
    rate = "1e-3" if kind == "bfloat16" else "1e-4"
    model = HALF.replace("SCALED", "hidden").replace("lr=0.1", f"lr={rate}").replace("half()", f"to(torch.{kind})")
    run = watch(START, model, LOOP)
    found = run.names_first(
        "precision.low-precision-weights", step=0, at="inner.weight", evidence={"unchanged", "rows"}
    )
    assert found.evidence["unchanged"] > 0.6
    assert kind in found.summary


def test_autocast_over_single_precision_weights_is_fine(watch: Nursery) -> None:
    cast = LOOP.replace(
        "    loss = loss_of(model(x[rows]), y[rows])\n",
        "    with torch.autocast('cpu', torch.bfloat16):\n        loss = loss_of(model(x[rows]), y[rows])\n",
    )
    assert watch(START, NET, cast).causes == []


# Loss scaling

SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=20)
for step in range(60):
    rows = torch.randint(len(x), (32,))
    optimizer.zero_grad()
    loss = loss_of(model(x[rows]), y[rows])
    scaler.scale(loss).backward()
    UNSCALE
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


def test_clipping_before_unscaling_is_named(watch: Nursery) -> None:
    run = watch(START, NET, SCALED.replace("UNSCALE", "pass"))
    found = run.names_first("clip.before-unscale", step=0, at="|clip_grad_norm_", evidence={"clipped", "scale"})
    assert found.evidence["clipped"] == 60


def test_clipping_after_unscaling_is_fine(watch: Nursery) -> None:
    assert watch(START, NET, SCALED.replace("UNSCALE", "scaler.unscale_(optimizer)")).causes == []


def test_a_scaler_that_skips_for_ever_is_named(watch: Nursery) -> None:
    broken = "loss_of = lambda given, target: F.cross_entropy(given, target) + ((given - given) ** 2).sum().sqrt()"
    run = watch(START, broken, NET, SCALED.replace("UNSCALE", "scaler.unscale_(optimizer)"))
    found = run.finding("precision.scaler-stuck")
    assert found.cause in run.causes
    assert found.evidence["skipped_at_end"] == 60
    assert found.step == 0
    assert {"attempts", "skipped", "scale"} <= set(found.evidence)
    assert run.first.cause in ("precision.scaler-stuck", "loss.undefined-op")


def test_a_scaler_that_finds_its_scale_is_fine(watch: Nursery) -> None:
    high = SCALED.replace("2.0**16", "2.0**130").replace("UNSCALE", "scaler.unscale_(optimizer)")
    assert "precision.scaler-stuck" not in watch(START, NET, high).causes


# Accumulation

ACCUMULATED = """
for step in range(40):
    optimizer.zero_grad()
    for part in range(4):
        rows = torch.randint(len(x), (SIZE,))
        loss = loss_of(model(x[rows]), y[rows]) DIVIDED
        loss.backward()
    optimizer.step()
"""
SLOW = NET.replace("optim.Adam", "optim.SGD").replace("1e-2", "0.1")


def accumulated(size: str = "32", divided: str = "/ 4") -> str:
    return ACCUMULATED.replace("SIZE", size).replace("DIVIDED", divided)


@pytest.mark.parametrize("divided", ["", "/ 1"], ids=["whole", "divided-by-1"])  # by 1, as Accelerate does
def test_accumulated_losses_that_are_not_divided_are_named(watch: Nursery, divided: str) -> None:
    run = watch(START, SLOW, accumulated(divided=divided))
    found = run.names_first(
        "accum.not-divided", step=0, at="|loss.backward", evidence={"backwards_per_step", "steps", "values"}
    )
    assert found.evidence["backwards_per_step"] == 4


def test_accumulated_losses_that_are_divided_are_fine(watch: Nursery) -> None:
    assert watch(START, SLOW, accumulated(divided="* 0.25").replace("range(40)", "range(60)")).causes == []


def test_two_losses_with_a_backward_each_are_not_accumulation(watch: Nursery) -> None:
    twice = LOOP.replace("    loss.backward()\n", "    loss.backward(retain_graph=True)\n    (0.1 * loss).backward()\n")
    assert "accum.not-divided" not in watch(START, NET, twice).causes


def test_a_closure_that_is_evaluated_often_is_not_accumulation(watch: Nursery) -> None:
    lbfgs = """
    model = nn.Linear(8, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return loss
    for step in range(10):
        optimizer.step(closure)
    """
    assert watch(START, lbfgs).causes == []


def test_microbatches_of_unequal_size_are_named_with_their_sizes(watch: Nursery) -> None:
    run = watch(START, SLOW, accumulated("(4, 16, 32, 8)[part]").replace("range(40)", "range(60)"))
    found = run.names_first(
        "accum.uneven-microbatches", step=0, at="|loss.backward", evidence={"sizes", "steps_uneven", "steps_looked_at"}
    )
    assert found.evidence["sizes"] == [4, 16, 32, 8]


def test_microbatches_weighted_by_their_size_are_fine(watch: Nursery) -> None:
    weighted = accumulated("(4, 16, 32, 8)[part]", divided="* (len(rows) / 60)").replace("range(40)", "range(60)")
    assert watch(START, SLOW, weighted).causes == []


def test_losses_of_equal_size_that_are_weighted_differently_are_fine(watch: Nursery) -> None:
    weighted = accumulated(divided="* (0.1, 0.4, 0.2, 0.3)[part]").replace("range(40)", "range(60)")
    assert watch(START, SLOW, weighted).causes == []


# Memory


@pytest.mark.parametrize("kept", ["loss", "[loss * 1.0]"])
def test_losses_kept_with_their_graph_are_named(watch: Nursery, kept: str) -> None:
    run = watch(START, NET, "history = []", LOOP + f"    history.append({kept})\n")
    found = run.names_first(
        "memory.graph-retained", step=16, at="|loss.backward", evidence={"held", "backwards", "trace"}
    )
    assert found.evidence["held"] >= 24


@pytest.mark.parametrize(("epoch", "severity"), [(40, "info"), (200, "warning")])
def test_losses_summed_with_their_graphs_in_each_epoch_are_named(watch: Nursery, epoch: int, severity: str) -> None:
    summed = f"    total = loss if step % {epoch} == 0 else total + loss\n"
    run = watch(START, NET, LOOP.replace("range(60)", "range(420)") + summed)
    found = run.finding("memory.graph-retained")
    assert found.severity == severity
    assert 24 <= found.evidence["held"] <= epoch


@pytest.mark.parametrize("kept", ["loss.detach()", "loss"])
def test_numbers_kept_or_a_few_losses_are_fine(watch: Nursery, kept: str) -> None:
    short = "\n    history = history[-5:]" if kept == "loss" else ""
    run = watch(START, NET, "history = []", LOOP + f"    history.append({kept}){short}\n")
    assert run.causes == []
