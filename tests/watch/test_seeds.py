"""Who seeds: the script, a library for it, or torch for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery

LIBRARY = """
import os, sys
os.makedirs("site-packages/helping", exist_ok=True)
with open("site-packages/helping/__init__.py", "w") as file:
    file.write("import torch\\ndef set_seed(seed):\\n    torch.manual_seed(seed)\\n"
               "class Trainer:\\n    def __init__(self):\\n        set_seed(42)\\n")
sys.path.insert(0, "site-packages")
import helping
"""
SEEDED = {
    "the script": "torch.manual_seed(0)",
    "a library that the script asks": "helping.set_seed(0)",
    "a library by itself": "helping.Trainer()",
    "code that the script executes": "exec('def seed(): torch.manual_seed(0)\\nseed()')",
    "surefoot": "import surefoot\nsurefoot.seed_everything(0)",
    "the script, after torch._dynamo was imported": (
        "torch.manual_seed = torch._disable_dynamo(torch.manual_seed)\ntorch.manual_seed(0)"
    ),
    "a library, after torch._dynamo was imported": (
        "torch.manual_seed = torch._disable_dynamo(torch.manual_seed)\nhelping.Trainer()"
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_counts_whoever_sets_it_for_the_script(watch: Nursery, name: str) -> None:
    found = watch(CLASSES.replace("torch.manual_seed(0)", ""), LIBRARY, SEEDED[name], "loss_of = F.cross_entropy", NET,
                  LOOP)  # fmt: skip
    assert found.facts["seeds"]["torch"] == [0]
    assert "repro.unseeded" not in [each.cause for each in found.diagnosis.findings]


def test_what_torch_seeds_for_itself_does_not_count(watch: Nursery) -> None:
    own = 'exec(compile("import torch; torch.manual_seed(3)", torch.__file__, "exec"))'
    found = watch(CLASSES.replace("torch.manual_seed(0)", ""), own, "loss_of = F.cross_entropy", NET, LOOP)
    assert "repro.unseeded" in [each.cause for each in found.diagnosis.findings]


def test_a_library_that_seeds_again_while_the_script_trains_is_not_heard(watch: Nursery) -> None:
    found = watch(CLASSES, LIBRARY, "loss_of = F.cross_entropy", NET, LOOP + "    helping.Trainer()\n")
    assert found.facts["seeds"]["torch"] == [0]
    assert list(found.facts["reseeds"].values()) == [[0]]
