"""The search for kept graphs looks at every object there is; what was imported before needs no looking at."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch._dynamo  # the first optimizer would import it, and its objects are many

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _old_objects_set_aside() -> Iterator[None]:
    assert torch._dynamo
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
