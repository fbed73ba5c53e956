"""The rules, one file per kind of trouble."""

from __future__ import annotations

from surefoot.diagnose.engine import Rule
from surefoot.diagnose.rules import losses, numerics, pace, scale, wiring

RULES: tuple[Rule, ...] = (*losses.RULES, *wiring.RULES, *scale.RULES, *pace.RULES, *numerics.RULES)
