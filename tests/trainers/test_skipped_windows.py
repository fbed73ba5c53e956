"""A step that the user leaves out, clipping that the framework does, and objects that nobody holds any more."""

from __future__ import annotations

import gc
import inspect
import logging
import pickle
import warnings
import weakref

import pytest
import torch

import surefoot as sf
from surefoot.trainers.guarded_training import GuardedTraining, GuardOptions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import GradientState

    from surefoot.trainers import accelerate as adapter

pytestmark = pytest.mark.filterwarnings("ignore")


def prepared(how, **options):
    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if how == "bare":
        return accelerator, *accelerator.prepare(model, optimizer)
    return accelerator, *adapter.prepare(accelerator, model, optimizer, mode=how, **options)


@pytest.mark.parametrize("kind", ["value", "norm"])
def test_watching_leaves_an_infinite_gradient_to_the_clipping_of_the_framework(kind):
    weights = []
    for how in ("bare", "watch"):
        accelerator, model, optimizer = prepared(how)
        for step in range(6):
            accelerator.backward(model(torch.randn(8, 4)).pow(2).mean())
            if step == 3:
                model.weight.grad[0, 0] = float("inf")
            getattr(accelerator, f"clip_grad_{kind}_")(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach().nan_to_num(7))
    records = adapter.training_of(accelerator).attachments[0].history
    assert [record.signals.step for record in records if "nonfinite" in record.reasons] == [3, 4, 5][
        : 1 + 2 * (kind == "norm")
    ]
    adapter.end(accelerator)
    assert torch.equal(*weights)


def test_a_gradient_that_is_infinite_before_a_clip_by_value_is_refused():
    accelerator, model, optimizer = prepared("guard")
    states = []
    for step in range(6):
        accelerator.backward(model(torch.randn(8, 4)).pow(2).mean())
        if step == 3:
            model.weight.grad[0, 0] = float("inf")
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        assert float(model.weight.grad.abs().max()) <= 0.1 + 1e-6
        optimizer.step()
        optimizer.zero_grad()
        states.append(model.weight.detach().clone())
    history = adapter.training_of(accelerator).attachments[0].history
    assert [record.skipped for record in history] == [False, False, False, True, False, False]
    assert torch.equal(states[2], states[3])
    (incident,) = adapter.training_of(accelerator).attachments[0].incidents
    assert "before it was clipped by value" in incident.summary
    adapter.end(accelerator)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("factor", [1e4, float("nan")])
def test_a_step_that_the_user_leaves_out_says_nothing_about_the_next_one(factor, to_none):
    weights = []
    for how in ("bare", "guard"):
        accelerator, model, optimizer = prepared(how)
        for step in range(30):
            loss = model(torch.randn(8, 4)).pow(2).mean() + 1
            accelerator.backward(loss * factor if step == 20 else loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            if norm < 100:
                optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        weights.append(model.weight.detach().clone())
    counts = adapter.training_of(accelerator).attachments[0].counts
    adapter.end(accelerator)
    assert torch.equal(*weights)
    assert counts.items() >= {"steps": 29, "skipped": 0, "alarms": 0}.items()


def test_a_loss_that_was_observed_before_zero_grad_is_that_of_the_step():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = GuardedTraining(GuardOptions(), [model], [optimizer], "the loop")
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        training.add_loss(loss)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert [record.signals.loss for record in training.attachments[0].history] == pytest.approx(losses)
    training.add_loss(model(torch.randn(8, 4)).pow(2).mean() * float("nan"))
    training.add_loss(loss := model(torch.randn(8, 4)).pow(2).mean())  # nothing was propagated: both count
    loss.backward()
    optimizer.step()
    assert training.attachments[0].history[-1].skipped
    training.add_loss(loss := model(torch.randn(8, 4)).pow(2).mean() * float("nan"))
    loss.backward()
    optimizer.zero_grad()  # left out
    training.add_loss(loss := model(torch.randn(8, 4)).pow(2).mean())
    loss.backward()
    optimizer.step()
    assert not training.attachments[0].history[-1].skipped
    training.finish()
    assert "zero_grad" not in vars(optimizer)


def test_clipping_on_every_microbatch_counts_once():
    results = []
    for guarded in (False, True):
        torch.manual_seed(0)
        accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=16), torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        prepare = adapter.prepare if guarded else Accelerator.prepare
        model, optimizer = prepare(accelerator, model, optimizer)
        for _ in range(32):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(8, 4)).pow(2).mean() * 100)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        results.append(model.weight.detach().clone())
    record = adapter.training_of(accelerator).attachments[0].history[-1]
    adapter.end(accelerator)
    assert torch.equal(*results)
    assert record.signals.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_accelerator_model_and_optimizer_die_with_their_last_reference():
    prepared("bare")  # what is imported at first use holds the frames it was imported from
    gc.collect()
    gc.disable()
    try:
        accelerator, model, optimizer = prepared("guard")
        accelerator.backward(model(torch.randn(8, 4)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        references = [weakref.ref(each) for each in (accelerator, model, optimizer)]
        del accelerator, model, optimizer
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


def test_a_prepared_accelerator_is_pickled_and_copied_without_the_guard():
    GradientState._reset_state()  # refers to a loader that another test has left, and is then not pickled by anyone
    accelerator, _, optimizer = prepared("guard")
    training = adapter.training_of(accelerator)
    assert "set_to_none" in inspect.signature(training.attachments[0].optimizer.zero_grad).parameters
    other = pickle.loads(pickle.dumps(accelerator))
    other.backward((torch.ones(1, requires_grad=True) * float("nan")).sum())
    assert other.backward.__self__ is other
    pickle.dumps(optimizer)
    assert len(training._window) == 0
    adapter.end(accelerator)


def test_a_checkpoint_is_loaded_whether_or_not_it_was_saved_with_the_guard(tmp_path, caplog):
    for first, second in (("bare", "guard"), ("guard", "bare")):
        accelerator, model, optimizer = prepared(first)
        accelerator.backward(model(torch.randn(8, 4)).pow(2).mean())
        optimizer.step()
        accelerator.save_state(tmp_path / first)
        adapter.end(accelerator)
        caplog.clear()
        accelerator, again, _ = prepared(second)
        with caplog.at_level(logging.WARNING):
            accelerator.load_state(tmp_path / first)
        assert torch.equal(model.weight, again.weight)
        assert caplog.text.count("start without history") == (second == "guard")
        adapter.end(accelerator)


def test_a_clip_factor_is_one_number_above_0():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attachment = sf.attach(model, optimizer)
    for factor in (0.0, -1.0, float("nan"), float("inf"), "x", torch.ones(2)):
        with pytest.raises(sf.UsageError, match="clip_factor"):
            attachment.observe(clip_factor=factor)
    for factor in (
        0.5,
        1,
        torch.tensor([0.5]),
        torch.tensor(0.5, requires_grad=True),
        torch.zeros(()),
        torch.tensor(float("nan")),
    ):
        model(torch.ones(8, 4)).pow(2).mean().backward()
        attachment.observe(clip_factor=factor)
        optimizer.step()
        optimizer.zero_grad()
    assert [record.signals.clip_factor for record in attachment.history] == [0.5, 1.0, 0.5, 0.5, 1.0, 1.0]
    assert attachment.counts["skipped"] == 0
