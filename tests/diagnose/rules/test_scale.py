"""How large things are from layer to layer, on real scripts; and sizes that are unusual on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recorded import look, parameter
from recorded import run as recorded
from surefoot.diagnose.rules.scale import vanishing_gradient
from watched import CLASSES, LOOP, NET, VALUES, deep

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"


# Units


def test_units_dead_from_the_start_are_named_with_their_share(watch: Nursery) -> None:
    run = watch(START, NET, "nn.init.constant_(model[0].bias, -20.0)", LOOP)
    found = run.names_first(
        "model.dead-units",
        step=run.facts["sampled_steps"][-1]["step"],
        at="model.1",
        evidence={"share", "units", "share_at_start", "sampled_steps"},
    )
    assert (found.evidence["share"], found.evidence["units"]) == (1.0, 32)


def test_units_that_are_off_for_half_of_the_rows_are_fine(watch: Nursery) -> None:
    assert watch(START, NET.replace("(8, 32)", "(8, 64)").replace("(32, 3)", "(64, 3)"), LOOP).causes == []


def test_units_that_die_while_the_labels_are_noise_are_a_consequence(watch: Nursery) -> None:
    run = watch(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn
        torch.manual_seed(0)
        x = torch.rand(1500, 64)
        model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.006)
        for step in range(150):
            rows = torch.randint(len(x), (100,))
            loss = F.cross_entropy(model(x[rows]), torch.randint(10, (100,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """
    )
    assert run.causes == ["data.labels-uninformative"]


def test_hidden_units_at_their_bounds_are_named(watch: Nursery) -> None:
    model = NET.replace("nn.ReLU()", "nn.Tanh()").replace("1e-2", "1e-3")
    run = watch(START, model, "nn.init.normal_(model[0].weight, std=30.0)", LOOP)
    names = [finding.cause for finding in run.diagnosis.findings]
    assert "model.saturated-units" in names
    found = run.finding("model.saturated-units")
    assert found.evidence["saturated"] > 0.6
    assert found.evidence["at_start"] > 0.6
    assert found.step == 0


def test_saturated_units_are_only_mentioned_where_the_task_is_solved(watch: Nursery) -> None:
    model = NET.replace("nn.ReLU()", "nn.Tanh()").replace("(8, 32)", "(8, 256)").replace("(32, 3)", "(256, 3)")
    run = watch(START, "x, y = x[:64], y[:64]", model, "nn.init.normal_(model[0].weight, std=30.0)", LOOP)
    assert run.diagnosis.verdict == "healthy"
    assert run.finding("model.saturated-units").severity == "info"


def test_saturated_gates_by_themselves_are_named_first(watch: Nursery) -> None:
    model = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.gate, self.outer = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 3)
            nn.init.constant_(self.gate.bias, -12.0)

        def forward(self, given):
            return self.outer(self.inner(given).relu() * torch.sigmoid(self.gate(given)))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    """
    run = watch(START, model, LOOP)
    run.names_first(
        "model.saturated-units", step=0, at="|torch.sigmoid(", evidence={"saturated", "at_start", "sampled_steps"}
    )


def test_a_sigmoid_at_the_output_may_be_certain(watch: Nursery) -> None:
    model = NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.Sigmoid()").replace("1e-2", "5e-2")
    run = watch(START, "y = (x[:, :3] > 0).float(); loss_of = F.binary_cross_entropy", model, LOOP)
    assert run.causes == []


# Gradients through depth and time


def profile_of(*sizes: float, at_start: tuple[float, ...] = ()) -> RecordedRun:
    """A run whose layers, first to last, get gradients of these sizes per weight, at step 0 perhaps others."""

    def updated(given: tuple[float, ...]) -> list[dict[str, object]]:
        rows = [{"id": number, "grad": 8 * size, "ratio": 0.01} for number, size in enumerate(given)]
        return [{"optimizer": 0, "rows": rows}]

    layers = [{"op": "linear", "parameter": number, "out_std": 1.0} for number in range(len(sizes))]
    looks = [look(0, notes={"layers": layers}, steps=updated(at_start or sizes))]
    looks += [look(step, notes={"layers": layers}, steps=updated(sizes)) for step in range(1, 4)]
    return recorded([0.7] * 60, sampled_steps=looks, parameters=[parameter(n) for n in range(len(sizes))])


def test_small_gradients_of_queries_and_keys_are_not_lost_on_the_way_back() -> None:
    block = (5e-7, 5e-7, 4.6e-5, 4.1e-5, 4.5e-5, 4.3e-5)  # query, key, value, output, up, down: at every depth
    assert vanishing_gradient(profile_of(*block, 3e-3, 2e-2)) is None
    assert vanishing_gradient(profile_of(*block, *block, 3e-3, 2e-2)) is None
    assert vanishing_gradient(profile_of(*[1e-8 * 10**n for n in range(8)])) is not None
    assert vanishing_gradient(profile_of(1e-9, 1e-9, 1e-9, 1e-9, 1e-3, 1e-3, 1e-3, 1e-3)) is not None


def test_a_gradient_that_vanishes_only_after_the_first_update_is_no_property_of_the_network() -> None:
    falls = [1e-8 * 10**n for n in range(8)]
    assert vanishing_gradient(profile_of(*falls, at_start=(1e-3,) * 8)) is None
    assert vanishing_gradient(profile_of(*falls, at_start=(0.0,) * 7 + (1e-3,))) is not None  # a head of zeros


def test_a_gradient_that_dies_on_its_way_back_is_named_with_both_ends(watch: Nursery) -> None:
    run = watch(START, deep("nn.Sigmoid()", layers=10, width=16), LOOP)
    found = run.names_first("model.vanishing-gradient", step=0, at="0.weight", evidence={"ratio", "layers", "profile"})
    assert found.evidence["ratio"] < 1e-3
    assert found.evidence["layers"] == 10


def test_sixteen_sigmoid_layers_that_end_at_the_label_prior_are_not_healthy(watch: Nursery) -> None:
    run = watch(START, deep("nn.Sigmoid()", layers=17, rate="1e-3"), LOOP)
    assert run.diagnosis.verdict == "broken"
    found = run.names_first("model.vanishing-gradient", step=0, at="0.weight", evidence={"ratio", "layers"})
    assert found.evidence["layers"] == 17


def test_a_deep_residual_network_is_fine(watch: Nursery) -> None:
    model = """
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, given):
            return given + torch.sigmoid(self.inner(self.norm(given)))

    model = nn.Sequential(nn.Linear(8, 16), *(Block() for _ in range(8)), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    """
    assert watch(START, model, LOOP).causes == []


RECURRENT = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 20, 2)
y = x[:, -5:, 0].sum(1, keepdim=True) / 2
loss_of = F.mse_loss

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.again, self.outer = nn.Linear(2, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 1)
        nn.init.orthogonal_(self.again.weight, gain=GAIN)

    def forward(self, given):
        hidden = torch.zeros(len(given), 16)
        for moment in range(given.shape[1]):
            hidden = self.inner(given[:, moment]) + self.again(hidden)
        return self.outer(hidden)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""


def test_a_gradient_that_explodes_through_time_is_named(watch: Nursery) -> None:
    run = watch(RECURRENT.replace("GAIN", "1.7"), LOOP)
    found = run.names_first(
        "model.exploding-gradient", step=0, at="again.weight", evidence={"first", "median", "largest"}
    )
    assert found.evidence["first"] > 100


ROLLOUTS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
inner, outer = nn.Linear(3, 16), nn.Linear(16, 2)
optimizer = torch.optim.Adam([*inner.parameters(), *outer.parameters()], lr=1e-3)
for step in range(120):
    states = [torch.randn(3) for _ in range(20)]
    chosen = [int(F.softmax(outer(torch.relu(inner(state))), 0).argmax()) for state in states]
    out = outer(torch.relu(inner(torch.stack(states)))).square().mean() * (3e3 if step % 30 == 29 else 1.0)
    optimizer.zero_grad()
    out.backward()
    optimizer.step()
"""


def test_a_policy_that_acts_many_times_before_a_step_is_no_recurrence(watch: Nursery) -> None:
    run = watch(ROLLOUTS)
    layers = [call for look in run.facts["sampled_steps"] for call in look["notes"].get("layers", [])]
    assert {call["repeats"] for call in layers} == {False}
    assert "model.exploding-gradient" not in run.causes


def test_a_recurrence_that_keeps_its_scale_is_fine(watch: Nursery) -> None:
    assert watch(RECURRENT.replace("GAIN", "0.9").replace("1e-3", "1e-2"), LOOP).causes == []


def test_a_gru_with_clipping_is_fine(watch: Nursery) -> None:
    model = """
    torch.manual_seed(0)
    x = torch.randn(256, 10, 2)
    y = x[:, -3:, :1].sum(1) / 2
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.GRU(2, 16, batch_first=True), nn.Linear(16, 1)
        def forward(self, given):
            return self.head(self.body(given)[0][:, -1])
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_of = F.mse_loss
    """
    clipped = LOOP.replace(
        "    optimizer.step", "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step"
    )
    assert watch(VALUES, model, clipped).causes == []


# Normalisation

NORMED = NET.replace("nn.ReLU()", "nn.BatchNorm1d(32), nn.ReLU()")


def test_a_batch_norm_over_two_rows_is_named(watch: Nursery) -> None:
    run = watch(START, NORMED, LOOP.replace("(32,)", "(2,)"))
    found = run.finding("model.batchnorm-tiny-batch")
    assert found.cause in run.causes
    assert (found.step, found.severity) == (0, "warning")
    assert (found.evidence["per_statistic"], found.evidence["batch"]) == (2, 2)
    assert run.at("loss = loss_of") in found.where


EASY = "x[torch.arange(256), y] += 4\n"
FOUR_ROWS = LOOP.replace("(32,)", "(4,)").replace("range(60)", "range(200)")
EVALUATED = "model.eval()\nwith torch.no_grad(): right = (model(x).argmax(1) == y).float().mean()\n"


def test_a_batch_norm_over_four_rows_that_learns_is_named_if_the_running_statistics_are_used(watch: Nursery) -> None:
    run = watch(START, EASY, NORMED, FOUR_ROWS, EVALUATED)
    run.names_first("model.batchnorm-tiny-batch", step=0, at="model.1", evidence={"per_statistic", "batch", "calls"})


def test_a_batch_norm_over_four_rows_that_learns_and_is_never_evaluated_is_only_mentioned(watch: Nursery) -> None:
    run = watch(START, EASY, NORMED, FOUR_ROWS)
    assert run.causes == []
    assert run.finding("model.batchnorm-tiny-batch").severity == "info"


def test_a_batch_norm_over_the_pixels_of_two_images_is_fine(watch: Nursery) -> None:
    model = """
    x = torch.randn(256, 1, 8, 8)
    y = (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    """
    run = watch(START, model, LOOP.replace("(32,)", "(2,)"))
    assert "model.batchnorm-tiny-batch" not in [finding.cause for finding in run.diagnosis.findings]


def test_one_small_batch_at_the_end_of_an_epoch_is_fine(watch: Nursery) -> None:
    short = LOOP.replace("torch.randint(len(x), (32,))", "torch.randperm(len(x))[: 3 if step % 8 == 7 else 32]")
    assert watch(START, NORMED, short).causes == []


# Attention

GROWING = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(12, 16), nn.Linear(16, 48), nn.Linear(16, 12)
        self.sharpness = 1.0

    def forward(self, ids):
        query, key, value = self.mix(self.tokens(ids)).chunk(3, -1)
        scores = self.sharpness * query @ key.transpose(1, 2) / 4
        return self.head(scores.softmax(-1) @ value)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(100):
    ids = torch.randint(12, (16, 10))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(ids).transpose(1, 2), ids.flip(1))
    loss.backward()
    optimizer.step()
    model.sharpness *= FACTOR
"""


def test_attention_logits_that_climb_while_the_heads_become_certain_are_named(watch: Nursery) -> None:
    run = watch(GROWING.replace("FACTOR", "1.08"))
    found = run.names_first(
        "model.attention-logit-growth",
        step=run.facts["sampled_steps"][-1]["step"],
        at="|scores.softmax(",
        evidence={"first", "last", "entropy_first", "entropy_last"},
    )
    assert found.evidence["last"] > 8 * found.evidence["first"]
    assert found.evidence["entropy_last"] < 0.5 * found.evidence["entropy_first"]


def test_attention_logits_that_stay_are_fine(watch: Nursery) -> None:
    assert "model.attention-logit-growth" not in watch(GROWING.replace("FACTOR", "1.0")).causes


LATE_EVALUATION = """
held_out = torch.randn(16, 8)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with torch.no_grad():
    model[0].bias[:44] = 0.05
    model[0].weight[:44] *= 0.01
for step in range(60):
    if step == 2:  # most units are dead from here on, and the others learn
        with torch.no_grad():
            model[0].bias[:44] = -50.0
    if step > 2:
        with torch.no_grad():
            model(held_out)
    rows = torch.randint(len(x), (32,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
"""


def test_units_that_die_later_were_not_dead_at_the_start_although_evaluations_come_between(watch: Nursery) -> None:
    run = watch(START, LATE_EVALUATION)
    assert run.finding("model.dead-units").evidence["share_at_start"] < 0.2
    assert run.causes == []


NORMED_WEIGHTS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.body = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        for part in (self.skip, self.head):
            nn.init.normal_(part.weight, std=0.005)
            nn.init.zeros_(part.bias)
    def forward(self, x):
        return self.head(torch.relu(self.body(x) + self.skip(x)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
"""


def test_a_path_with_computed_weights_is_not_taken_for_one_that_dies(watch: Nursery) -> None:
    run = watch(START, NORMED_WEIGHTS, LOOP)
    assert "init.too-small" not in [finding.cause for finding in run.diagnosis.findings]


def test_the_gain_of_a_recurrent_cell_goes_by_its_own_inputs(watch: Nursery) -> None:
    cells = """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell, self.head = nn.LSTMCell(1, 48), nn.Linear(48, 3)
            def forward(self, rows):
                state = (torch.zeros(len(rows), 48), torch.zeros(len(rows), 48))
                for column in rows.split(1, 1):
                    state = self.cell(column, state)
                return self.head(state[0])
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    """
    run = watch(START, cells, LOOP)
    assert "init.too-small" not in [finding.cause for finding in run.diagnosis.findings]
    layer = next(call for call in run.loaded[0].sampled_steps[0].calls.layers if call.op == "lstm_cell")
    assert layer.fan_in is None


def test_units_that_were_zero_before_a_rate_that_moves_nothing_are_not_the_cause(watch: Nursery) -> None:
    """A third of the units is off for these rows from the beginning; the weights have hardly moved since."""
    half_off = "with torch.no_grad(): model[0].bias[:18] = -8.0\n"
    run = watch(START, NET.replace("optim.Adam", "optim.SGD").replace("1e-2", "1e-4"), half_off, LOOP)
    assert run.first.cause == "lr.too-low"
    assert "model.dead-units" not in run.causes


def test_half_of_the_units_may_be_off_from_the_start_where_rows_hardly_differ(watch: Nursery) -> None:
    body = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(120):
    rows = torch.tensor([0.0, 0.2, 0.1]) + 0.05 * torch.randn(64, 3)
    loss = (model(rows) - torch.randn(64, 1)).square().mean()  # there is nothing to learn
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    found = [each for each in watch(body).diagnosis.findings if each.cause == "model.dead-units"]
    assert [each.severity for each in found] == ["info"]


SEGMENTED = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
images = torch.randn(64, 1, 10, 10).sign() * 4
masks = (images > 0).float()
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
with torch.no_grad():
    model[2].weight *= 30
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
def overlap(p, t):
    return 2 * (p * t).sum() / (p.sum() + t.sum())
for step in range(120):
    optimizer.zero_grad()
    for part in range(PARTS):
        rows = torch.randint(64, (8,))
        loss = 1 - overlap(torch.sigmoid(model(images[rows])), masks[rows])
        loss.backward()
    optimizer.step()
    with torch.no_grad():
        overlap((torch.sigmoid(model(images)) > 0.5).float(), masks)
"""


@pytest.mark.parametrize("parts", [1, 2], ids=["with an evaluation", "with two microbatches"])
def test_the_outputs_of_a_model_may_be_at_their_bounds(watch: Nursery, parts: int) -> None:
    run = watch(SEGMENTED.replace("PARTS", str(parts)))
    assert "model.saturated-units" not in [finding.cause for finding in run.diagnosis.findings]
