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
        (lambda: build.PreNormMLP(0), "`features` must be a whole number, at least 1; got 0"),
        (lambda: build.PreNormMLP("a"), "`features` must be a whole number, at least 1; got 'a'"),
        (lambda: build.ConvGroupNorm(3, 0), "`channels_out` must be a whole number, at least 1; got 0"),
        (lambda: build.ScaledResidual(3, 0.5), r"`branch` must be a torch\.nn\.Module; got 3"),
        (lambda: build.ScaledResidual(nn.Identity(), NAN), "`scale` must be a number; got nan"),
        (lambda: build.clip_advice(None), "`norms` must be a list or a tensor of norms; got None"),
        (lambda: build.clip_advice("a"), "`norms` must be a list or a tensor of norms; got 'a'"),
        (lambda: build.clip_advice([1.0, "a"]), "`norms` must contain numbers only; got 'a' among them"),
        (lambda: build.clip_advice([-1.0]), "`norms` must not be negative; the smallest is -1"),
        (lambda: build.normalize_images(3), "`images` must be a tensor; got 3"),
        (lambda: build.normalize_images([[1.0]]), "`images` must be a tensor; got .* `torch.from_numpy`"),
        (lambda: build.Standardizer.fit(3), "`data` must be an array, or an iterable of arrays; got 3"),
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
