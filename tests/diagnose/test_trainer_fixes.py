"""Where the loop is a library's, the first fix is a setting of that library."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader

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


def _settings_of(framework: str) -> set[str]:
    """The arguments of the classes and methods that the fixes of a framework name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if framework == "transformers":
            from transformers import Trainer, TrainingArguments

            called: list[Any] = [TrainingArguments, Trainer.__init__, Trainer.train]
        elif framework == "lightning":
            from lightning import Trainer

            called = [Trainer.__init__, Trainer.fit, DataLoader.__init__]
        else:
            from accelerate import Accelerator

            called = [Accelerator.__init__]
    return {name for each in called for name in inspect.signature(each).parameters}


@pytest.mark.parametrize("framework", sorted(_FIXES))
def test_every_setting_that_is_named_exists_in_the_installed_version(framework: str) -> None:
    words = re.sub(r"`\S*dataset\.shuffle\(.*?\)`|`labels\[.*?`", "", " ".join(_FIXES[framework].values()))
    named = set(re.findall(r"\b([a-z]\w*)=", words)) | set(re.findall(r"`([a-z]+_[a-z_]+)`", words))
    assert len(named) >= 1
    assert named <= _settings_of(framework)


def test_a_trainer_that_clips_already_is_not_told_to_clip() -> None:
    cause = "model.exploding-gradient"
    assert trainer_fixes(run(optimizers=[optimizer(falling(60), 0)], trainer="transformers"), cause)
    clipped = optimizer(falling(60), 0)
    clipped["series"]["clip_norm"] = [3.0] * 60
    assert not trainer_fixes(run(optimizers=[clipped], trainer="transformers"), cause)


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
    assert "`learning_rate=0.06` in `TrainingArguments`" in found.fixes[0]
    assert all("site-packages" not in place for place in found.where)


def test_a_loop_of_the_scripts_own_has_no_trainer(watch) -> None:  # type: ignore[no-untyped-def]
    loop = TRAINER + "\nTrainer(model, optimizer).train(x, y)\n"
    assert "trainer" not in watch(CLASSES, NET, loop).facts
