"""The rules, one file per kind of trouble."""

from __future__ import annotations

RULES: tuple = ()
