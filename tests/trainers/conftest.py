"""Fixtures of the tests of all frameworks."""

from __future__ import annotations

import pytest


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no other test has compiled anything: there, steps are observed in depth."""
    from torch._dynamo import convert_frame

    monkeypatch.setattr(convert_frame, "input_codes", convert_frame.Tracker())
