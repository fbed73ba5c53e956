"""Where the loop is a library's, the first fix is a setting of that library."""

from __future__ import annotations

import pytest

from recorded import falling, optimizer, run
from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.trainer_fixes import _FIXES, trainer_fixes
from watched import CLASSES, NET

TRAINER = """
import torch.nn.functional as F


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def train(self, x, y):
        for step in range(40):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
"""
CALLED = f"""
import sys
from pathlib import Path

folder = Path("site-packages/transformers")
folder.mkdir(parents=True)
(folder / "__init__.py").touch()
(folder / "trainer.py").write_text('''{TRAINER}''')
sys.path.insert(0, "site-packages")
from transformers.trainer import Trainer

Trainer(model, optimizer).train(x, y)
"""


@pytest.mark.parametrize("trainer", sorted(_FIXES))
def test_every_cause_with_a_setting_is_in_the_catalogue(trainer: str) -> None:
    assert set(_FIXES[trainer]) <= set(CATALOGUE)


def test_a_learning_rate_is_given_as_an_argument_that_can_be_copied() -> None:
    optimizers = [optimizer(falling(60), 0)]
    assert trainer_fixes(run(optimizers=optimizers), "lr.too-high") == ()
    (fix,) = trainer_fixes(run(optimizers=optimizers, trainer="transformers"), "lr.too-high")
    assert "`learning_rate=0.001` in `TrainingArguments`" in fix
    assert trainer_fixes(run(optimizers=optimizers, trainer="lightning"), "lr.too-high") == ()


def test_a_run_inside_of_a_trainer_is_told_the_setting_and_the_line_that_calls_the_trainer(watch) -> None:  # type: ignore[no-untyped-def]
    model = NET.replace("optim.Adam", "optim.SGD").replace("1e-2", "60.0")
    run = watch(CLASSES, model, CALLED)
    assert run.facts["trainer"] == "transformers"
    found = run.first
    assert found.cause == "lr.too-high"
    assert "`learning_rate=6` in `TrainingArguments`" in found.fixes[0]
    assert all("site-packages" not in place for place in found.where)


def test_a_loop_of_the_scripts_own_has_no_trainer(watch) -> None:  # type: ignore[no-untyped-def]
    loop = TRAINER + "\nTrainer(model, optimizer).train(x, y)\n"
    assert "trainer" not in watch(CLASSES, NET, loop).facts
