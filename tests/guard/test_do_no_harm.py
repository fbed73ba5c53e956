"""Law 1: with nothing wrong, a guarded run is bitwise the bare run, random number streams included."""

from __future__ import annotations

import itertools

import pytest
import torch

from loops import MODELS, OPTIMIZERS, differences, everything, train_bare, train_guarded

pytestmark = pytest.mark.slow

LONG, SHORT = 136, 60
"""Microbatches: with an accumulation of 4, a quarter as many steps. Each model, optimizer and precision has long
runs, in which the windows of the step rules fill (128); in the other pairs of them every step rule comes to judge."""

# Every optimizer with a plain model and with one whose weights are tied; every other model with a fused optimizer,
# which folds, and a plain one. Then every model in every precision and accumulation, with the optimizers that take part
# differently: fused; plain; and one that brings its own step.
COMBINATIONS = [
    (model, optimizer, "fp32", 1)
    for model, optimizer in itertools.product(MODELS, OPTIMIZERS)
    if model in ("mlp", "transformer with tied weights") or optimizer in ("fused adamw", "sgd with momentum")
] + [
    (model, optimizer, precision, accumulate)
    for (model, (precision, accumulate)) in itertools.product(
        MODELS, [("bf16", 1), ("bf16", 4), ("fp16", 1), ("fp16", 4), ("fp32", 4)]
    )
    if model != "lstm"
    for optimizer in {"mlp": ["fused adamw", "sgd with momentum", "third-party style"]}.get(model, ["fused adamw"])
]


@pytest.mark.parametrize(("model", "optimizer", "precision", "accumulate"), COMBINATIONS)
def test_a_healthy_guarded_run_is_bitwise_the_bare_run(model, optimizer, precision, accumulate):
    is_short = accumulate == 1 and model != "mlp" and (optimizer, precision) != ("fused adamw", "fp32")
    steps = SHORT if is_short else LONG // accumulate
    bare = everything(*train_bare(model, optimizer, precision, accumulate, steps))
    random_after_bare = torch.get_rng_state()
    net, opt, stabilizer = train_guarded(model, optimizer, precision, accumulate, steps)
    assert differences(bare, everything(net, opt)) == []
    assert torch.equal(random_after_bare, torch.get_rng_state())
    counts = stabilizer.counts
    assert counts["steps"] == steps
    assert counts["skipped"] == counts["overflows"]
    assert counts["alarms"] == 0


@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd with momentum", "adamw"])
@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("fp16", 2)])
def test_deciding_on_the_device_is_bitwise_the_bare_run_too(optimizer, precision, accumulate):
    bare = everything(*train_bare("mlp", optimizer, precision, accumulate, 100))
    net, opt, _ = train_guarded("mlp", optimizer, precision, accumulate, 100, decide_on="device")
    assert differences(bare, everything(net, opt)) == []


def test_watching_everything_changes_nothing():
    from surefoot import LayerMetrics

    bare = everything(*train_bare("cnn with batch norm", "adamw", "fp32", 1, 50))
    net, opt, stabilizer = train_guarded(
        "cnn with batch norm", "adamw", "fp32", 1, 50, watch=LayerMetrics(parameters=True, updates=True)
    )
    assert differences(bare, everything(net, opt)) == []
    ratios = stabilizer.history[-1].signals.layers.update_to_weight
    assert ratios is not None
    assert bool((ratios > 0).all())


@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
def test_a_clip_limit_that_is_reached_gives_the_bits_of_clip_grad_norm(optimizer):
    from torch.nn import functional as F

    import surefoot as sf
    from loops import batches, built

    def train(guard: bool) -> dict[str, torch.Tensor]:
        net, opt = built("mlp", optimizer)
        stabilizer = sf.TrainingStabilizer(net, opt, clip=sf.ClipByNorm(0.05)) if guard else None
        for x, y in batches(100):
            loss = F.cross_entropy(net(x), y)
            if stabilizer is not None:
                stabilizer.backward(loss)
                stabilizer.step()
                continue
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            opt.step()
        if stabilizer is not None:
            assert stabilizer.counts["clipped"] == 100
        return everything(net, opt)

    assert differences(train(False), train(True)) == []
