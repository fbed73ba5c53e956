"""The rules, one file per kind of trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.diagnose.rules import adversarial, data, policy, restart

if TYPE_CHECKING:
    from surefoot.diagnose.engine import Rule

RULES: tuple[Rule, ...] = (*data.RULES, *adversarial.RULES, *policy.RULES, *restart.RULES)
