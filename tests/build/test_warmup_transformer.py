import math

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(script):
    return script("examples/warmup_transformer.py")


def test_without_warmup_the_transformer_diverges(example):
    losses = example.train(warmup_steps=0)
    assert len(losses) < example.STEPS
    assert not math.isfinite(losses[-1])


def test_with_warmup_cosine_the_same_transformer_learns(example):
    losses = example.train(warmup_steps=example.WARMUP_STEPS)
    assert len(losses) == example.STEPS
    assert sum(losses[-20:]) / 20 < example.CHANCE / 2
