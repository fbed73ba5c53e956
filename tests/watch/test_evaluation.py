"""Where a script evaluates: in blocks of its own, and in those of a trainer that it calls."""

import textwrap

import pytest

from watched import CLASSES

NET = """
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""

TRAINER = """
import torch
import torch.nn.functional as F


class Averages:
    @torch.no_grad()
    def update(self, model):
        for p in model.parameters():
            p.detach().clone()


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.averages = model, optimizer, Averages()

    def fit(self, x, y, held_x, held_y):
        for step in range(60):
            rows = torch.randint(len(x), (32,))
            self.model.train()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x[rows]), y[rows]).backward()
            self.optimizer.step()
            self.averages.update(self.model)
            if step % 10 == 9:
                self.evaluate(held_x, held_y)

    def evaluate(self, held_x, held_y):
        self.model.MODE()
        with torch.no_grad():
            F.cross_entropy(self.model(held_x), held_y)
"""


def installed(source):
    """A part of a script that imports `source` as a library, and calls its trainer from one line."""
    return f"""
import sys
from pathlib import Path

folder = Path("site-packages/lib_of_test")
folder.mkdir(parents=True)
(folder / "__init__.py").write_text('''{source}''')
sys.path.insert(0, "site-packages")
from lib_of_test import Trainer

Trainer(model, optimizer).fit(x[:192], y[:192], x[192:], y[192:])
"""


def test_the_evaluation_of_a_trainer_is_seen_with_the_line_that_calls_it(watch):
    run = watch(CLASSES, NET, installed(TRAINER.replace("MODE", "eval")))
    assert run.causes == []
    evaluations = run.facts["evaluations"]
    assert evaluations
    assert {call["site"] for call in evaluations} == {run.at("|Trainer(model, optimizer)")}
    assert not any(call["training"] for call in evaluations)
    assert run.facts["evaluation_blocks"] <= 6, "what is done to the averages is no evaluation"


def test_a_trainer_that_evaluates_in_training_mode_is_noticed(watch):
    run = watch(CLASSES, NET, installed(TRAINER.replace("MODE", "train")))
    assert run.first.cause == "model.train-mode-eval"
    assert run.at("|Trainer(model, optimizer)") in run.first.where


INSIDE = """
import torch
from torch import nn
import torch.nn.functional as F


class Angles(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return torch.arange(len(x))[:, None] * 0.0


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = nn.Sequential(model, nn.Identity()), optimizer
        self.angles = Angles()

    def fit(self, x, y, *held):
        for step in range(40):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x + self.angles(x)), y).backward()
            with torch.inference_mode(False), torch.set_grad_enabled(True):
                self.optimizer.step()
""".replace("'''", '"""')


def test_a_block_inside_of_a_model_and_one_that_turns_gradients_on_are_no_evaluations(watch):
    run = watch(CLASSES, NET, installed(textwrap.dedent(INSIDE)))
    assert run.facts["evaluations"] == []
    assert run.facts["evaluation_blocks"] == 0


def test_blocks_before_the_first_step_do_not_count(watch):
    """A model of many layers is initialised in as many blocks; the evaluations after that are still looked at."""
    layers = "for _ in range(40):\n    with torch.no_grad():\n        nn.init.normal_(model[0].weight, std=0.3)\n"
    loop = """
    for step in range(80):
        rows = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                model(x[:64])
    """
    run = watch(CLASSES, NET, layers, textwrap.dedent(loop))
    assert "model.train-mode-eval" in run.causes


LONG_EVALUATION = """
import surefoot.watch.step_recording

surefoot.watch.step_recording.LONG_SECONDS = SECONDS
for step in range(32):
    F.cross_entropy(model(x[:32]), y[:32]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step >= 30:  # an evaluation may be a part of a sampled step, but not two of them
        with torch.no_grad():
            for first in range(0, 160, 16):
                F.cross_entropy(model(x[first : first + 16]), y[first : first + 16])
"""


@pytest.mark.parametrize(("seconds", "losses"), [("0.0", 4), ("1e9", 10)])
def test_an_evaluation_that_takes_long_to_record_is_recorded_in_part(watch, seconds, losses):
    facts = watch(CLASSES, NET, LONG_EVALUATION.replace("= SECONDS", f"= {seconds}")).facts
    block, *_ = facts["evaluation_calls"]
    calls = [call for call in facts["evaluations"] if call["block"] == block["block"]]
    assert len(calls) == 10, "model calls are followed further"
    assert len(block["losses"]) == losses
    assert block["pairs"] is not None
