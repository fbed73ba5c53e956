"""Fixtures of the tests of all frameworks."""

from __future__ import annotations

import pytest


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no other test has called `torch.compile`: there, steps are observed in depth."""
    from torch._dynamo import eval_frame

    monkeypatch.setattr(eval_frame, "cached_backends", {})
