"""Losses that are not what they seem, on real scripts; and those that only look so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from recorded import SITE, class_scores, look, run_with_losses
from recorded import run as recorded
from surefoot.diagnose.rules import losses
from watched import CLASSES, FIT, LOOP, NET, VALUES

if TYPE_CHECKING:
    from watched import Nursery

CROSS_ENTROPY = "loss_of = F.cross_entropy"
SQUARES = "loss_of = F.mse_loss"
IN_ORDER = LOOP.replace("torch.randint(len(x), (32,))", "torch.arange(32) + 32 * (step % 8)")


# Swapped arguments

BINARY = VALUES + "y = (y > 0).float()\n"
SWAPPED = LOOP.replace("loss_of(model(x[rows]), y[rows])", "loss_of(y[rows], model(x[rows]))")
REVERSE_TERM = LOOP.replace(
    "loss_of(model(x[rows]), y[rows])",
    "loss_of(model(x[rows]), y[rows]) + F.binary_cross_entropy(y[rows].clamp(0.01, 0.99), model(x[rows]).sigmoid())",
)


@pytest.mark.parametrize(
    "prepared",
    [
        (BINARY, "loss_of = F.binary_cross_entropy_with_logits", FIT),
        (BINARY, "loss_of = nn.BCEWithLogitsLoss()", FIT),
        (CLASSES, "y = F.one_hot(y, 3).float()\n" + CROSS_ENTROPY, NET),
    ],
)
def test_swapped_arguments_of_a_loss_are_named_and_explain_targets_out_of_range(
    watch: Nursery, prepared: tuple[str, str, str]
) -> None:
    run = watch(*prepared, SWAPPED)
    found = run.names_first(
        "loss.logits-into-probability-loss",
        step=0,
        at="|loss = loss_of",
        evidence={"target_lowest", "target_highest", "calls", "loss"},
    )
    assert run.causes == ["loss.logits-into-probability-loss"]
    assert "are swapped" in found.summary
    assert found.fixes[0].startswith(f"Swap the two arguments at {run.at('|loss = loss_of')}: ")


def test_a_reverse_term_whose_target_is_a_probability_is_no_swap(watch: Nursery) -> None:
    run = watch(BINARY, "loss_of = F.binary_cross_entropy_with_logits", FIT, REVERSE_TERM)
    assert run.causes == []


BEYOND = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    x = F.interpolate(torch.randn(8, 1, 4, 4), size=16, mode="bilinear")
    y = (x[:, 0] > 0).long()
    scores = model(x)
    likely = F.interpolate(scores.softmax(1), size=16, mode="bicubic")
    known = F.one_hot(y, 2).permute(0, 3, 1, 2).float().clamp(1e-4).log()
    loss = F.cross_entropy(F.interpolate(scores, size=16), y)
    loss = loss + 0.1 * F.cross_entropy(known, likely)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_probabilities_that_an_interpolation_takes_beyond_0_and_1_are_no_swap(watch: Nursery) -> None:
    assert "loss.logits-into-probability-loss" not in watch(BEYOND).causes


# Softmax and sigmoid

SOFTMAX_IN_FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, given):
        return F.softmax(self.outer(F.relu(self.inner(given))), dim=-1)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


def test_a_softmax_before_cross_entropy_is_named_with_both_lines_and_the_floor(watch: Nursery) -> None:
    run = watch(CLASSES, CROSS_ENTROPY, SOFTMAX_IN_FORWARD, LOOP)
    found = run.names_first(
        "loss.softmax-before-cross-entropy",
        step=0,
        at="|loss = loss_of",
        evidence={"rows", "classes", "lowest", "largest_sum_error", "floor", "loss", "steps"},
    )
    assert run.at("F.softmax(") in found.where
    assert found.evidence["classes"] == 3
    assert found.evidence["floor"] == pytest.approx(math.log(math.e + 2) - 1)
    assert found.evidence["loss"] > found.evidence["floor"]
    assert "F.softmax" not in found.fixes[0]
    assert run.at("F.softmax(") in found.fixes[0]


def test_the_first_fix_names_the_layer_if_the_softmax_has_no_line_of_its_own(watch: Nursery) -> None:
    layers = NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.Softmax(-1)")
    run = watch(CLASSES, CROSS_ENTROPY, layers, LOOP)
    found = run.names_first("loss.softmax-before-cross-entropy", step=0, at="|loss = loss_of", evidence={"rows"})
    assert found.fixes[0] == "Pass the logits: remove the softmax in `model.3`."


def test_the_first_fix_does_not_call_a_sum_of_probabilities_a_softmax(watch: Nursery) -> None:
    experts = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1)) for _ in range(2))

        def forward(self, given):
            return torch.lerp(self.one(given), self.other(given), 0.25)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    """
    run = watch(CLASSES, CROSS_ENTROPY, experts, LOOP)
    found = run.names_first("loss.softmax-before-cross-entropy", step=0, at="|loss = loss_of", evidence={"rows"})
    at = run.at("torch.lerp(")
    assert found.fixes[0] == f"Pass the logits: remove the softmax whose results go into `lerp` at {at}."


def test_a_log_softmax_of_probabilities_by_hand_is_a_softmax_twice(watch: Nursery) -> None:
    by_hand = """
    def loss_of(given, target):
        logs = F.log_softmax(given, dim=-1)
        return -logs[torch.arange(len(target)), target].mean()
    """
    run = watch(CLASSES, by_hand, SOFTMAX_IN_FORWARD, LOOP)
    run.names_first("loss.softmax-before-cross-entropy", step=0, at="|F.log_softmax(", evidence={"calls", "shape"})


HEALTHY_CLASSIFIERS = {
    "logits": (CROSS_ENTROPY, NET),
    "log-softmax twice, which changes nothing": (
        CROSS_ENTROPY,
        NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.LogSoftmax(-1)"),
    ),
    "softmax, logarithm, nll": (
        "loss_of = lambda given, target: F.nll_loss(given.softmax(-1).log(), target)",
        NET,
    ),
    "a head that starts at zero": (
        CROSS_ENTROPY,
        NET + "nn.init.zeros_(model[2].weight); nn.init.zeros_(model[2].bias)",
    ),
    "targets that are a teacher's probabilities": (
        "loss_of = lambda given, target: F.cross_entropy(given, F.one_hot(target, 3).float() * 0.9 + 0.1 / 3)",
        NET,
    ),
    "softmax as attention over the features": (
        CROSS_ENTROPY,
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 3)

            def forward(self, given):
                return self.outer(F.relu(self.inner(8 * self.gate(given).softmax(-1) * given)))

        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        """,
    ),
    "a weighted, smoothed loss": (
        "loss_of = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0]), label_smoothing=0.1)",
        NET,
    ),
}


@pytest.mark.parametrize("name", HEALTHY_CLASSIFIERS)
def test_a_classifier_that_learns_is_healthy(watch: Nursery, name: str) -> None:
    assert watch(CLASSES, *HEALTHY_CLASSIFIERS[name], LOOP).causes == []


TAGS = "y = (x[:, :3] > 0).float()"


def test_a_sigmoid_before_bce_with_logits_is_named_with_its_range(watch: Nursery) -> None:
    model = NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.Sigmoid()")
    run = watch(CLASSES, TAGS, "loss_of = F.binary_cross_entropy_with_logits", model, LOOP)
    found = run.names_first(
        "loss.sigmoid-before-bce-logits",
        step=0,
        at="|loss = loss_of",
        evidence={"lowest", "highest", "calls", "made_by", "loss"},
    )
    assert found.evidence["made_by"] == "sigmoid"
    assert 0 < found.evidence["lowest"] < found.evidence["highest"] < 1


@pytest.mark.parametrize(
    "after",
    [
        "nn.init.zeros_(model[2].weight); nn.init.zeros_(model[2].bias)",
        "nn.init.constant_(model[2].bias, 0.5); nn.init.normal_(model[2].weight, std=1e-3)",
    ],
    ids=["zero head", "logits that begin between 0 and 1"],
)
def test_logits_that_begin_near_zero_are_logits(watch: Nursery, after: str) -> None:
    assert watch(CLASSES, TAGS, "loss_of = F.binary_cross_entropy_with_logits", NET, after, LOOP).causes == []


def test_probabilities_into_bce_are_right(watch: Nursery) -> None:
    model = NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.Sigmoid()")
    assert watch(CLASSES, TAGS, "loss_of = F.binary_cross_entropy", model, LOOP).causes == []


def test_logits_of_weights_that_hardly_move_may_all_lie_between_0_and_1(watch: Nursery) -> None:
    narrow = """
    model = nn.Linear(8, 1)
    model.weight.data = 0.12 * torch.eye(1, 8)
    model.bias.data.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    """
    loss = "loss_of = F.binary_cross_entropy_with_logits"
    run = watch(BINARY, loss, narrow.replace("RATE", "1e-7"), LOOP)
    assert "loss.sigmoid-before-bce-logits" not in run.causes


# Logits where probabilities belong


def test_raw_scores_into_nll_are_named(watch: Nursery) -> None:
    run = watch(CLASSES, "loss_of = F.nll_loss", NET, LOOP)
    found = run.names_first(
        "loss.logits-into-probability-loss",
        step=0,
        at="|loss = loss_of",
        evidence={"largest_value", "log_sum_error", "loss"},
    )
    assert "raw scores" in found.summary
    assert found.evidence["loss"] < 0


def test_raw_scores_into_nll_are_named_although_the_run_ends_with_nan() -> None:
    def of_step(step: int) -> list[dict[str, Any]]:
        scores = class_scores(step, 5, -0.5, 0.4, 3.0, op="nll_loss")
        nan = dict.fromkeys(("min", "max", "sum_error", "log_sum_error"), math.nan)
        return [scores | {"distribution": scores["distribution"] | nan}] if step > 40 else [scores]

    found = losses.logits_into_probability_loss(run_with_losses(of_step))
    assert found is not None
    assert found.evidence["log_sum_error"] == 4.0


def test_probabilities_into_nll_are_named_as_such(watch: Nursery) -> None:
    run = watch(CLASSES, "loss_of = F.nll_loss", SOFTMAX_IN_FORWARD, LOOP)
    assert "not their logarithms" in run.first.summary
    assert run.first.cause == "loss.logits-into-probability-loss"


def test_a_crash_of_bce_on_logits_keeps_its_exit_code_and_is_explained(watch: Nursery) -> None:
    run = watch(CLASSES, TAGS, "loss_of = F.binary_cross_entropy", NET, LOOP)
    assert run.exit_code == 1
    assert "all elements of input should be between 0 and 1" in run.errors
    found = run.names_first(
        "loss.logits-into-probability-loss", step=0, at="|loss = loss_of", evidence={"lowest", "highest"}
    )
    assert found.evidence["lowest"] < 0


def test_a_crash_of_bce_on_nan_probabilities_is_not_about_logits(watch: Nursery) -> None:
    model = NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.Sigmoid()")
    run = watch(CLASSES, TAGS, "x[:, 2] = torch.nan", "loss_of = F.binary_cross_entropy", model, LOOP)
    assert run.first.cause == "data.nonfinite-input"
    assert "loss.logits-into-probability-loss" not in run.causes


def test_kl_div_of_raw_scores_is_named_and_of_log_probabilities_is_not(watch: Nursery) -> None:
    teacher = "y = (3 * x[:, :3]).softmax(-1)"
    wrong = watch(CLASSES, teacher, "loss_of = nn.KLDivLoss(reduction='batchmean')", NET, LOOP)
    assert wrong.first.cause == "loss.logits-into-probability-loss"
    assert wrong.at("loss = loss_of") in wrong.first.where
    model = NET.replace("nn.Linear(32, 3)", "nn.Linear(32, 3), nn.LogSoftmax(-1)")
    assert watch(CLASSES, teacher, "loss_of = nn.KLDivLoss(reduction='batchmean')", model, LOOP).causes == []


# Signs


def test_a_negated_cross_entropy_is_named(watch: Nursery) -> None:
    run = watch(CLASSES, "loss_of = lambda given, target: -F.cross_entropy(given, target)", NET, LOOP)
    found = run.names_first("loss.sign-flipped", step=0, at="|loss.backward", evidence={"factor", "first", "last"})
    assert run.at("-F.cross_entropy") in found.where
    assert found.evidence["factor"] < 0
    assert found.evidence["last"] < found.evidence["first"]


def test_a_negated_error_by_hand_runs_to_minus_infinity(watch: Nursery) -> None:
    by_hand = "loss_of = lambda given, target: -((given - target) ** 2).mean()"
    run = watch(VALUES, by_hand, FIT.replace("1e-2", "3e-2"), LOOP.replace("60", "100"))
    run.names_first("loss.sign-flipped", step=0, at="|loss.backward", evidence={"first", "last", "operations"})


FALLING_BELOW_ZERO = {
    "a Gaussian's log-likelihood": (
        """
        model = nn.Linear(8, 2)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
        def loss_of(given, target):
            mean, log_std = given[:, :1], given[:, 1:].clamp(-3, 3)
            return (0.5 * ((target - mean) / log_std.exp()) ** 2 + log_std).mean()
        """
    ),
    "minus a cosine": (
        """
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        y = x.roll(1, 1)
        loss_of = lambda given, target: -F.cosine_similarity(given, target).mean()
        """
    ),
}


@pytest.mark.parametrize("name", FALLING_BELOW_ZERO)
def test_a_loss_that_may_be_negative_is_healthy(watch: Nursery, name: str) -> None:
    assert watch(VALUES, FALLING_BELOW_ZERO[name], LOOP).causes == []


def test_a_density_that_falls_to_its_floor_has_no_flipped_sign(watch: Nursery) -> None:
    density = """
        model = nn.Linear(8, 40)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
        def loss_of(given, target):
            mean, variance = given[:, :20], F.softplus(given[:, 20:]) + 1e-2
            return 0.5 * (torch.log(variance) + mean ** 2 / variance).sum(1).mean()
        """
    run = watch(VALUES, density, LOOP.replace("60", "400"))
    assert run.causes == []


def test_a_critic_that_maximises_its_loss_has_no_flipped_sign(watch: Nursery) -> None:
    run = watch(
        """
        import torch
        from torch import nn
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        of_maker = torch.optim.RMSprop(maker.parameters(), lr=1e-3)
        of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
        for step in range(60):
            real = torch.randn(32, 2) * 0.5 + 1
            made = maker(torch.randn(32, 4))
            of_critic.zero_grad()
            (critic(made.detach()).mean() - critic(real).mean()).backward()
            of_critic.step()
            for weight in critic.parameters():
                weight.data.clamp_(-0.1, 0.1)
            of_maker.zero_grad()
            (-critic(maker(torch.randn(32, 4))).mean()).backward()
            of_maker.step()
        """
    )
    assert run.causes == []


def test_of_two_losses_that_plunge_the_one_whose_penalty_has_the_wrong_sign_is_named(watch: Nursery) -> None:
    run = watch(
        """
        import torch
        from torch import nn
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        inner = nn.Sequential(nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), *inner)
        critic[-1].weight.data.mul_(20)
        of_maker = torch.optim.Adam(maker.parameters(), lr=5e-3, betas=(0.5, 0.9))
        of_critic = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
        for step in range(400):
            real = torch.randn(32, 2) * 0.5 + 1
            made = maker(torch.randn(32, 4)).detach().requires_grad_()
            slope = torch.autograd.grad(critic(made).sum(), made, create_graph=True)[0].norm(dim=1)
            of_critic.zero_grad()
            (critic(made).mean() - critic(real).mean() - 10 * (slope - 1).square().mean()).backward()
            of_critic.step()
            of_maker.zero_grad()
            (-critic(maker(torch.randn(32, 4))).mean()).backward()
            of_maker.step()
        """
    )
    assert run.first.cause == "loss.sign-flipped"
    assert run.first.where == (run.at("of_critic = "),)


def test_a_policy_gradient_has_no_flipped_sign(watch: Nursery) -> None:
    run = watch(
        """
        import torch
        from torch import nn
        torch.manual_seed(0)
        policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        for step in range(60):
            states = torch.randn(64, 4)
            choice = torch.distributions.Categorical(logits=policy(states))
            actions = choice.sample()
            rewards = (actions == states[:, :3].argmax(1)).float()
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            loss = -(choice.log_prob(actions) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """
    )
    assert run.causes == []


# Batches with nothing to learn from


def test_a_batch_of_ignored_targets_is_named_with_its_step(watch: Nursery) -> None:
    run = watch(CLASSES, "y[96:128] = -100", CROSS_ENTROPY, NET, IN_ORDER)
    found = run.names_first(
        "loss.no-valid-targets", step=3, at="|loss = loss_of", evidence={"all_ignored", "ignore_index"}
    )
    assert found.evidence["ignore_index"] == -100


def test_a_batch_of_classes_without_weight_is_named(watch: Nursery) -> None:
    weighted = "def loss_of(given, target): return F.cross_entropy(given, target, weight=torch.tensor([1.0, 1.0, 0.0]))"
    run = watch(CLASSES, "y[96:128] = 2; y[100] = -100", weighted, NET, IN_ORDER)
    found = run.names_first("loss.no-valid-targets", step=3, at="|def loss_of", evidence={"all_weightless"})
    assert found.evidence["bad"] == 31
    assert found.fixes[0].startswith("Give every class in `weight` a value above 0")


def test_a_masked_mean_over_nothing_is_named(watch: Nursery) -> None:
    masked = """
    def loss_of(given, target):
        mask = (target > 0).float()
        return (F.cross_entropy(given, target, reduction="none") * mask).sum() / mask.sum()
    """
    run = watch(CLASSES, "y[96:128] = 0", masked, NET, IN_ORDER)
    run.names_first("loss.no-valid-targets", step=3, at="|/ mask.sum()", evidence={"empty_count"})


def test_some_ignored_targets_are_fine(watch: Nursery) -> None:
    assert watch(CLASSES, "y[::3] = -100", CROSS_ENTROPY, NET, LOOP).causes == []


# Sums and terms


def test_a_summed_loss_that_diverges_is_named_with_its_count(watch: Nursery) -> None:
    model = NET.replace("optim.Adam", "optim.SGD").replace("1e-2", "0.5")
    run = watch(CLASSES, "loss_of = nn.CrossEntropyLoss(reduction='sum')", model, LOOP)
    found = run.names_first(
        "loss.sum-reduction", step=0, at="|loss = loss_of", evidence={"elements", "grad_norm", "first", "last"}
    )
    assert found.evidence["elements"] == 32


@pytest.mark.parametrize(
    "loss",
    [
        "loss_of = nn.CrossEntropyLoss(reduction='sum')",
        "loss_of = lambda given, target: F.cross_entropy(given, target, reduction='none').sum()",
    ],
)
def test_a_summed_loss_with_a_rate_to_match_is_fine(watch: Nursery, loss: str) -> None:
    model = NET.replace("optim.Adam", "optim.SGD").replace("1e-2", "0.02")
    assert watch(CLASSES, loss, model, LOOP).causes == []


def test_a_rate_too_high_on_a_mean_is_not_a_sum(watch: Nursery) -> None:
    model = NET.replace("optim.Adam", "optim.SGD").replace("1e-2", "60.0")
    run = watch(CLASSES, CROSS_ENTROPY, model, LOOP)
    assert run.first.cause == "lr.too-high"
    assert "loss.sum-reduction" not in run.causes


@pytest.mark.parametrize("divisor", ["torch.tensor(len(target))", "(target >= 0).sum()", "len(target)"])
def test_a_sum_that_is_divided_by_the_number_of_targets_is_a_mean(watch: Nursery, divisor: str) -> None:
    loss = f"""
    def loss_of(given, target):
        return F.cross_entropy(given, target, reduction="sum") / {divisor}
    """
    model = NET.replace("optim.Adam", "optim.SGD").replace("1e-2", "60.0")
    run = watch(CLASSES, loss, model, LOOP)
    assert run.first.cause == "lr.too-high"
    assert "loss.sum-reduction" not in run.causes


def test_a_summed_loss_of_another_call_on_the_same_line_is_not_the_one_that_is_minimised(watch: Nursery) -> None:
    loss = """
    def loss_of(given, target):
        return F.cross_entropy(given, target) + 0 * len([F.cross_entropy(given, target, reduction="sum")])
    """
    model = NET.replace("optim.Adam", "optim.SGD").replace("1e-2", "60.0")
    assert "loss.sum-reduction" not in watch(CLASSES, loss, model, LOOP).causes


TWO_HEADS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.classes, self.value = nn.Linear(8, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, given):
        hidden = F.relu(self.inner(given))
        return self.classes(hidden), self.value(hidden)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
noise = torch.randn(256, 1)
for step in range(60):
    rows = torch.randint(len(x), (32,))
    optimizer.zero_grad()
    scores, values = model(x[rows])
    named = F.cross_entropy(scores, y[rows])
    valued = F.mse_loss(values, noise[rows])
    loss = named + WEIGHT * valued
    loss.backward()
    optimizer.step()
"""


def test_a_term_that_drowns_another_is_named_with_their_shares(watch: Nursery) -> None:
    run = watch(CLASSES, TWO_HEADS.replace("WEIGHT", "1e4").replace("RATE", "1e-6"))
    found = run.names_first("loss.term-dominates", step=1, at="|F.cross_entropy(", evidence={"terms", "first", "last"})
    norms = sorted(term["norm"] for term in found.evidence["terms"])
    assert norms[-1] > 50 * norms[0]


@pytest.mark.parametrize(
    ("weight", "valued"),
    [("1.0", "F.mse_loss(values, x[rows, :1])"), ("1e-4", "sum(w.square().sum() for w in model.parameters())")],
    ids=["two tasks", "a small penalty on the weights"],
)
def test_terms_that_both_get_their_way_are_fine(watch: Nursery, weight: str, valued: str) -> None:
    script = TWO_HEADS.replace("F.mse_loss(values, noise[rows])", valued)
    assert watch(CLASSES, script.replace("WEIGHT", weight).replace("RATE", "0.2")).causes == []


# From facts


def test_a_softmax_is_named_where_the_columns_of_its_result_go_into_a_second_loss() -> None:
    made = {"op": "softmax", "site": SITE, "module": "", "index": 3}
    both = run_with_losses(
        lambda s: [class_scores(s, 5, 0, 0.9, 1e-7, producer=made), class_scores(s, 7, 0, 0.9, 0.8, producer=made)]
    )
    assert losses.softmax_before_cross_entropy(both) is not None
    other = made | {"op": "linear", "index": 4}
    apart = run_with_losses(
        lambda s: [class_scores(s, 5, 0, 0.9, 1e-7, producer=made), class_scores(s, 7, 0, 0.9, 0.8, producer=other)]
    )
    assert losses.softmax_before_cross_entropy(apart) is None


def test_raw_scores_in_a_ctc_loss_are_named(watch: Nursery) -> None:
    data = "x, y = torch.randn(256, 12, 8), torch.randint(1, 3, (256, 2))"
    loss_of = """
    def loss_of(given, target):
        return F.ctc_loss(given.transpose(0, 1)LOGS, target, torch.full((32,), 12), torch.full((32,), 2))
    """
    run = watch(CLASSES, data, loss_of.replace("LOGS", ""), NET, LOOP)
    assert run.first.cause == "loss.logits-into-probability-loss"
    assert (
        "loss.logits-into-probability-loss"
        not in watch(CLASSES, data, loss_of.replace("LOGS", ".log_softmax(2)"), NET, LOOP).causes
    )


def test_logits_close_to_one_another_are_no_probabilities() -> None:
    def bce(step: int, low: float, high: float) -> dict[str, Any]:
        given = {"shape": [32, 1], "dtype": "float32", "grad": True, "min": low, "max": high, "mean": low, "std": 0.1}
        loss = {"op": "binary_cross_entropy_with_logits", "grad": True, "site": SITE, "value": 0.69, "inside_unit": 1.0}
        return look(step, notes={"losses": [loss | {"input": given, "step": step}]})

    narrow = recorded(sampled_steps=[bce(step, 0.03, 0.3) for step in range(8)])
    assert losses.sigmoid_before_bce_logits(narrow) is None
    wide = recorded(sampled_steps=[bce(step, 0.03, 0.9) for step in range(8)])
    assert losses.sigmoid_before_bce_logits(wide) is not None


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_a_softmax_over_the_rows_of_a_batch_is_named(watch: Nursery, op: str) -> None:
    over_rows = f"def loss_of(given, target):\n    return F.cross_entropy(F.{op}(given, 0), target)\n"
    found = watch(CLASSES, over_rows, NET, LOOP).first
    assert found.cause == "loss.softmax-before-cross-entropy"
    assert "depend on the other rows" in found.summary


def test_a_log_softmax_over_the_classes_before_cross_entropy_changes_nothing(watch: Nursery) -> None:
    twice = "def loss_of(given, target):\n    return F.cross_entropy(F.log_softmax(given, 1), target)\n"
    assert watch(CLASSES, twice, NET, LOOP).causes == []


@pytest.mark.parametrize("again", [True, False])
def test_a_sigmoid_of_a_sigmoid_is_named_by_its_range(watch: Nursery, again: bool) -> None:
    model = "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())\n"
    net = model + "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\n"
    score = "torch.sigmoid(model(x[rows]))" if again else "model(x[rows])"
    loop = LOOP.replace(
        "loss_of(model(x[rows]), y[rows])", f"F.binary_cross_entropy({score}, (y[rows] > 0).float()[:, None])"
    )
    run = watch(CLASSES, net, loop)
    if not again:
        assert run.diagnosis.verdict == "healthy"
        return
    found = run.names_first("loss.sigmoid-before-bce-logits", step=0, at="|sigmoid", evidence={"lowest", "highest"})
    assert 0.4999 < found.evidence["lowest"] < found.evidence["highest"] < 0.7312


MASKS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
images = torch.randn(64, 1, 12, 12)
masks = (F.avg_pool2d(images, 3, 1, 1) > 0.2).float()
images += 0.1 * torch.randn_like(images)
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
def dice(p, t):
    return ((2 * (p * t).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + t.sum((1, 2, 3)) + 1)).mean()
def iou(p, t):
    both = (p.flatten() * t.flatten()).sum()
    return both / ((p + t).sum() - both)
for step in range(60):
    rows = torch.randint(64, (16,))
    p, t = torch.sigmoid(model(images[rows])), masks[rows]
    loss = LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("loss", ["dice(p, t)", "-torch.log(1 - dice(p, t))"])
def test_a_dice_score_that_is_minimised_is_named(watch: Nursery, loss: str) -> None:
    watch(MASKS.replace("LOSS", loss)).names_first(
        "loss.sign-flipped", step=0, at="|return ((2 *", evidence={"calls", "last"}
    )


def test_an_intersection_over_union_that_is_minimised_is_named(watch: Nursery) -> None:
    watch(MASKS.replace("LOSS", "iou(p, t)")).names_first(
        "loss.sign-flipped", step=0, at="|return both /", evidence={"calls", "last"}
    )


@pytest.mark.parametrize(
    "loss",
    [
        "1 - dice(p, t)",
        "-dice(p, t)",
        "-torch.log(dice(p, t))",
        "1 - iou(p, t)",
        "F.binary_cross_entropy(p, t) + (1 - dice(p, t))",
        "1 - (p * t).sum() / ((p * t).sum() + 0.7 * ((1 - p) * t).sum() + 0.3 * (p * (1 - t)).sum())",
        "F.binary_cross_entropy(p, t) + (p * (1 - t)).sum() / p.sum() + dice(p, t).detach()",
        "F.binary_cross_entropy(p, t) + dice(p, (torch.rand_like(t) > 0.9).float())",
        "F.binary_cross_entropy(1 - p, 1 - t) + dice(1 - p, t)",
        "F.binary_cross_entropy(p, t) + 0.1 * ((t * (p - t).abs()).sum() / t.sum())",
        "F.binary_cross_entropy(p, t) + 0.1 * (p * (t < 0.5).float()).sum() / (p.sum() + t.sum())",
    ],
)
def test_losses_that_fall_with_the_overlap_are_fine(watch: Nursery, loss: str) -> None:
    assert watch(MASKS.replace("LOSS", loss)).causes == []


GRAPH = """
import torch
from torch import nn

torch.manual_seed(0)
edges = torch.sparse_coo_tensor(torch.randint(0, 200, (2, 1200)), torch.ones(1200), (200, 200)).coalesce()
x = torch.randn(200, 8)
y = (torch.sparse.mm(edges, x)[:, 0] > 0).float()
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    p = torch.sparse.mm(edges, model(x)).sigmoid().squeeze(1)
    loss = 1 - 2 * (p * y).sum() / (p.sum() + y.sum() + 1e-6)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_overlap_after_a_sparse_product_is_observed(watch: Nursery) -> None:
    run = watch(GRAPH)
    assert run.causes == []
    assert "stopped watching" not in run.errors


def test_a_dice_score_is_minimised_on_purpose_by_an_attack_and_by_a_maximizing_optimizer(watch: Nursery) -> None:
    maximized = MASKS.replace("LOSS", "dice(p, t)").replace("lr=1e-2", "lr=1e-2, maximize=True")
    assert watch(maximized).causes == []
    attack = MASKS.replace("LOSS", "dice(p, t)").replace("model.parameters()", "[noise]")
    attack = attack.replace("optimizer =", "noise = torch.zeros(1, 1, 12, 12, requires_grad=True)\noptimizer =")
    attack = attack.replace("model(images[rows])", "model.requires_grad_(False)(images[rows] + noise)")
    assert "loss.sign-flipped" not in watch(attack).causes
