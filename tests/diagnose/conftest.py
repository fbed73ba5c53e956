from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def watch() -> Iterator[Nursery]:
    """Runs a script under the watcher: `watch(source).first` is the first finding."""
    nursery = Nursery()
    yield nursery
    nursery.close()
