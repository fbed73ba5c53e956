"""A new cause takes three files: an entry in the catalogue, a module with its rule, and a script in the zoo.

The three are added to a copy of the package, and everything else is asked whether it knows the cause.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import patience
import surefoot

if TYPE_CHECKING:
    import pytest

ENTRY = """    _cause(
        "data.too-tidy",
        "labels in a perfect row",
        "The loss falls as it should.",
        "The learning rate is exactly 0.0123, which nobody chooses by chance.",
        "lr.too-high",
        "Choose another learning rate.",
        "Lower the learning rate.",
        cured_by={"lr-3": "Lower the learning rate"},
    ),
"""

RULE = '''"""A rule of a new cause."""

from surefoot.diagnose.rule import Claim, Rule


def too_tidy(run):
    """The learning rate that nobody chooses."""
    return Claim(0.9, "It is too tidy.", step=0) if run.lr and run.lr[0] == 0.0123 else None


RULES = (Rule("data.too-tidy", "value", too_tidy, explains=("repro.unseeded",)),)
'''

ASK = """
import json, sys
from surefoot.diagnose.catalogue import to_markdown
from surefoot.diagnose.engine import diagnose
from surefoot.experiments.change_causes import FIXES, causes_of_cures
from surefoot.record.facts import RunFacts
from surefoot.zoo import specimens

losses = [2.0 * 0.95**step for step in range(60)]
series = {"step": list(range(60)), "loss": losses, "lr": [0.0123] * 60}
held = {"number": 0, "type": "SGD", "steps": 60, "series": series}
found = diagnose(RunFacts.from_json({"steps": 60, "optimizers": [held], "seeds": {}}))
print(json.dumps({
    "findings": [[each.cause, each.severity] for each in found.findings],
    "page": "### data.too-tidy" in to_markdown(),
    "fixes": FIXES.get("data.too-tidy"),
    "cured": "data.too-tidy" in causes_of_cures(["lr-3"], []),
    "zoo": [each.name for each in specimens() if each.truth == "data.too-tidy"],
}))
"""


def test_a_new_cause_takes_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "surefoot"
    shutil.copytree(Path(surefoot.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "testing"))
    catalogue = package / "diagnose" / "catalogue.py"
    text = catalogue.read_text("utf-8")
    catalogue.write_text(text.replace("_CAUSES = (\n", f"_CAUSES = (\n{ENTRY}", 1), "utf-8")
    (package / "diagnose" / "rules" / "tidiness.py").write_text(RULE, "utf-8")
    script = package / "zoo" / "tuning" / "data.too-tidy" / "tidy.py"
    script.parent.mkdir()
    script.write_text("import torch\n", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = patience.run([sys.executable, "-c", ASK], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["findings"][0] == ["data.too-tidy", "error"]
    assert ["repro.unseeded", "info"] in told["findings"]
    assert told["page"]
    assert told["fixes"] == {"lr-3": "Lower the learning rate"}
    assert told["cured"]
    assert len(told["zoo"]) == 1
