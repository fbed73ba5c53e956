"""Generators and discriminators, from recorded facts."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from recorded import SITE, falling, look, optimizer, parameter, run
from surefoot.diagnose.rules import adversarial, losses

if TYPE_CHECKING:
    from watched import Nursery


def a_pass(model: str, given: list[list[float]], made: list[list[float]], grad: bool = False) -> dict[str, Any]:
    def described(rows: list[list[float]]) -> dict[str, Any]:
        flat = [v for row in rows for v in row]
        return {
            "mean": sum(flat) / len(flat),
            "min": min(flat),
            "max": max(flat),
            "grad": grad,
            "shape": [len(rows), 2],
        }

    return {"model": model, "grad": True, "grad_mode": True, "step": 0, "site": SITE, "samples": [given, made]} | {
        "inputs": [described(given)],
        "outputs": [described(made)],
    }


def ring(chooser: random.Random, rows: int = 32) -> list[list[float]]:
    angles = [chooser.random() * 2 * math.pi for _ in range(rows)]
    return [[2 * math.cos(a) + chooser.gauss(0, 0.05), 2 * math.sin(a) + chooser.gauss(0, 0.05)] for a in angles]


def gan(judge: list[float], maker: list[float], alike: bool, values: bool = False, varied_until: int = 0) -> Any:
    chooser = random.Random(1)
    looks = []
    for step in (0, 10, 40, 60, 80, 95):
        noise, real = ring(chooser), ring(chooser)
        point = ring(chooser, 1)[0]
        made = [[v + chooser.gauss(0, 0.02) for v in point] for _ in range(32)]
        made = made if alike and step >= varied_until else ring(chooser)
        passes = [a_pass("G", noise, made), a_pass("D", real, [[0.5, 0.5]]), a_pass("D", made, [[0.4, 0.4]])]
        roots = [{"parameters": [1], "value": 1.0, "site": SITE}, {"parameters": [0, 1], "value": 1.0, "site": SITE}]
        fitted = {"op": "mse_loss", "grad": True, "site": SITE, "target": {"std": 1.0}, "value": 0.5}
        looks.append(look(step, passes=passes, roots=roots, notes={"losses": [fitted]} if values else {}))
    return run(
        maker,
        optimizers=[optimizer(maker, 0), optimizer(judge, 1)],
        parameters=[parameter(0, "G", (0,)), parameter(1, "D", (1,))],
        sampled_steps=looks,
    )


def test_a_discriminator_at_zero_for_good_has_won() -> None:
    claim = adversarial.discriminator_wins(gan(falling(100, 1.4, 1e-4), [0.7 + 0.1 * i for i in range(100)], False))
    assert claim is not None
    assert "`D`" in claim.summary


def test_a_discriminator_is_ahead_but_has_not_won_while_the_gradient_of_the_generator_grows() -> None:
    ahead = gan(falling(100, 1.4, 0.06), [0.7 + 0.05 * i for i in range(100)], False)
    assert adversarial.discriminator_wins(ahead) is None
    ahead.optimizers[0].series.grad_norm[20:] = [0.01] * 80
    assert adversarial.discriminator_wins(ahead) is not None


def test_a_discriminator_without_errors_has_not_won_while_a_bounded_loss_keeps_its_gradient() -> None:
    least_squares = gan(falling(100, 0.35, 1e-4), [0.18] * 10 + [0.5] * 90, False)
    assert adversarial.discriminator_wins(least_squares) is None
    least_squares.optimizers[0].series.grad_norm[20:] = [0.01] * 80
    assert adversarial.discriminator_wins(least_squares) is not None


def test_a_generator_whose_own_loss_falls_has_not_lost() -> None:
    energies = gan(falling(100, 130.0, 7.0), falling(100, 160.0, 5.0), False)
    energies.optimizers[0].series.grad_norm[20:] = [0.01] * 80
    assert adversarial.discriminator_wins(energies) is None


def test_a_discriminator_that_is_still_unsure_has_not() -> None:
    assert adversarial.discriminator_wins(gan([1.3] * 100, [0.8] * 100, False)) is None


def test_the_critic_of_a_policy_is_no_discriminator() -> None:
    assert adversarial.discriminator_wins(gan(falling(100, 1.4, 1e-4), [-1.0] * 100, False, values=True)) is None


def test_a_wasserstein_critic_below_zero_has_not_won() -> None:
    assert adversarial.discriminator_wins(gan([-0.01 * i for i in range(100)], [0.1] * 100, False)) is None


def test_the_encoder_of_an_adversarial_autoencoder_is_the_generator_and_its_decoder_no_part_of_the_game() -> None:
    chooser, curve = random.Random(3), [1.0] * 100
    codes, noise, images = ring(chooser), ring(chooser), ring(chooser)
    passes = [a_pass("Q", images, codes), a_pass("P", codes, images), a_pass("D", codes, [[0.4, 0.4]])]
    followed = [([0, 1], [0, 1]), ([0, 2], [2]), ([0, 2], [0])]
    roots = [{"parameters": reached, "for": by, "value": 1.0, "site": SITE} for reached, by in followed]
    held = run(
        curve,
        optimizers=[optimizer(curve, number) for number in range(3)],
        parameters=[parameter(number, model, (number,)) for number, model in enumerate("QPD")],
        sampled_steps=[look(0, passes=[*passes, a_pass("D", noise, [[0.5, 0.5]])], roots=roots)],
    )
    pair = adversarial.adversaries(held)
    assert pair is not None
    assert (pair.generator_models, pair.discriminator_models) == ({"Q"}, {"D"})


def test_a_discriminator_whose_loss_and_gradient_grow_without_bound_has_a_term_of_the_wrong_sign() -> None:
    plunging = gan([-8.0] * 20 + [-8.0 * 2**i for i in range(20)] + [-1e7] * 60, [0.1] * 100, False)
    assert losses.sign_flipped(plunging) is None
    plunging.optimizers[1].series.grad_norm[50:] = [1e6] * 50
    claim = losses.sign_flipped(plunging)
    assert claim is not None
    assert "from below" in claim.summary


def test_of_several_losses_that_fall_without_bound_the_lowest_is_named_though_an_optimizer_has_no_loss() -> None:
    def falls_to(end: float) -> list[float]:
        return [-8.0] * 20 + [-8.0 - (end + 8.0) * -i / 20 for i in range(20)] + [end] * 60

    sides = [optimizer(falls_to(-1e5), 0, site="train.py:1"), optimizer([None] * 100, 1, site="train.py:2")]
    sides.append(optimizer(falls_to(-1e7), 2, site="train.py:3"))
    for side in (sides[0], sides[2]):
        side["series"]["grad_norm"][50:] = [1e6] * 50
    claim = losses.sign_flipped(run(falling(), optimizers=sides))
    assert claim is not None
    assert claim.where == ("train.py:3",)


def test_samples_in_one_place_at_a_time_have_collapsed() -> None:
    claim = adversarial.mode_collapse(gan([1.3] * 300, [0.8] * 300, alike=True))
    assert claim is not None
    assert claim.evidence["spread_ratio"] < 0.1


def test_real_samples_may_be_known_from_early_steps_only() -> None:
    held = gan([1.3] * 300, [0.8] * 300, alike=True)
    for seen in held.sampled.steps[2:]:
        seen.model_calls[:] = seen.model_calls[:1]
    assert adversarial.mode_collapse(held) is not None


def test_samples_spread_like_the_data_have_not() -> None:
    assert adversarial.mode_collapse(gan([1.3] * 300, [0.8] * 300, alike=False)) is None


def test_samples_of_a_generator_that_has_hardly_been_trained_have_not_collapsed() -> None:
    assert adversarial.mode_collapse(gan([1.3] * 299, [0.8] * 299, alike=True)) is None
    assert adversarial.mode_collapse(gan([1.3] * 299, [0.8] * 299, alike=True, varied_until=20)) is not None


def test_samples_in_the_middle_of_the_data_that_were_never_more_different_have_not_collapsed() -> None:
    begun, chooser = gan([1.3] * 400, [0.8] * 400, alike=True), random.Random(2)
    for seen in begun.sampled.steps:
        made, real = seen.model_calls[0].samples[1], seen.model_calls[1].samples[0]
        for rows, spread in ((made, 0.2), (real, 1.0)):
            rows[:] = [[chooser.gauss(0, spread) for _ in range(20)] for _ in rows]
    assert adversarial.mode_collapse(begun) is None


def test_samples_that_still_become_more_different_have_not_collapsed() -> None:
    growing = gan([1.3] * 400, [0.8] * 400, alike=True)
    for position, seen in enumerate(growing.sampled.steps):
        rows = seen.model_calls[0].samples[1]
        center = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        rows[:] = [[c + (1 + 2 * position) * (v - c) for c, v in zip(center, row, strict=True)] for row in rows]
    assert adversarial.mode_collapse(growing) is None


def test_a_discriminator_whose_loss_stays_far_above_a_guess_has_diverged() -> None:
    judge = [0.7] * 8 + [50.0] * 92
    claim = adversarial.discriminator_diverged(gan(judge, [7.0] * 100, False))
    assert claim is not None
    assert claim.step == 8
    assert claim.evidence["discriminator_loss"][1] == 50.0
    assert adversarial.discriminator_diverged(gan([0.7] * 100, [7.0] * 100, False)) is None


TWO_PLAYERS = """
import torch
from torch import nn

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
of_g = torch.optim.Adam(G.parameters(), lr=1e-3)
of_d = torch.optim.Adam(D.parameters(), lr=1e-3)
for step in range(120):
    real = torch.randn(32, 2) * 0.3 + 1
    fake = G(torch.randn(32, 4))
    judged = nn.functional.softplus(-D(real)).mean() + nn.functional.softplus(D(fake.detach())).mean()
    of_d.zero_grad(); judged.backward(); of_d.step()
    fooled = nn.functional.softplus(SIGN * D(fake)).mean()
    of_g.zero_grad(); fooled.backward(); of_g.step()
"""


def test_a_generator_that_learns_to_be_recognised_has_the_wrong_sign(watch: Nursery) -> None:
    run = watch(TWO_PLAYERS.replace("SIGN", "1"))
    assert run.first.cause == "loss.sign-flipped"
    assert run.first.evidence["same_direction"] == run.first.evidence["steps"]


def test_losses_of_opposite_directions_are_what_a_gan_has(watch: Nursery) -> None:
    assert "loss.sign-flipped" not in watch(TWO_PLAYERS.replace("SIGN", "-1")).causes


def test_the_sign_of_a_generator_is_known_if_the_loss_of_the_discriminator_reaches_it_too(watch: Nursery) -> None:
    attached = TWO_PLAYERS.replace("fake.detach()", "fake").replace(
        "D(fake)).mean()\n    of_g", "D(FAKE)).mean()\n    of_g"
    )
    attached = attached.replace("FAKE", "G(torch.randn(32, 4))")
    assert watch(attached.replace("SIGN", "1")).first.cause == "loss.sign-flipped"
    assert "loss.sign-flipped" not in watch(attached.replace("SIGN", "-1")).causes


def test_real_and_made_rows_are_no_terms_of_which_one_dominates(watch: Nursery) -> None:
    """A discriminator whose steps are too large answers the same for all rows: it fails at one kind of them."""
    run = watch(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        torch.manual_seed(0)
        G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
                          nn.Linear(64, 1), nn.Sigmoid())
        of_g = torch.optim.Adam(G.parameters(), lr=1e-3)
        of_d = torch.optim.Adam(D.parameters(), lr=0.3)
        ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
        for step in range(200):
            real = torch.randn(32, 2) * 0.3 + 1
            fake = G(torch.randn(32, 4))
            of_real = F.binary_cross_entropy(D(real), ones)
            of_fake = F.binary_cross_entropy(D(fake.detach()), zeros)
            judged = (of_real + of_fake) / 2
            of_d.zero_grad(); judged.backward(); of_d.step()
            fooled = F.binary_cross_entropy(D(fake), ones)
            of_g.zero_grad(); fooled.backward(); of_g.step()
        """
    )
    assert run.causes == ["lr.too-high"]
