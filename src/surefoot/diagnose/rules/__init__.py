"""The rules, one file per kind of problem. A module here with a tuple `RULES` is found automatically."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, get_args

from surefoot.diagnose.rule import Kind

if TYPE_CHECKING:
    from surefoot.diagnose.rule import Rule


def find_rules(path: list[str], package: str) -> tuple[Rule, ...]:
    """The rules of every module of a package, those with the strongest kind of evidence first.

    If two causes explain each other, the first one counts as the cause.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(path))
    rules = [rule for name in names for rule in getattr(import_module(f"{package}.{name}"), "RULES", ())]
    return tuple(sorted(rules, key=lambda rule: get_args(Kind).index(rule.kind)))


RULES: tuple[Rule, ...] = find_rules(__path__, __name__)
