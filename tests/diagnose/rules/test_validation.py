"""Validation against training: what is claimed, and what resembles it and is not."""

from __future__ import annotations

import math
from typing import Any

from recorded import look, optimizer, parameter, run
from surefoot.diagnose.rules.validation import RULES

FIND = {rule.code: rule.find for rule in RULES}
EPOCH = 10


def trained(validation: list[float], training: list[float], first_step: int = EPOCH, **more: Any) -> Any:
    """A run that evaluates 500 rows after each epoch of ten steps; `training` has a level for each."""
    losses = [level for level in training for _ in range(EPOCH)]
    passes = [
        {
            "step": first_step + i * EPOCH,
            "number": 0,
            "function": "cross_entropy",
            "loss": loss,
            "rows": 500,
            "calls": 1,
        }
        for i, loss in enumerate(validation)
    ]
    held = {"parameters": [parameter(0)], "optimizers": [optimizer(losses)], "evaluation_passes": passes} | more
    return run(steps=len(losses), **held)


FALLING = [2.0 * 0.8**i for i in range(16)]
U_SHAPED = [1.8, 1.5, 1.2, 1.0, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45]


def test_overfitting_names_the_step_of_the_lowest_validation_loss() -> None:
    claim = FIND["fit.overfitting"](trained(U_SHAPED, FALLING))
    assert claim is not None
    assert claim.severity == "warning"
    assert claim.step in (40, 50, 60)
    assert f"{claim.step:,}" in claim.fixes[0]
    assert claim.evidence["share_lost"] > 0.3


def test_what_was_learned_before_training_fell_below_validation_counts() -> None:
    memorised = [0.8 * 0.6**i for i in range(16)]  # below the best validation loss from the first epoch on
    claim = FIND["fit.overfitting"](trained(U_SHAPED, memorised))
    assert claim is not None
    assert claim.evidence["share_lost"] < 1


def test_validation_that_follows_training_or_levels_off_is_not_overfitting() -> None:
    assert FIND["fit.overfitting"](trained([1.1 * value for value in FALLING], FALLING)) is None
    level = [max(value, 0.8) + 0.01 * (i % 2) for i, value in enumerate(FALLING)]
    assert FIND["fit.overfitting"](trained(level, FALLING)) is None


def test_a_rise_with_the_training_loss_is_not_overfitting() -> None:
    both = FALLING[:8] + [0.5 + 0.05 * i for i in range(8)]
    assert FIND["fit.overfitting"](trained([value + 0.1 for value in both], both)) is None


def test_validation_that_was_never_learned_is_not_overfitting() -> None:
    assert FIND["fit.overfitting"](trained([2.0 + 0.1 * i for i in range(16)], FALLING)) is None


def test_jumps_of_the_validation_loss_are_erratic_only_while_training_is_smooth() -> None:
    jumping = [1.0 + (0.9 if i % 2 else 0.0) for i in range(16)]
    slow = [2.0 - 0.03 * i for i in range(16)]
    claim = FIND["fit.erratic-validation"](trained(jumping, slow))
    assert claim is not None
    assert claim.evidence["jump_share"] > 0.5
    noisy = [value + (0.3 if i % 2 else 0.0) for i, value in enumerate(slow)]
    assert FIND["fit.erratic-validation"](trained(jumping, noisy)) is None
    assert FIND["fit.erratic-validation"](trained(slow, slow)) is None


def test_a_known_set_that_gets_worse_in_fine_tuning_is_forgotten() -> None:
    worse = [0.1 * (i + 1) for i in range(12)]
    loaded = [parameter(0) | {"loaded": True}]
    claim = FIND["fit.forgetting"](trained(worse, FALLING, first_step=0, parameters=loaded))
    assert claim is not None
    assert claim.evidence["loss_before"] == 0.1
    assert FIND["fit.forgetting"](trained(worse, FALLING, first_step=0)) is None, "nothing was loaded"
    assert FIND["fit.forgetting"](trained(worse, FALLING, parameters=loaded)) is None, "nothing is known from before"


def test_passes_that_are_not_finite_claim_nothing() -> None:
    assert all(find(trained([math.nan] * 16, FALLING)) is None for find in FIND.values())


# Validation that was never learned


def test_a_validation_loss_that_never_falls_while_training_does_is_that_of_rows_learned_by_heart() -> None:
    by_heart = FIND["data.labels-uninformative"]
    claim = by_heart(trained([2.0 + 0.1 * i for i in range(16)], FALLING))
    assert claim is not None
    assert claim.severity == "warning"
    assert claim.evidence["first_validation_loss"] == 2.0
    assert by_heart(trained([1.1 * value for value in FALLING], FALLING)) is None
    assert by_heart(trained(U_SHAPED, FALLING)) is None, "it was learned at first"


def test_losses_with_gradients_that_no_backward_uses_are_validation() -> None:
    """Evaluations without `torch.no_grad()`, as at every step in graph networks."""

    def sampled(step: int, validated: float) -> dict[str, Any]:
        losses = [
            {"step": step, "op": "nll_loss", "index": index, "grad": True, "site": site, "reduction": "mean"}
            | {"value": value, "targets": rows}
            for index, site, value, rows in ((3, "train.py:9", validated, 300), (7, "train.py:4", 1.0, 140))
        ]
        sign = {"function": "nll_loss", "site": "train.py:4", "factor": 1.0, "index": 7}
        calls = [{"model": "model", "site": "", "grad": True, "reached": reached} for reached in (False, True)]
        roots = [{"site": "train.py:5", "sign": sign, "made_from": []}]
        return look(step, notes={"losses": losses}, passes=calls, roots=roots)

    rising = [sampled(step, 2.0 + 0.002 * step) for step in range(0, 160, 16)]
    assert FIND["data.labels-uninformative"](trained([], FALLING, sampled_steps=rising)) is not None
    falling = [sampled(step, 2.0 - 0.01 * step) for step in range(0, 160, 16)]
    assert FIND["data.labels-uninformative"](trained([], FALLING, sampled_steps=falling)) is None


def test_the_numbers_of_overfitting_are_those_that_the_script_prints() -> None:
    losses = [2.0, 1.6, 1.4, 1.05, 1.35, 1.3, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4]
    training = [0.9**number for number in range(1, 13)]
    claim = FIND["fit.overfitting"](trained(losses, training))
    assert claim is not None
    assert claim.step == 4 * EPOCH
    assert "lowest at step 40 (1.05) and 2.4 at the end" in claim.summary
