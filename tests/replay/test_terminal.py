"""What a replay prints, and in which order."""

import pytest

from surefoot.replay.terminal import as_text
from surefoot.replay.verdict import Replayed

DIFFERENT = {"weight": {"norms": [1.0, 2.0]}}


@pytest.mark.parametrize(("kind", "operation_first"), [("inconclusive", True), ("silent-corruption", False)])
def test_what_says_more_comes_first(kind, operation_first):
    found = Replayed(3, kind, "The summary.", True, different=DIFFERENT, origin={"text": "aten.div made 1 NaN"})
    text = as_text(found)
    assert text.index("The summary.") < text.index("aten.div made 1 NaN")
    assert (text.index("aten.div made 1 NaN") < text.index("weight: 1.0, 2.0")) == operation_first
