"""The rules, one file per kind of trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.diagnose.rules import (
    adversarial,
    data,
    data_order,
    data_splits,
    losses,
    numerics,
    pace,
    policy,
    restart,
    scale,
    wiring,
)

if TYPE_CHECKING:
    from surefoot.diagnose.engine import Rule

RULES: tuple[Rule, ...] = (
    *losses.RULES,
    *wiring.RULES,
    *data.RULES,
    *data_order.RULES,
    *data_splits.RULES,
    *scale.RULES,
    *pace.RULES,
    *numerics.RULES,
    *policy.RULES,
    *adversarial.RULES,
    *restart.RULES,
)
