"""Wrong input to the functions that set up a model: one error that names the argument and what was given."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import build

NAN = float("nan")


def optimizer():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sf.warmup_cosine(3, 1, 10), "`optimizer` must be a torch optimizer; got int"),
        (lambda: sf.warmup_cosine(optimizer(), "a", 10), "`warmup_steps` must be a whole number.*; got 'a'"),
        (lambda: sf.warmup_linear(optimizer(), 1.5, 10), r"`warmup_steps` must be a whole number.*; got 1\.5"),
        (lambda: sf.warmup_constant(optimizer(), -1), "`warmup_steps` .* must not be negative; got -1"),
        (lambda: sf.warmup_inverse_sqrt(optimizer(), None), "`warmup_steps` must be a whole number.*; got None"),
        (lambda: sf.warmup_cosine(optimizer(), 1, NAN), "`total_steps` must be a whole number .*; got nan"),
        (lambda: sf.warmup_cosine(optimizer(), 1, 10, floor="a"), "`floor` must be a number; got 'a'"),
        (lambda: sf.warmup_cosine(optimizer(), 1, 10, start="a"), "`start` must be a number, or None; got 'a'"),
        (lambda: sf.warmup_cosine(optimizer(), 1, 10, restarts="a"), "`restarts` >= 0 .* got a"),
        (lambda: sf.warmup_step(optimizer(), 5, 20), "`milestones` must be a list of steps, .*; got 20"),
        (lambda: sf.warmup_step(optimizer(), 5, [20], gamma="a"), "`gamma` must be positive; got a"),
        (lambda: sf.warmup_stable_decay(optimizer(), 1, 10, "a"), "`decay_steps` must be a whole number; got 'a'"),
        (lambda: sf.decay_groups(3, 0.1), r"`model` must be a torch\.nn\.Module; got 3"),
        (lambda: sf.decay_groups(nn.Linear(1, 1), NAN), "`weight_decay` must be a number, .*; got nan"),
        (lambda: sf.decay_groups(nn.Linear(1, 1), 0.1, no_decay=3), "`no_decay` must be a name or .*; got 3"),
        (lambda: sf.init_for(None), r"`model` must be a torch\.nn\.Module; got None"),
        (lambda: build.advise_normalization("model", 4), r"`model` must be a torch\.nn\.Module; got 'model'"),
        (lambda: build.advise_normalization(nn.Linear(1, 1), "4"), "`batch_size` must be at least 1, .*; got '4'"),
    ],
)
def test_wrong_settings_are_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_masks_must_be_tensors():
    with pytest.raises(TypeError, match="`keep` must be a tensor; got 3"):
        build.masked_softmax(torch.zeros(2), 3)
    with pytest.raises(TypeError, match=r"`mask` must be a tensor; got \[True\]"):
        build.find_fully_masked([True])
