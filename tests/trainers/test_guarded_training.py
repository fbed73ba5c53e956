"""What all adapters share, without a framework."""

from __future__ import annotations

import inspect
import logging
import sys

import pytest
import torch

import forked
import surefoot as sf
from surefoot.errors import SettingError, UsageError
from surefoot.trainers.guarded_training import GuardedTraining, GuardOptions, load_from, save_into
from trainers.small_training import Classifier, Rows


def built(**options):
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, GuardedTraining(GuardOptions(**options), [model], [optimizer], "the loop")


def step(model, optimizer, training, microbatches=2, factor=1.0, is_share=False):
    rows, losses = Rows(16), []
    optimizer.zero_grad()
    for _ in range(microbatches):
        loss = factor * model(rows.x, rows.labels)["loss"]
        training.add_loss(loss / microbatches if is_share else loss, is_share=is_share)
        losses.append(loss.item())
        (loss / microbatches).backward()
    optimizer.step()
    return sum(losses) / len(losses)


@pytest.mark.parametrize("is_share", [False, True])
def test_the_loss_of_a_step_is_that_of_its_microbatches_whether_they_are_divided_or_not(is_share):
    model, optimizer, training = built()
    means = [step(model, optimizer, training, microbatches, is_share=is_share) for microbatches in (1, 3, 2)]
    history = training.attachments[0].history
    assert [record.signals.loss for record in history] == pytest.approx(means)


def test_numbers_for_loggers_are_there_after_the_first_step():
    model, optimizer, training = built()
    assert training.numbers() == {}
    step(model, optimizer, training)
    step(model, optimizer, training, factor=float("nan"))
    numbers = training.numbers()
    assert numbers["surefoot/skipped"] == 1
    assert numbers["surefoot/lr"] == pytest.approx(0.1)
    assert all(isinstance(value, float) for value in numbers.values())


def test_a_state_is_written_into_the_folder_of_a_checkpoint_and_read_again(tmp_path, caplog):
    model, optimizer, training = built(log=tmp_path / "run")
    step(model, optimizer, training)
    save_into(training, tmp_path)
    save_into(training, tmp_path)  # the same step may be saved twice
    training.finish()
    model, optimizer, again = built(log=tmp_path / "again")
    load_from(again, tmp_path)
    assert again.steps == 1
    assert caplog.text == ""
    load_from(again, tmp_path / "nothing")
    assert "start without history" in caplog.text
    (tmp_path / "file").write_text("")
    save_into(again, tmp_path / "file")  # no folder, and no error
    assert "was not saved" in caplog.text
    again.finish()


def test_recovery_is_left_out_where_copies_do_not_fit(monkeypatch, caplog):
    monkeypatch.setattr("surefoot.trainers.guarded_training.SHARE_OF_HOST", 0.0)
    assert built()[2] is not None
    assert "recovery is disabled" in caplog.text


def test_recovery_is_for_one_optimizer():
    model = Classifier()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.head)]
    GuardedTraining(GuardOptions(), [model], optimizers, "the loop").finish()
    with pytest.raises(SettingError, match="2 optimizers"):
        GuardedTraining(GuardOptions(recovery=sf.TrainingRecovery()), [model], optimizers, "the loop")
    with pytest.raises(SettingError, match="TrainingRecovery"):
        GuardOptions(recovery=3)  # type: ignore[arg-type]


def test_a_diagnosis_that_fails_does_not_end_training(tmp_path, caplog):
    _, _, training = built(log=tmp_path / "run")
    with caplog.at_level(logging.INFO):
        training.finish()
    assert "surefoot: " in caplog.text


def test_frameworks_are_imported_when_they_are_used():
    code = "import sys, surefoot as sf; sf.trainers; dir(sf.trainers); "
    code += "print({'transformers', 'lightning', 'accelerate', 'ignite', 'ray', 'trl'} & set(sys.modules))"
    assert forked.run(["-c", code]).stdout == "set()\n"
    with pytest.raises(AttributeError, match="it has accelerate, ignite"):
        sf.trainers.keras  # noqa: B018


def test_a_framework_that_is_missing_is_one_clear_error(monkeypatch):
    for name in sf.trainers.FRAMEWORKS:
        for loaded in [
            each for each in sys.modules if each.split(".")[0] == name or each == f"surefoot.trainers.{name}"
        ]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.delitem(vars(sf.trainers), name, raising=False)
        monkeypatch.setitem(sys.modules, name, None)
        assert not hasattr(sf.trainers, name)
        with pytest.raises(AttributeError, match=rf"needs {name}.*pip install -e '\.\[{name}\]'"):
            getattr(sf.trainers, name)
    assert not set(sf.trainers.FRAMEWORKS) & set(dict(inspect.getmembers(sf.trainers)))


def test_an_optimizer_that_trains_none_of_the_model_is_left_out_with_one_warning(caplog):
    model, other = Classifier(), Classifier()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (other, model)]
    training = GuardedTraining(GuardOptions(), [model], optimizers, "the loop")
    assert [attachment.optimizer for attachment in training.attachments] == optimizers[1:]
    assert caplog.text.count("1 of the 2 optimizers of the loop train no parameter of the model") == 1


def test_no_optimizer_stays_guarded_if_another_one_cannot_be():
    model = Classifier()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.head)]
    guarded = sf.attach(model, optimizers[1])
    with pytest.raises(UsageError, match="already guarded"):
        GuardedTraining(GuardOptions(), [model], optimizers, "the loop")
    guarded.detach()
    training = GuardedTraining(GuardOptions(), [model], optimizers, "the loop")
    assert training.is_attached


def test_an_unknown_option_is_one_clear_error():
    with pytest.raises(SettingError, match=r"unknown option `clip_norm`. The options are mode, clip, checker"):
        GuardOptions.of(None, {"clip": None, "clip_norm": 1.0})


@pytest.mark.parametrize(("options", "warnings"), [({}, 1), ({"recovery": None}, 0), ({"mode": "watch"}, 0)])
def test_steps_whose_loss_is_not_known_are_one_warning_if_recovery_needs_it(options, warnings, caplog):
    model, rows = Classifier(), Rows(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = GuardedTraining(GuardOptions(**options), [model], [optimizer], "the loop", "Call `observe(loss)`.")
    for _ in range(3):
        model(rows.x, rows.labels)["loss"].backward()
        optimizer.step()
    training.finish()
    assert caplog.text.count("the loss of the first step is not known") == warnings
    assert caplog.text.count("Call `observe(loss)`.") == warnings


@pytest.mark.parametrize("wrong", [{"clip": 1.0}, {"on_step": 3}, {"on_event": "alarm"}, {"recovery": True}])
def test_a_wrong_option_is_an_error_before_training_begins(wrong):
    with pytest.raises(sf.SettingError, match=f"`{next(iter(wrong))}`"):
        GuardOptions.of("run", wrong)


def test_an_attachment_that_is_refused_leaves_no_open_log(tmp_path):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(sf.SettingError, match="takes a clipper"):
        sf.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0, log=tmp_path / "run")
    assert not (tmp_path / "run").exists()
