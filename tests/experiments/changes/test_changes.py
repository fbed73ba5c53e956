"""Each change does what its name says to a script that knows nothing of it, and says how often it could."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from surefoot.experiments.changes.table import INSTALL
from surefoot.experiments.plan import BY_NAME
from watched import CLASSES, LOOP, NET, VALUES

if TYPE_CHECKING:
    from watched import Nursery, Watched

LEARN = [CLASSES, NET, "loss_of = F.cross_entropy", LOOP]
ONE = """
import torch
from torch import nn
weight = nn.Parameter(torch.tensor([1.0]))
"""


def told(run: Watched) -> dict[str, Any]:
    facts: dict[str, Any] = run.facts["experiment"]
    assert not facts["problem"]
    return facts


def said(run: Watched) -> list[str]:
    return run.output.split()


def test_every_change_of_the_plan_can_be_made_and_no_other() -> None:
    assert set(INSTALL) == set(BY_NAME)


def test_without_a_change_the_run_is_bitwise_the_one_of_surefoot_run(watch: Nursery) -> None:
    end = "print(float(loss), [p.double().sum().item() for p in model.parameters()])"
    plain, baseline = watch(*LEARN, end), watch.under({}, *LEARN, end)
    assert said(plain) == said(baseline)
    assert told(baseline)["acted"] == 0
    assert told(baseline)["seen"]["devices"] == ["cpu"]
    assert "experiment" not in plain.facts


@pytest.mark.parametrize(("change", "divisor"), [("lr-3", 3.0), ("lr-10", 10.0)])
def test_the_rate_is_divided_under_a_scheduler_and_by_hand_and_nobody_sees_it(
    watch: Nursery, change: str, divisor: float
) -> None:
    run = watch.under(
        {"change": change},
        ONE,
        """
        optimizer = torch.optim.SGD([weight], lr=0.4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(4):
            if step == 3:
                optimizer.param_groups[0]["lr"] = 0.9
            before = weight.item()
            optimizer.zero_grad(); weight.sum().backward(); optimizer.step(); scheduler.step()
            print(before - weight.item(), optimizer.param_groups[0]["lr"])
        """,
    )
    words = [float(word) for word in said(run)]
    assert words[0::2] == pytest.approx([rate / divisor for rate in (0.4, 0.2, 0.1, 0.9)], rel=1e-5)
    assert words[1::2] == pytest.approx([0.2, 0.1, 0.05, 0.45])
    assert told(run)["acted"] == 4
    assert run.facts["optimizers"][0]["series"]["lr"][0] == pytest.approx(0.4 / divisor)


def test_warming_up_starts_small_and_ends_at_the_scripts_own_rate(watch: Nursery) -> None:
    run = watch.under({"change": "warm-up", "warmup_steps": 10}, *LEARN)
    rates = run.facts["optimizers"][0]["series"]["lr"]
    assert rates[:10] == pytest.approx([1e-2 * (i + 1) / 10 for i in range(10)])
    assert set(rates[10:]) == {1e-2}


def test_clipping_acts_on_what_is_above_one_and_after_unscaling(watch: Nursery) -> None:
    run = watch.under(
        {"change": "clip"},
        ONE,
        """
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in (0.5, 40.0):
            before = weight.item()
            optimizer.zero_grad()
            scaler.scale(factor * weight.sum()).backward()
            scaler.step(optimizer); scaler.update()
            print(round(before - weight.item(), 4))
        """,
    )
    assert said(run) == ["0.5", "1.0"]
    assert told(run)["acted"] == 1
    norms = run.facts["optimizers"][0]["series"]["grad_norm"]
    assert norms == pytest.approx([0.5, 40.0])  # as the script made them


def test_a_step_that_computes_its_own_gradients_is_out_of_reach_of_clipping(watch: Nursery) -> None:
    loop = """
    optimizer = torch.optim.LBFGS([weight], lr=0.1)
    def closure():
        optimizer.zero_grad(); loss = (40 * weight).square().sum(); loss.backward(); return loss
    for _ in range(5):
        optimizer.step(closure)
    """
    assert told(watch.under({"change": "clip"}, ONE, loop))["acted"] == 0


HALF = """
x = torch.randn(4, 8)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
with torch.autocast("cpu", dtype=torch.float16):
    out = model(x)
print(out.dtype, x.half().dtype, x.to(torch.float16).dtype, nn.Linear(2, 2).half().weight.dtype)
print(torch.zeros(1, dtype=torch.float16).dtype, x.to(torch.bfloat16).dtype, scaler.is_enabled())
scaler.scale(out.float().sum()).backward(); scaler.step(optimizer); scaler.update()
"""


@pytest.mark.parametrize(
    ("change", "dtypes"),
    [("fp32", ["torch.float32"] * 6), ("bf16", ["torch.bfloat16"] * 6)],
)
def test_half_precision_is_replaced_wherever_the_script_asks_for_it(
    watch: Nursery, change: str, dtypes: list[str]
) -> None:
    run = watch.under({"change": change}, ONE, HALF)
    assert said(run) == [*dtypes, "False"]
    assert told(run)["acted"] >= 5
    assert run.facts["steps"] == 1


@pytest.mark.parametrize("change", ["fp32", "bf16", "eps", "tiny-batch"])
def test_a_change_that_finds_nothing_to_change_ends_the_run_early_and_says_so(watch: Nursery, change: str) -> None:
    loop = LOOP.replace("range(60)", "range(600)")
    model = NET.replace("Adam", "SGD")
    run = watch.under({"change": change}, CLASSES, model, "loss_of = F.cross_entropy", loop)
    assert (told(run)["acted"], told(run)["ended"]) == (0, "does not apply")
    assert run.facts["steps"] < 30


@pytest.mark.parametrize(("eps", "tried"), [(1e-8, 1e-4), (0.1, 1e-8), (1e-15, 1e-8)])
def test_an_unusual_eps_becomes_the_usual_one_and_a_usual_one_larger(watch: Nursery, eps: float, tried: float) -> None:
    end = "print(optimizer.param_groups[0]['eps'])"
    run = watch.under({"change": "eps"}, CLASSES, NET.replace("lr=1e-2", f"lr=1e-2, eps={eps}"), *LEARN[2:], end)
    assert [float(word) for word in said(run)] == [tried]


def test_moments_start_over_at_the_step_and_after_loading(watch: Nursery) -> None:
    end = """
    print(int(optimizer.state[model[0].weight]["step"]))
    optimizer.load_state_dict(optimizer.state_dict())
    print(float(optimizer.state[model[0].weight]["exp_avg"].abs().sum()))
    """
    run = watch.under({"change": "reset-moments", "reset_at": 50}, *LEARN, end)
    assert said(run) == ["10", "0.0"]
    assert told(run)["acted"] == 2


def test_skipped_batches_leave_the_weights_alone(watch: Nursery) -> None:
    run = watch.under(
        {"change": "skip-batch", "skip_steps": [1]},
        ONE,
        """
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for factor in (1.0, 1.0, float("nan"), 1.0):
            optimizer.zero_grad(); (factor * weight.sum()).backward(); optimizer.step()
            print(round(weight.item(), 4))
        """,
    )
    assert said(run) == ["0.9", "0.9", "0.9", "0.8"]
    assert told(run)["skipped"] == [1, 2]


ORDER = """
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
rows = torch.arange(64.0)[:, None]
model = nn.Linear(1, 1)
print(model.weight.item())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for shuffle in (True, False):
    for (batch,) in DataLoader(TensorDataset(rows), batch_size=32, shuffle=shuffle):
        optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()
        print(*[int(row) for row in batch.flatten()])
"""


def test_other_batches_keep_the_weights_and_another_seed_does_not(watch: Nursery) -> None:
    plain, order = said(watch(ONE, ORDER)), said(watch.under({"change": "other-batches"}, ONE, ORDER))
    seed = said(watch.under({"change": "other-seed"}, ONE, ORDER))
    assert plain[0] == order[0] != seed[0]
    assert plain[1:65] != order[1:65]
    assert plain[65:] == [str(i) for i in range(64)] != order[65:]  # what was in order is shuffled
    assert sorted(order[1:65]) == sorted(order[65:]) == sorted(plain[65:])
    assert plain[1:65] != seed[1:65]


def test_a_tiny_batch_is_the_same_eight_rows_again_and_again(watch: Nursery) -> None:
    words = said(watch.under({"change": "tiny-batch"}, ONE, ORDER))
    assert len(set(words[1:65])) == len(set(words[65:])) == 8


def test_synthetic_inputs_replace_what_the_model_sees_and_not_what_the_script_holds(watch: Nursery) -> None:
    run = watch.under(
        {"change": "synthetic-inputs"},
        VALUES,
        """
        class Seeing(nn.Linear):
            def forward(self, x):
                print(float(x.mean()))
                return super().forward(x)
        model = Seeing(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        nn.MSELoss()(model(x * 0 + 50.0), y).backward()
        optimizer.step()
        with torch.no_grad():
            model(x * 0 + 50.0)
        """,
    )
    trained, evaluated = map(float, said(run))
    assert abs(trained) < 0.2
    assert evaluated == 50.0
    assert told(run)["acted"] == 1


def test_shuffled_labels_are_the_same_labels_for_other_rows(watch: Nursery) -> None:
    end = "with torch.no_grad(): print(float(F.cross_entropy(model(x), y)) > 0.9)"
    plain, run = watch(*LEARN, end), watch.under({"change": "shuffled-labels"}, *LEARN, end)
    assert (said(plain), said(run)) == (["False"], ["True"])


def test_deterministic_kernels_are_on(watch: Nursery) -> None:
    end = "print(torch.are_deterministic_algorithms_enabled())"
    assert said(watch.under({"change": "deterministic"}, *LEARN, end)) == ["True"]


BLOCKS = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return torch.tanh(self.linear(x))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(5)), nn.Linear(8, 2)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 8), torch.randint(0, 2, (16,))
for _ in range(6):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print([i for i, block in enumerate(getattr(model, "blocks", [])) if block.linear.weight.grad is None])
"""


def test_a_smaller_model_leaves_out_every_second_of_its_equal_blocks(watch: Nursery) -> None:
    run = watch.under({"change": "smaller-model"}, BLOCKS, "model = Net()", TRAIN)
    assert run.output.strip() == "[1, 3]"
    assert told(run)["acted"] == 2
    assert told(run)["notes"] == ["2 of 5 repeated blocks return their inputs"]


def test_a_model_without_equal_blocks_cannot_be_made_smaller(watch: Nursery) -> None:
    different = "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))"
    assert told(watch.under({"change": "smaller-model"}, BLOCKS, different, TRAIN))["acted"] == 0
