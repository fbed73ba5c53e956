"""What is replaced on an `Accelerator`: the same results, and the guard is told what it should be told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from surefoot.trainers.guarded_training import GuardedTraining, GuardOptions
from trainers.small_training import Classifier, Rows, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from surefoot.trainers.accelerator_methods import follow_clipping, follow_losses

pytestmark = pytest.mark.filterwarnings("ignore")


def step(guarded: bool, clip: Any) -> tuple[Any, Any]:
    accelerator, model, rows = Accelerator(cpu=True), Classifier().eval(), Rows(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = GuardedTraining(GuardOptions(), [model], [optimizer], "the loop") if guarded else None
    if training is not None:
        follow_losses(training, accelerator, is_share=False)
        follow_clipping(training, accelerator)
    accelerator.backward(model(rows.x, rows.labels)["loss"])
    clip(accelerator, model)
    optimizer.step()
    if training is not None:
        training.replaced.undo()
    return model.state_dict(), training


@pytest.mark.parametrize(
    ("clip", "told"),
    [
        (lambda accelerator, model: accelerator.clip_grad_norm_(model.parameters(), 0.1), True),
        (lambda accelerator, model: accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type=1), True),
        (lambda accelerator, model: accelerator.clip_grad_norm_([model.head.weight], 0.1), False),
        (lambda accelerator, model: accelerator.clip_grad_norm_(model.head.weight, 0.1), False),
        (lambda accelerator, model: accelerator.clip_grad_value_(model.parameters(), 0.01), False),
        (lambda accelerator, model: accelerator.clip_grad_value_(model.parameters(), clip_value=0.01), False),
        (lambda accelerator, model: accelerator.clip_grad_norm_(model.parameters(), float("inf")), False),
    ],
    ids=["norm", "norm-1", "one-parameter", "one-tensor", "value", "value-by-name", "only-the-norm"],
)
def test_clipping_has_the_same_bits_and_the_guard_knows_the_gradients_before_it(clip, told):
    bare, _ = step(False, clip)
    guarded, training = step(True, clip)
    assert same(bare, guarded)
    signals = training.attachments[0].history[0].signals
    assert (signals.clip_factor < 1) == told
    assert signals.loss is not None


def test_a_norm_is_returned_as_it_was_before():
    norms = []
    for guarded in (False, True):
        step(guarded, lambda accelerator, model: norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
    assert torch.equal(*norms)


def test_clipping_that_a_subclass_has_written_stays_its_own():
    class Own(Accelerator):  # type: ignore[misc]
        def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> str:
            return "own"

    accelerator, model = Own(cpu=True), Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = GuardedTraining(GuardOptions(), [model], [optimizer], "the loop")
    follow_clipping(training, accelerator)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == "own"
    assert "clip_grad_value_" in vars(accelerator)
    training.finish()
