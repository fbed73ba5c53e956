"""The examination as a whole: order, refusals, errors that do not end it, and the object that a notebook shows."""

import json
import math

import pytest
import torch
from torch import nn

import surefoot as sf
from doctor_faults import softmax_twice
from doctor_healthy import build
from surefoot.doctor.checks import STEPS, Check, Examination, failed, passed, skipped, warned
from surefoot.doctor.examine import examine
from surefoot.errors import SettingError, UsageError

BATCHES = [(torch.linspace(-1, 1, 32).reshape(8, 4), torch.arange(8) % 3)] * 2


def test_every_step_answers_and_in_order():
    model = nn.Linear(4, 3)
    found = examine(model, BATCHES, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), seconds=0.1)
    steps = [check.step for check in found.checks]
    assert set(steps) == set(STEPS)
    assert steps == sorted(steps)
    assert len({check.name for check in found.checks}) == len(found.checks)


def test_without_an_optimizer_what_needs_it_is_skipped():
    found = examine(nn.Linear(4, 3), BATCHES, nn.CrossEntropyLoss(), seconds=0.1)
    assert found["learning rate"].status == "skipped"
    assert found["forward"].status == "pass"


def test_a_loader_that_is_an_iterator_and_a_wrapped_model_are_noted():
    model = nn.DataParallel(nn.Linear(4, 3))
    found = examine(model, iter(BATCHES), nn.CrossEntropyLoss(), seconds=0.1)
    assert any("cannot be rewound" in note for note in found.notes)
    assert any("inside the DataParallel" in note for note in found.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no model", BATCHES), "torch.nn.Module"),
        ((nn.Linear(4, 3), 3), "iterable over batches"),
        ((nn.Linear(4, 3), []), "returned no batch"),
        ((nn.Linear(4, 3), BATCHES, None, "adam"), "torch optimizer"),
    ],
)
def test_wrong_use_says_what_was_got(arguments, message):
    with pytest.raises((UsageError, SettingError), match=message):
        examine(*arguments)
    with pytest.raises((UsageError, SettingError), match="seconds"):
        examine(nn.Linear(4, 3), BATCHES, seconds=0)


def test_it_prints_the_table_and_returns_it(capsys):
    model, loader, loss_fn, optimizer = build("mlp")
    examination = sf.debug_training_stability(model, loader, loss_fn, optimizer, seconds=1)
    printed = capsys.readouterr().out
    assert printed == f"{examination}\n"
    assert "tiny batch" in printed
    assert max(len(line) for line in printed.splitlines()) <= 120


def test_a_fault_is_printed_with_its_cause_and_fix(capsys):
    torch.manual_seed(0)
    examination = sf.debug_training_stability(*softmax_twice(), seconds=1)
    assert "loss.softmax-before-cross-entropy: Return the logits" in capsys.readouterr().out
    assert not examination.ok
    assert examination.status == "fail"


def test_loss_and_optimizer_may_be_left_out(capsys):
    model, loader, _, _ = build("own_loss")
    examination = sf.debug_training_stability(model, loader, seconds=1, show=False)
    assert examination["forward"].status == "pass"
    assert examination.ok
    assert capsys.readouterr().out == ""


def test_in_a_notebook_the_last_line_of_a_cell_stays_short():
    examination = sf.debug_training_stability(nn.Linear(2, 1), [torch.randn(8, 2)], lambda out: out.mean(), show=False)
    assert len(repr(examination)) < 100
    assert "pass" in repr(examination)


CHECKS = (
    passed(1, "one", "fine", 1.0),
    warned(2, "two", "so so", math.nan, "a number", "Look again.", "lr.too-low"),
    failed(3, "three", "bad", math.inf, "less", "Cure it.", "lr.too-high"),
    skipped(4, "four", "no time"),
)


def test_the_worst_status_and_the_causes_lead():
    examination = Examination(CHECKS, 1.0)
    assert examination.status == "fail"
    assert examination.causes == ("lr.too-high", "lr.too-low")
    assert examination.counts() == {"fail": 1, "warn": 1, "pass": 1, "skipped": 1}
    assert Examination(CHECKS[:2], 1.0).ok
    assert examination["two"].status == "warn"
    with pytest.raises(KeyError, match="three"):
        examination["five"]


def test_an_examination_is_valid_json_whatever_its_numbers():
    content = json.loads(json.dumps(Examination(CHECKS, 1.0, ("a note",)).to_dict(), allow_nan=False))
    assert [check["number"] for check in content["checks"]] == [1.0, "nan", "inf", None]
    assert content["notes"] == ["a note"]


def test_a_check_cannot_name_a_cause_that_is_not_in_the_catalogue():
    with pytest.raises(ValueError, match="not a code of the catalogue"):
        Check(1, "name", "fail", "summary", cause="made.up")
