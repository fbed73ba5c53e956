"""Runs that learned nothing, although no rule knows why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recorded import SITE, falling, look, moves
from recorded import run as recorded
from surefoot.diagnose.rules.not_learning import course_of, not_learning, term_not_learning, why_unjudged
from surefoot.diagnose.run import RecordedRun
from surefoot.diagnose.sampled import are_too_few

if TYPE_CHECKING:
    from watched import Nursery

START = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(600, 8)
y = x[:, :3].argmax(1)
"""

TRAIN = """
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(10):
    for rows in torch.randperm(600).split(50):
        loss = loss_of(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

CLASSES = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
def loss_of(rows):
    return F.cross_entropy(model(GIVEN), y[rows])
"""


FLAT = """
y = torch.rand(600, 1)
model = nn.Linear(8, 1)
model.weight.data.mul_(0.15)
model.bias.data.fill_(0.5)
"""
"""Targets that say nothing, and a model that begins with the best constant answer."""


def test_a_loss_at_the_best_constant_answer_is_named_with_both_numbers(watch: Nursery) -> None:
    """A linear model cannot learn which of two signs differ."""
    run = watch(
        START,
        "y = (x[:, 0] * x[:, 1] > 0).float()\nmodel = nn.Linear(8, 1)\n",
        "def loss_of(rows):\n    return F.binary_cross_entropy_with_logits(model(x[rows]).squeeze(1), y[rows])\n",
        TRAIN,
    )
    assert run.first.cause in ("optim.not-learning", "data.labels-uninformative")
    if run.first.cause == "optim.not-learning":
        assert "the loss of the best constant answer is 0.69" in run.first.summary


def test_a_softmax_over_one_output_ends_above_the_best_constant_answer(watch: Nursery) -> None:
    run = watch(
        START,
        "y = (x[:, 0] > 0).float()\nmodel = nn.Sequential(nn.Linear(8, 1), nn.Softmax(1))\n",
        "def loss_of(rows):\n    return F.binary_cross_entropy(model(x[rows]).squeeze(1), y[rows])\n",
        TRAIN,
    )
    assert run.causes == ["optim.not-learning"]
    assert run.diagnosis.verdict == "broken"
    assert run.first.evidence["without_gradient"] == ["0.weight", "0.bias"]


def test_a_run_that_learned_nothing_is_broken_whatever_else_is_noticed(watch: Nursery) -> None:
    model = "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1), nn.Softmax(1))"
    run = watch(
        START,
        f"y = (x[:, 0] > 0).float()\nmodel = {model}\nmodel[0].bias.data[:4] = -100\n",
        "def loss_of(rows):\n    return F.binary_cross_entropy(model(x[rows]).squeeze(1), y[rows])\n",
        TRAIN,
    )
    assert run.causes == ["optim.not-learning"]
    assert [finding.cause for finding in run.diagnosis.findings if finding.severity == "info"] == ["model.dead-units"]
    assert run.diagnosis.verdict == "broken"


def test_a_run_that_learns_is_healthy(watch: Nursery) -> None:
    assert watch(START, CLASSES.replace("GIVEN", "x[rows]"), TRAIN).diagnosis.verdict == "healthy"


def test_a_supervised_loss_that_stays_where_it_was_is_named(watch: Nursery) -> None:
    """The best constant answer of a weighted loss is not known."""
    run = watch(
        START,
        "y = torch.randint(2, (600, 2)).float()\nmodel = nn.Linear(8, 2)\nmodel.weight.data.mul_(0.1)\n",
        "weight = torch.ones(2)\n",
        "def loss_of(rows):\n    return F.binary_cross_entropy_with_logits(model(x[rows]), y[rows], weight)\n",
        TRAIN.replace("Adam", "SGD"),
    )
    assert run.causes == ["optim.not-learning"]
    assert "The loss did not fall" in run.first.summary


@pytest.mark.parametrize(
    ("loss", "level"),
    [
        ("F.l1_loss(model(x[rows]), y[rows])", 0.25),
        ("F.smooth_l1_loss(model(x[rows]), y[rows])", 1 / 24),
        ("((model(x[rows]) - y[rows]) ** 2).mean()", 1 / 12),
    ],
)
def test_the_best_constant_answer_of_distances_is_known(watch: Nursery, loss: str, level: float) -> None:
    slow = TRAIN.replace("Adam", "SGD").replace("1e-2", "1e-3")
    run = watch(START, FLAT, f"def loss_of(rows):\n    return {loss}\n", slow)
    assert run.diagnosis.verdict == "broken"
    assert RecordedRun(run.loaded[0]).sampled.chance == pytest.approx(level, rel=0.1)


def test_shuffled_targets_of_a_squared_error_written_by_hand_are_uninformative(watch: Nursery) -> None:
    run = watch(
        START,
        "y = x[:, 0] + x[:, 1]\nmodel = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))\n",
        "def loss_of(rows):\n    return (model(x[rows])[:, 0] - y[ORDER]).pow(2).mean()\n".replace(
            "ORDER", "torch.randperm(600)[:50]"
        ),
        TRAIN,
    )
    assert run.causes == ["data.labels-uninformative"]


SETTLED = [*falling(40, 2.7, 1.2), *[1.2] * 80]


def with_two_terms(
    last: float = 0.69, custom: tuple[str, ...] = (), classes: int = 2, losses=SETTLED, added=SITE
) -> RecordedRun:
    """The first term goes from 0.69 to `last`, the second one falls."""
    looks = []
    for step in range(0, 120, 10):
        values = (0.69 if step < 60 else last, 2.0 - step / 80)
        shared = {"grad": True, "site": SITE, "reduction": "mean", "step": step}
        counts = {str(label): 64 // classes for label in range(classes)}
        labels = {"op": "cross_entropy", "value": values[0], "labels": counts, "index": 1}
        sizes = {"op": "mse_loss", "value": values[1], "target_variance": 2.0, "index": 2}
        root = {"value": sum(values), "site": SITE, "parameters": [0], "custom": list(custom)}
        root |= {"made_from": [{"site": added, "shape": []}]}
        looks.append(look(step, roots=[root], notes={"losses": [shared | labels, shared | sizes]}, steps=moves()))
    return recorded(losses, sampled_steps=looks)


def test_one_of_several_terms_that_learns_nothing_is_named() -> None:
    claim = term_not_learning(with_two_terms())
    assert claim is not None
    assert claim.evidence["best_constant_answer"] == pytest.approx(0.693, abs=0.001)
    assert why_unjudged(with_two_terms(0.5)) == ""


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"last": 0.5}, "it has learned"),
        ({"custom": ("ReverseGradient",)}, "a gradient that is reversed on purpose"),
        ({"classes": 1}, "every constant answer is right where all labels are equal, as those of positive pairs"),
        ({"losses": falling(120, 2.7, 1.2)}, "the other term is still being learned"),
        ({"added": "train.py:99"}, "it is no term of the loss, as that before an adaptation is not"),
    ],
)
def test_a_term_is_not_said_to_learn_nothing(settings, why: str) -> None:
    assert term_not_learning(with_two_terms(**settings)) is None, why


def test_the_loss_of_an_evaluation_with_gradients_is_no_term(watch: Nursery) -> None:
    shown = "        if epoch % 2 == 0:\n            shown = F.mse_loss(model(x[:50]), y[:50])\n"
    run = watch(
        START,
        "y = x[:, :1] + x[:, 1:2]\nmodel = nn.Linear(8, 1)\n",
        "def loss_of(rows):\n    return F.mse_loss(model(x[rows]), y[rows])\n",
        TRAIN.replace("lr=1e-2", "lr=3e-2") + shown,
    )
    assert run.diagnosis.verdict == "healthy"


def test_a_run_that_still_falls_is_not_called_healthy_while_a_term_has_learned_nothing() -> None:
    why = why_unjudged(with_two_terms(losses=falling(120, 2.7, 1.2)))
    assert "The term `cross_entropy`" in why
    assert "too short" in why


def test_a_few_spikes_do_not_hide_that_a_loss_fell() -> None:
    losses = falling(400, 300.0, 100.0)
    for step in (310, 350, 390):
        losses[step] = 9e3
    assert why_unjudged(recorded(losses)) == ""
    assert why_unjudged(recorded([300.0 + step % 3 for step in range(400)])) != ""


def test_a_metric_loss_that_stays_where_it_was_is_unknown(watch: Nursery) -> None:
    run = watch(
        START,
        "model = nn.Linear(8, 4)\n",
        "def loss_of(rows):\n    a, b, c = model(x).chunk(3)\n    return F.triplet_margin_loss(a, b, c)\n",
        TRAIN.replace("1e-2", "1e-6"),
    )
    assert run.causes == []
    assert run.diagnosis.verdict == "unknown"
    assert "The loss has hardly moved" in run.diagnosis.reason


LEARNED = CLASSES.replace("GIVEN", "x[rows]")
LOADED = "model.load_state_dict(model.state_dict())\n"
HARDLY = TRAIN.replace("lr=1e-2", "lr=1e-2, eps=1e4")
OTHER_TASK = TRAIN.replace("loss_of(rows)", "F.cross_entropy(model(x[rows]), (x[rows, 4] > 0).long())")


def test_weights_that_were_trained_for_the_task_need_not_learn(watch: Nursery) -> None:
    again = TRAIN.replace("Adam", "SGD").replace("1e-2", "1e-4")
    assert watch(START, LEARNED, TRAIN, LOADED, again).causes == []


@pytest.mark.parametrize("before", [LOADED, "model[2] = nn.Linear(16, 3)\n"])
def test_a_task_that_is_new_to_loaded_weights_must_be_learned(watch: Nursery, before: str) -> None:
    run = watch(START, LEARNED, OTHER_TASK, before, HARDLY)
    assert run.causes == ["optim.epsilon"]
    assert run.diagnosis.verdict == "broken"


def test_labels_without_information_are_found_after_a_training_on_other_labels(watch: Nursery) -> None:
    shuffled = "y = y[torch.randperm(600)]\nmodel[2] = nn.Linear(16, 3)\n"
    run = watch(START, LEARNED, OTHER_TASK, shuffled, TRAIN.replace("1e-2", "1e-3"))
    assert run.causes == ["data.labels-uninformative"]


# ── rows and steps exchanged ─────────────────────────────────────────────────────────────────────────────────────────

RECURRENT = """
x = torch.randn(600, 9, 2)
y = (x.sum((1, 2)) > 0).long()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(2, 12SETTING), nn.Linear(12, 2)
    def forward(self, given):
        return self.out(self.rnn(given)[0][:, -1])
model = Net()
def loss_of(rows):
    return F.cross_entropy(model(x[rows]), y[rows])
"""


def test_a_recurrent_layer_that_runs_over_the_batch_is_named(watch: Nursery) -> None:
    run = watch(START, RECURRENT.replace("SETTING", ""), TRAIN)
    first = run.names_first("model.mixes-rows", step=0, at="|self.rnn(given)", evidence={"time_steps", "sequences"})
    assert (first.evidence["time_steps"], first.evidence["sequences"]) == (50, 9)
    assert "batch_first=True" in first.fixes[0]


def test_a_recurrent_layer_that_runs_over_time_is_not(watch: Nursery) -> None:
    assert watch(START, RECURRENT.replace("SETTING", ", batch_first=True"), TRAIN).causes == []


# ── a new model for every pass ───────────────────────────────────────────────────────────────────────────────────────

AGAIN = """
for life in range(LIVES):
    torch.manual_seed(life)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(PASSES):
        for rows in torch.randperm(600).split(50):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""


FIRST_OR_LAST = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
x = torch.randn(400, 6, 4)
y = x.sum(1)[:, :3].argmax(1)
layer, head = nn.LAYER(4, 16, batch_first=True), nn.Linear(16, 3)
optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
for step in range(80):
    rows = torch.randint(400, (40,))
    loss = F.cross_entropy(head(layer(x[rows])[0][:, POSITION]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_whose_first_output_alone_is_used_is_named(watch: Nursery, layer: str) -> None:
    run = watch(FIRST_OR_LAST.replace("LAYER", layer).replace("POSITION", "0"))
    found = run.names_first("optim.not-learning", step=0, at="|F.cross_entropy", evidence={"time_steps"})
    assert found.evidence["time_steps"] == 6


def test_a_recurrent_layer_whose_last_output_is_used_is_fine(watch: Nursery) -> None:
    assert watch(FIRST_OR_LAST.replace("LAYER", "LSTM").replace("POSITION", "-1")).causes == []


DROPPING = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
x = torch.randn(400, 8)
y = (x[:, :3] + 0.3 * torch.randn(400, 3)).argmax(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(SHARE), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(120):
    rows = torch.randint(400, (40,))
    loss = F.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_decay_that_wins_because_of_a_dropout_is_a_consequence(watch: Nursery) -> None:
    decayed = DROPPING.replace("SHARE", "0.98").replace("lr=1e-2", "lr=1e-2, weight_decay=0.3")
    assert watch(decayed).causes == ["optim.not-learning"]


def test_a_dropout_that_leaves_almost_nothing_is_named(watch: Nursery) -> None:
    run = watch(DROPPING.replace("SHARE", "0.98"))
    found = run.names_first("optim.not-learning", step=0, at="|F.cross_entropy", evidence={"p", "first", "last"})
    assert found.evidence["p"] == 0.98


def test_a_strong_dropout_that_lets_the_model_learn_is_fine(watch: Nursery) -> None:
    assert watch(DROPPING.replace("SHARE", "0.8").replace("range(120)", "range(400)")).causes == []


def test_a_new_model_for_every_pass_is_named(watch: Nursery) -> None:
    run = watch(START, AGAIN.replace("LIVES", "6").replace("PASSES", "1"))
    assert run.causes == ["optim.not-learning"]
    assert "each for one pass of 12 steps" in run.first.summary


def test_several_models_that_each_see_the_rows_often_are_meant(watch: Nursery) -> None:
    assert watch(START, AGAIN.replace("LIVES", "4").replace("PASSES", "12")).causes == []


# ── the course of a loss ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_loss_that_still_falls_is_told_from_one_that_has_stopped() -> None:
    assert course_of([5.0 - 0.02 * step for step in range(100)]).is_falling
    assert not course_of([max(2.0, 5.0 - 0.2 * step) for step in range(100)]).is_falling


def test_a_loss_that_only_wavers_has_not_fallen() -> None:
    assert not course_of([1.0 + 0.2 * (-1) ** step for step in range(100)]).fell
    assert course_of([1.0 + 0.2 * (-1) ** step - 0.004 * step for step in range(100)]).fell


def test_a_loss_that_creeps_is_told_from_one_that_has_stopped() -> None:
    assert course_of([10.95 - 0.001 * step + 0.002 * (-1) ** step for step in range(40)]).creeps
    assert not course_of([max(10.93, 10.95 - 0.001 * step) + 0.002 * (-1) ** step for step in range(40)]).creeps
    assert not course_of([10.95 - 0.001 * step + 0.2 * (-1) ** (step // 5) for step in range(40)]).creeps


SMOKE_TEST = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(3000, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3000))
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
for step in range(STEPS):
    ids = (torch.randint(3000, (8, 1)) + torch.arange(33)) % 3000
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), GOAL.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_first_steps_of_a_slow_run_are_too_few_to_judge(watch: Nursery) -> None:
    slow = SMOKE_TEST.replace("GOAL", "ids[:, 1:]").replace("RATE", "1e-4")
    run = watch(slow.replace("STEPS", "45"))
    assert run.diagnosis.verdict == "unknown"
    assert "too few or too small to judge whether it learns" in run.diagnosis.reason


def test_many_steps_without_a_fall_are_not_learning(watch: Nursery) -> None:
    still = SMOKE_TEST.replace("GOAL", "torch.randint(3000, (8, 32))").replace("RATE", "1e-4").replace("STEPS", "200")
    assert watch(still).diagnosis.verdict == "broken"


# ── rates and weights that leave nothing to learn with ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rate", ["0.0", "1e-12"])
def test_a_rate_of_zero_is_the_extreme_of_too_low(watch: Nursery, rate: str) -> None:
    run = watch(START, CLASSES.replace("GIVEN", "x[rows]"), TRAIN.replace("Adam", "SGD").replace("1e-2", rate))
    first = run.names_first("lr.too-low", step=0, at="|optimizer = ", evidence={"lr", "steps"})
    assert "none of its 4 parameters changed" in first.summary


FROZEN = """
model = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 4), nn.Sigmoid(), nn.Linear(4, 3))
LOADED
model[:3].requires_grad_(False)
def loss_of(rows):
    return F.cross_entropy(model(x[rows]), y[rows])
"""
HEAD_ONLY = TRAIN.replace("model.parameters()", "model[4].parameters()").replace("1e-2", "1e-3")


def test_random_weights_that_are_frozen_and_left_out_are_named(watch: Nursery) -> None:
    run = watch(START, FROZEN.replace("LOADED", ""), HEAD_ONLY)
    assert run.first.cause == "optim.frozen-parameters"
    assert "0.weight, 2.weight stay at random values" in run.first.summary


def test_weights_that_were_loaded_may_be_frozen_and_left_out(watch: Nursery) -> None:
    run = watch(START, FROZEN.replace("LOADED", "model.load_state_dict(model.state_dict())"), HEAD_ONLY)
    assert "optim.frozen-parameters" not in run.causes


def test_a_short_run_at_the_best_constant_answer_is_unknown(watch: Nursery) -> None:
    run = watch(START, CLASSES.replace("GIVEN", "torch.randn_like(x[rows])"), TRAIN.replace("range(10)", "range(2)"))
    assert run.diagnosis.verdict == "unknown"
    assert "too short to judge" in run.diagnosis.reason


def test_rare_words_give_no_level_to_compare_a_loss_with() -> None:
    assert are_too_few({str(word): 1 + 40 // (1 + word) for word in range(400)})
    assert not are_too_few({str(letter): 60 for letter in range(90)})
    assert not are_too_few(dict.fromkeys("abcdefghij", 7))


def near_chance(level: float, noise: float, spike: float = 0.0) -> RecordedRun:
    """A loss that wavers around a level from the start, where the best constant answer has 0.693."""
    labels = {"op": "cross_entropy", "labels": {"0": 32, "1": 32}, "index": 1, "grad": True, "site": SITE}
    root = {"value": level, "site": SITE, "parameters": [0], "custom": [], "factor": 1.0}
    root |= {"sign": {"function": "cross_entropy", "site": SITE, "factor": 1.0, "index": 1}}
    loss = labels | {"reduction": "mean", "value": level}
    looks = [look(step, roots=[root], notes={"losses": [loss | {"step": step}]}) for step in range(0, 80, 10)]
    losses = [level + noise * (-1) ** step + spike * (step == 70) for step in range(80)]
    return recorded(losses, sampled_steps=looks)


def test_one_huge_loss_does_not_hide_what_was_learned() -> None:
    assert not_learning(near_chance(0.2, 0.01, spike=500.0)) is None
    assert not_learning(near_chance(0.7, 0.01, spike=500.0)) is not None


def test_a_loss_within_its_noise_of_the_best_constant_answer_is_unknown() -> None:
    assert "cannot be distinguished" in why_unjudged(near_chance(0.675, 0.03))
    assert why_unjudged(near_chance(0.675, 0.003)) == ""


BENT = "y = x[:, :1].square() + x[:, 1:2].square()\n"
FITTED = "def loss_of(rows):\n    return F.mse_loss(model(x[rows]), y[rows])\n"


def test_layers_without_an_activation_between_them_are_named(watch: Nursery) -> None:
    model = "model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1))\n"
    run = watch(START, BENT, model, FITTED, TRAIN)
    assert run.first.cause == "optim.not-learning"
    assert run.first.evidence["layers"] == 3
    bent = model.replace("nn.Linear(8, 32),", "nn.Linear(8, 32), nn.Tanh(),")
    assert "Nothing lies between" not in str(watch(START, BENT, bent, FITTED, TRAIN).diagnosis)
    straight = watch(START, "y = x[:, :1] + x[:, 1:2]\n", model, FITTED, TRAIN)
    assert straight.causes == [], "a linear function is all that is needed"


def test_a_product_of_low_rank_needs_no_activation(watch: Nursery) -> None:
    """Words and their neighbours: a narrow layer between one-hot words and scores is an embedding."""
    words = "words = torch.randint(12, (600,)); x = F.one_hot(words, 12).float()\n"
    noisy = "y = torch.where(torch.rand(600) < 0.3, (words + 1) % 12, torch.randint(12, (600,)))\n"
    model = "model = nn.Sequential(nn.Linear(12, 4, bias=False), nn.Linear(4, 12, bias=False))\n"
    scored = "def loss_of(rows):\n    return F.cross_entropy(model(x[rows]), y[rows])\n"
    run = watch(START, words, noisy, model, scored, TRAIN)
    assert run.causes == []
