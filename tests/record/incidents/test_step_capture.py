"""What is remembered of a step while its verdict is out, and the hooks that models carry for it."""

import copy
import gc
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from surefoot.core.nested import equal
from surefoot.core.random_state import read_streams, set_streams
from surefoot.record.incidents import step_capture
from surefoot.record.incidents.step_capture import QuickStreams, StepCapture

CPU = torch.device("cpu")


def hooks(model):
    return len(model._forward_pre_hooks)


def test_the_batch_the_streams_the_inputs_and_the_loss_of_a_step_are_noted():
    model = nn.Linear(2, 1)
    capture = StepCapture([model], CPU)
    batch = torch.ones(3, 2)
    capture.drew(batch)
    loss = model(batch).sum()
    loss.backward()
    capture.ran_backward(loss, None)
    capture.begin(1)
    window = capture.window(0)
    (microbatch,) = window.microbatches
    assert window.drew
    assert microbatch.drawn[0].value.tensors[0].data_ptr() == batch.data_ptr()
    assert microbatch.streams is not None
    assert microbatch.losses[0].item() == loss.item()
    assert microbatch.callers[0]() is model
    assert not microbatch.losses[0].requires_grad
    capture.close()


def test_a_batch_that_is_changed_in_place_is_noticed():
    capture = StepCapture([nn.Linear(2, 1)], CPU)
    batch = torch.ones(3, 2)
    capture.drew(batch)
    assert not capture.under_way.drawn[0].changed
    batch += 1
    assert capture.under_way.drawn[0].changed
    capture.close()


def test_no_object_of_the_loop_is_kept_alive():
    model, batch = nn.Linear(2, 1), torch.ones(3, 2)
    capture = StepCapture([model], CPU)
    capture.drew(batch)
    references = weakref.ref(model), weakref.ref(batch)
    del model, batch
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    capture.close()


def test_a_batch_of_a_loader_is_noted_once_and_an_evaluation_is_not_a_step():
    model = nn.Linear(1, 1)
    capture = StepCapture([model], CPU)
    for batch in DataLoader(TensorDataset(torch.zeros(1, 1))):
        capture.drew(batch)
    assert len(capture.under_way.drawn) == 1
    model.eval()
    for _ in DataLoader(TensorDataset(torch.zeros(2, 1))):
        pass
    assert len(capture.under_way.drawn) == 1
    capture.close()


def test_models_carry_a_hook_from_the_batch_to_the_backward_only():
    model = nn.Linear(2, 1)
    capture = StepCapture([model], CPU, between_steps=False)
    assert hooks(model) == 0
    capture.drew(torch.ones(1, 2))
    assert hooks(model) == 1
    capture.close_microbatch()
    assert hooks(model) == 0
    capture.close()


def test_a_model_is_copied_and_pickled_with_a_hook_that_does_nothing():
    model = nn.Linear(2, 1)
    capture = StepCapture([model], CPU)
    assert hooks(model) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(1, 2))
    assert capture.under_way.callers == []
    capture.close()
    assert hooks(model) == 0


def test_a_model_takes_the_place_of_its_own_parts():
    part = nn.Linear(2, 2)
    capture = StepCapture([part], CPU)
    whole = nn.Sequential(part)
    capture.add_models([whole])
    assert capture.models.knows(whole)
    assert not capture.models.knows(part)
    assert capture.models.parts() == {id(part)}
    assert capture.models.devices() == {CPU}
    capture.close()


def test_the_first_batches_of_a_large_step_are_dropped(monkeypatch):
    monkeypatch.setattr(step_capture, "MOST_BATCH_BYTES", 40)
    capture = StepCapture([nn.Linear(2, 1)], CPU)
    for _ in range(3):
        capture.drew(torch.ones(2, 2))  # 16 bytes
        capture.close_microbatch()
    assert [each.dropped for each in capture.window(0).microbatches] == [True, False, False]
    capture.close()


def test_notes_of_steps_whose_verdict_is_out_are_kept():
    capture = StepCapture([nn.Linear(2, 1)], CPU, lag_steps=2)
    for step in range(1, 5):
        capture.drew(torch.ones(1, 2))
        capture.begin(step)
    assert capture.window(0) is None
    assert [capture.window(step).step for step in (1, 2, 3, 4)] == [1, 2, 3, 4]
    capture.moved_to(2, under_way=True)
    assert capture.window(2).began_before
    capture.close()


def test_the_microbatches_of_a_loop_that_never_steps_are_bounded(monkeypatch):
    monkeypatch.setattr(step_capture, "MOST_MICROBATCHES", 3)
    capture = StepCapture([nn.Linear(2, 1)], CPU)
    for count in range(5):
        capture.drew(torch.ones(2))
        capture.ran_backward(torch.tensor(float(count)), None)
        capture.close_microbatch()
    assert [float(each.losses[0]) for each in capture.current.microbatches] == [2.0, 3.0, 4.0]
    assert capture.current.began_before
    assert capture.current.batch_bytes == sum(each.nbytes() for each in capture.current.microbatches) == 24
    capture.close()


def test_while_paused_nothing_is_noted_held_or_hooked():
    model = nn.Linear(2, 1)
    capture = StepCapture([model], CPU, between_steps=False)
    capture.drew(torch.ones(1, 2))
    capture.moved_to(-1, under_way=False, paused=True)
    assert hooks(model) == 0
    capture.drew(torch.ones(1, 2))
    capture.called(model, (torch.ones(1, 2),), {})
    assert not capture.under_way.drawn
    assert not capture.under_way.calls
    assert capture.window(0) is None
    capture.moved_to(7, under_way=False)
    capture.drew(torch.ones(1, 2))
    assert len(capture.under_way.drawn) == 1
    assert capture.window(7) is capture.current
    capture.close()


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_a_note_is_what_the_public_functions_read():
    streams = QuickStreams()
    assert streams.quick
    for _ in range(3):
        draw()
        note, public = streams.note(), read_streams()
        assert equal(note.full(), public)


def test_a_note_gives_the_streams_as_they_were_then():
    streams = QuickStreams()
    note = streams.note()
    expected = [draw() for _ in range(700)]  # beyond one block of the generators
    after = read_streams()
    set_streams(note.full())
    assert [draw() for _ in range(700)] == expected
    assert equal(read_streams(), after)


@pytest.mark.parametrize("seed", [random.seed, np.random.seed, torch.manual_seed])
def test_a_loop_that_seeds_at_every_step_gets_a_note_of_every_seed(seed):
    streams = QuickStreams()
    for number in range(3):
        seed(number)
        assert equal(streams.note().full(), read_streams())
        draw()


def test_without_a_graph_under_way_a_note_is_taken():
    streams = QuickStreams([torch.device("cpu")])
    assert streams.note_or(None) is not None
