"""`attach(..., incidents=...)` keeps refused steps of any loop, holds nothing alive, and the script can replay them."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from captured import RefuseAt, copied, incidents_in, loader
from surefoot.core.random_state import read_streams
from surefoot.guard import loop_capture
from surefoot.record.incidents.reading import read_incident
from surefoot.record.incidents.values import decode
from surefoot.replay.processes import Order, run_pass

F = nn.functional


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 5))


def refusing(step: Any) -> sf.StabilityChecker:
    return sf.StabilityChecker(nonfinite=RefuseAt(step), explosion=None, spike=None)


def train(model: nn.Module, optimizer: Any, accumulate: int = 1, each: Any = None, steps: int = 6) -> None:
    for i, (x, y) in enumerate(loader(steps, accumulate)):
        if each is not None:
            each(i)
        (F.cross_entropy(model(x), y) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def only_incident(folder: Any) -> Any:
    (found,) = incidents_in(folder)
    return read_incident(found)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=["plain", "fused"])
def test_the_state_before_a_refused_step_is_kept(tmp_path, accumulate, settings):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, **settings)
    attachment = sf.attach(model, optimizer, incidents=tmp_path, checker=refusing(4))
    before: dict[str, Any] = {}

    def look(draw: int) -> None:
        if draw == 4 * accumulate:
            before.update(model=copied(model.state_dict()), optimizer=copied(optimizer.state_dict()))
            before["streams"] = read_streams()

    train(model, optimizer, accumulate, look)
    assert attachment.counts["skipped"] == 1
    found = only_incident(tmp_path)
    assert found.facts["exact"], found.facts["inexact"]
    assert (found.facts["step"], found.facts["kind"], found.facts["action"]) == (4, "refused-here", "skip")
    assert (found.facts["configuration"]["loop"], found.facts["configuration"]["ended"]) == ("bare", "step")
    kept = found.state["models"][0]
    assert kept.keys() == before["model"].keys()
    assert all(torch.equal(kept[name], before["model"][name]) for name in kept)
    assert found.state["optimizer"]["state"][0]["step"] == before["optimizer"]["state"][0]["step"]
    assert torch.equal(found.state["optimizer"]["state"][0]["exp_avg"], before["optimizer"]["state"][0]["exp_avg"])
    microbatches = found.state["window"]["microbatches"]
    assert [len(each["drawn"]) for each in microbatches] == [1] * accumulate
    assert torch.equal(microbatches[0]["streams"]["torch"], before["streams"]["torch"])
    assert [len(each) for each in found.facts["fingerprints"]["losses"]] == [1] * accumulate
    assert "by `--guard`" not in (found.folder / "summary.md").read_text()


def test_a_run_with_incidents_is_bitwise_the_bare_run(tmp_path):
    def run(folder: Any) -> tuple[Any, Any]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if folder is not None:
            sf.attach(model, optimizer, incidents=folder)
        train(model, optimizer)
        return model.state_dict(), torch.get_rng_state()

    bare, guarded = run(None), run(tmp_path)
    assert all(torch.equal(bare[0][name], guarded[0][name]) for name in bare[0])
    assert torch.equal(bare[1], guarded[1])
    assert not incidents_in(tmp_path)


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import surefoot as sf

torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.rand(64) + 0.5
x[40, 3] = float("inf")
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
attachment = sf.attach(model, optimizer, clip=sf.ClipByNorm(1.0), incidents="run", log="run")
for epoch in range(2):
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        for part in (0, 1):
            rate = model(a[part::2] + 0.1 * torch.randn_like(a[part::2])).squeeze(1)
            ((rate - b[part::2]).square().mean() / 2).backward()
        optimizer.step()
attachment.detach()
"""


def test_the_script_can_run_the_step_again_bit_for_bit(tmp_path, monkeypatch, starts_forks):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
    first, *_ = incidents_in(tmp_path / "run")
    facts = read_incident(first).facts
    assert facts["exact"], facts["inexact"]
    kept = incidents_in(tmp_path / "run")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = run_pass(Order(first, script=str(tmp_path / "train.py")), scratch, 1, locate=False)
    for kind in ("losses", "gradients"):
        assert found.prints[kind] == facts["fingerprints"][kind], kind
    assert incidents_in(tmp_path / "run") == kept


def test_nothing_is_kept_alive_and_no_hook_stays(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    attachment = sf.attach(model, optimizer, incidents=tmp_path, checker=refusing(2))
    train(model, optimizer)
    assert len(incidents_in(tmp_path)) == 1
    alive = [weakref.ref(thing) for thing in (model, optimizer, *model.parameters())]
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert not model._forward_pre_hooks
        del model
        assert [each() for each in alive if each() is not None] == [], "freed at once, without the collector"
    finally:
        gc.enable()
    assert not loop_capture._CAPTURES
    assert attachment.counts["skipped"] == 1


def test_detach_ends_the_capture(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attachment = sf.attach(model, optimizer, incidents=tmp_path)
    model(torch.ones(2, 16)).sum().backward()
    attachment.detach()
    assert not model._forward_pre_hooks
    assert not loop_capture._CAPTURES
    model(torch.full((2, 16), math.nan)).sum().backward()
    optimizer.step()
    assert not incidents_in(tmp_path)


def test_no_batch_outlives_the_step(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sf.attach(model, optimizer, incidents=tmp_path)
    batches: list[weakref.ref[Any]] = []
    for (x,) in DataLoader(TensorDataset(torch.randn(12, 16)), batch_size=4):
        batches.append(weakref.ref(x.untyped_storage()))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del x
    assert [each() for each in batches[:-1]] == [None, None]


@pytest.mark.parametrize("kind", ["adam", "lbfgs"])
def test_a_closure_is_replayed_from_its_backward(tmp_path, kind):
    model = net()
    make = {"adam": torch.optim.Adam, "lbfgs": torch.optim.LBFGS}[kind]
    optimizer = make(model.parameters(), lr=0.01)
    sf.attach(model, optimizer, incidents=tmp_path, checker=refusing(2))
    for x, y in loader(4, 1):

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    found = only_incident(tmp_path)
    assert found.facts["configuration"]["ended"] == "backward"
    assert "evaluates the loss itself" in found.facts["inexact"][0]
    assert len(found.state["window"]["microbatches"]) == 1


def test_gradients_from_before_the_step_make_it_inexact(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sf.attach(model, optimizer, incidents=tmp_path, checker=refusing(1))
    for x, y in loader(2, 1):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert only_incident(tmp_path).facts["inexact"] == [loop_capture.HAD_GRADIENTS]


def test_a_batch_after_another_optimizers_step_begins_the_step_anew(tmp_path):
    first, second = nn.Linear(16, 16), nn.Linear(16, 5)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (first, second))
    sf.attach([first, second], one, incidents=tmp_path, checker=refusing(1))
    for x, y in loader(3, 1):
        one.zero_grad()
        F.cross_entropy(second(first(x)), y).backward()
        one.step()
        two.zero_grad()
        F.cross_entropy(second(first(x).detach()), y).backward()
        two.step()
    found = only_incident(tmp_path)
    assert found.facts["exact"], found.facts["inexact"]
    assert [len(each["drawn"]) for each in found.state["window"]["microbatches"]] == [1]


def test_a_step_after_another_optimizers_and_parameters_of_others_are_not_exact(tmp_path):
    first, second = nn.Linear(16, 16), nn.Linear(16, 5)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (first, second))
    sf.attach(second, two, incidents=tmp_path, checker=refusing(1))
    for x, y in loader(3, 1):
        one.zero_grad()
        two.zero_grad()
        F.cross_entropy(second(first(x)), y).backward()
        one.step()
        two.step()
    inexact = only_incident(tmp_path).facts["inexact"]
    assert any("another optimizer stepped" in each for each in inexact)
    assert loop_capture.TRAINS_OTHERS in inexact


def nothing(optimizer: Any, args: Any, kwargs: Any, verbose: bool = False) -> None:
    """A step hook."""


@pytest.mark.parametrize("hook", [nothing, partial(nothing, verbose=True)], ids=["function", "partial"])
def test_other_step_hooks_of_the_optimizer_make_it_inexact(tmp_path, hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sf.attach(model, optimizer, incidents=tmp_path, checker=refusing(1))
    optimizer.register_step_pre_hook(hook)
    train(model, optimizer)
    assert only_incident(tmp_path).facts["inexact"] == [loop_capture.HAS_HOOKS]


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_grad_scaler_is_kept(tmp_path, fused):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    sf.attach(model, optimizer, incidents=tmp_path, checker=refusing(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for x, y in loader(3, 1):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert only_incident(tmp_path).facts["configuration"]["loss_scale"] == 256.0


def test_a_step_whose_numbers_come_later_is_kept_and_says_so(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    with sf.attach(model, optimizer, incidents=tmp_path, checker=refusing(2), decide_on="device", lag_steps=2):
        train(model, optimizer)
    found = only_incident(tmp_path)
    assert (found.facts["step"], found.facts["applied_since"]) == (2, 2)
    assert decode(found.state["window"]["microbatches"][0]["drawn"][0])[0].shape == (6, 16)


def test_wrong_use_says_what_to_do(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(sf.SettingError, match="mode='guard'"):
        sf.attach(model, optimizer, mode="watch", incidents=tmp_path)
    with pytest.raises(sf.SettingError, match="pass the model"):
        sf.attach(None, optimizer, incidents=tmp_path)
    with pytest.raises(sf.SettingError, match="folder or an IncidentKeeper; got int"):
        sf.attach(model, optimizer, incidents=3)  # type: ignore[arg-type]
