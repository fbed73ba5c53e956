"""The frameworks on a GPU: healthy runs bitwise in fp32, bf16 and fp16, overflows counted, a NaN batch left out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainers.small_training import LR, AfterSteps, Classifier, Overflowing, Rows, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
NAN = float("nan")


def _transformers(folder: Any, guarded: bool, precision: str, fused: bool, faults: Any, model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        from surefoot.trainers.transformers import StabilizerCallback
        from trainers import transformers_classes

    copies, callback = transformers_classes.Copies(), StabilizerCallback(folder / "run")
    optim = "adamw_torch_fused" if fused else "adamw_torch"
    more = {} if precision == "fp32" else {precision: True}
    settings = {
        "use_cpu": False,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "max_grad_norm": 0.5,
        "optim": optim,
    }
    chosen = [callback] if guarded else []
    transformers_classes.train(folder, copies, *chosen, model=model, faults=faults, **settings, **more)
    return copies.states, callback.training.attachments[0] if guarded else None


def _lightning(folder: Any, guarded: bool, precision: str, fused: bool, faults: Any, model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning")
        from surefoot.trainers.lightning import StabilizerCallback
        from trainers import lightning_classes

    copies, callback = lightning_classes.Copies(), StabilizerCallback(folder / "run")
    named = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision]
    clip = None if fused and precision != "fp32" else 0.5  # Lightning refuses it for a fused optimizer with AMP
    settings = {"accelerator": "gpu", "devices": 1, "precision": named, "accumulate_grad_batches": 2}
    chosen = [callback] if guarded else []
    module = lightning_classes.Module(model, fused=fused)
    lightning_classes.train(folder, *chosen, copies, module=module, faults=faults, gradient_clip_val=clip, **settings)
    return copies.states, callback.training.attachments[0] if guarded else None


def _accelerate(folder: Any, guarded: bool, precision: str, fused: bool, faults: Any, model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("accelerate")
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        from surefoot.trainers import accelerate as adapter

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="no" if precision == "fp32" else precision)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused or None)
    loader = DataLoader(Rows(320, faults), batch_size=8)
    prepare = (lambda *things: adapter.prepare(accelerator, *things)) if guarded else accelerator.prepare
    copies = AfterSteps(model)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            copies(optimizer)
    guard = adapter.training_of(accelerator).attachments[0] if guarded else None
    return copies.states, guard


FRAMEWORKS = {"transformers": _transformers, "lightning": _lightning, "accelerate": _accelerate}


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_healthy_run_is_bitwise_the_bare_run(tmp_path, framework, precision, fused):
    train = FRAMEWORKS[framework]
    bare, _ = train(tmp_path, False, precision, fused, None, Classifier())
    guarded, guard = train(tmp_path, True, precision, fused, None, Classifier())
    assert len(bare) == len(guarded) == 20
    assert same(bare, guarded)
    assert guard.counts["steps"] == 20
    assert guard.counts["skipped"] == guard.counts["overflows"]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_fp16_overflow_stays_the_scalers_decision_and_is_counted(tmp_path, framework, fused):
    train = FRAMEWORKS[framework]
    bare, _ = train(tmp_path, False, "fp16", fused, None, Overflowing())
    guarded, guard = train(tmp_path, True, "fp16", fused, None, Overflowing())
    assert same(bare, guarded)
    assert guard.counts["steps"] == 20
    assert guard.counts["skipped"] == guard.counts["overflows"] >= 2


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_nan_batch_is_left_out_bitwise(tmp_path, framework, precision, fused):
    states, guard = FRAMEWORKS[framework](tmp_path, True, precision, fused, {16 * 11 + 3: NAN}, Classifier())
    assert same(states[10], states[11])
    assert not same(states[11], states[12])
    assert guard.history[11].skipped
    assert guard.history[11].reasons == ("nonfinite",)
    assert guard.counts["steps"] == 20
