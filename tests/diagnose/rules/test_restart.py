"""Restarts and seeds, from recorded facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from recorded import falling, optimizer, parameter, run
from surefoot.diagnose.rules import restart
from watched import CLASSES

if TYPE_CHECKING:
    from watched import Nursery

LOADED = "train.py:40"


def events(*after: str, holds: tuple[str, ...] = ("model", "optimizer"), step: int = 60) -> list[dict[str, Any]]:
    read = {"event": "file-loaded", "step": step, "backward": step, "site": LOADED, "holds": list(holds)}
    return [
        {"event": "saved", "step": step, "site": "train.py:39", "holds": list(holds)},
        read,
        *({"event": name, "step": step, "site": LOADED} for name in ("model-loaded", *after)),
    ]


def twice(happened: list[dict[str, Any]], second_rate: float = 0.01, **facts: Any) -> Any:
    optimizers = [
        optimizer(falling(60), 0),
        optimizer(falling(60), 1, created_at_step=60, settings=[{"lr": second_rate}]),
    ]
    parameters = [parameter(0, "model", (0,)), parameter(1, "model#1", (1,)) | {"loaded": True}]
    return run(falling(60), optimizers=optimizers, parameters=parameters, events=happened, **facts)


def test_a_saved_optimizer_that_is_never_loaded_is_missing() -> None:
    claim = restart.state_missing(twice(events()))
    assert claim is not None
    assert claim.evidence["not_loaded"] == ["optimizer"]
    assert claim.where[0] == LOADED


def test_a_full_restart_is_fine() -> None:
    assert restart.state_missing(twice(events("optimizer-loaded"))) is None


def test_a_schedule_that_continues_after_the_restart_is_fine_and_one_that_begins_again_is_not() -> None:
    for rate, begins_anew in ((0.004, False), (0.01, True)):
        held = twice(events("optimizer-loaded"), schedulers=[{"type": "ExponentialLR"}])
        held.optimizers[0].series.lr[:] = [0.01] * 30 + [0.007] * 30
        held.optimizers[1].series.lr[:] = [rate] * 60
        assert (restart.state_missing(held) is not None) == begins_anew


def test_a_checkpoint_of_the_model_alone_loses_the_moments() -> None:
    assert restart.state_missing(twice(events(holds=("model", "progress")))) is not None


def test_fine_tuning_with_other_settings_is_no_restart() -> None:
    assert restart.state_missing(twice(events(holds=("model",)), second_rate=0.001)) is None


def test_reading_the_best_weights_at_the_end_is_no_restart() -> None:
    held = run(falling(60), events=events(holds=("model",), step=60))
    assert restart.state_missing(held) is None


def noted(prints: list[int]) -> dict[str, Any]:
    return {"notes": [{"step": i, "backward": i + 1, "line": 0, "x": p, "y": p} for i, p in enumerate(prints)]}


def test_batches_of_an_epoch_that_had_not_ended_are_replayed() -> None:
    seen = [*range(60), *range(100)]
    claim = restart.data_replayed(twice(events("optimizer-loaded"), stream=noted(seen)))
    assert claim is not None
    assert claim.evidence["replayed"] == 60


def test_one_more_epoch_in_a_fixed_order_is_no_replay() -> None:
    seen = [*range(20)] * 6
    assert restart.data_replayed(twice(events("optimizer-loaded"), stream=noted(seen))) is None
    once = [*range(60), *range(60), *range(60)]
    assert restart.data_replayed(twice(events("optimizer-loaded"), stream=noted(once))) is None


def test_a_restart_that_continues_where_it_stopped_is_fine() -> None:
    assert restart.data_replayed(twice(events("optimizer-loaded"), stream=noted([*range(120)]))) is None


def test_a_run_without_a_seed_is_remarked_on() -> None:
    claim = restart.unseeded(run(seeds={"numpy": [0]}))
    assert claim is not None
    assert claim.severity == "info"
    assert restart.unseeded(run(seeds={"torch": [0]})) is None


# ---- the gradient scaler, and moments of another step ---------------------------------------------------------------

SCALED = {"enabled": True, "attempts": 130, "skip_steps": [61, 63], "trace": [1.0]}


def test_a_saved_scaler_that_is_never_loaded_is_missing() -> None:
    held = ("model", "optimizer", "scaler")
    claim = restart.state_missing(twice(events("optimizer-loaded", holds=held), scaler=SCALED))
    assert claim is not None
    assert (claim.severity, claim.evidence["not_loaded"]) == ("warning", ["scaler"])
    assert "the loss scale starts again" in claim.summary
    loaded = events("optimizer-loaded", "scaler-loaded", holds=held)
    assert restart.state_missing(twice(loaded, scaler=SCALED)) is None
    assert restart.state_missing(twice(events("optimizer-loaded", holds=held))) is None  # no scaler is in use
    went_on = events("optimizer-loaded", holds=held)
    went_on[1]["scaler_attempts"] = 60
    assert restart.state_missing(twice(went_on, scaler=SCALED | {"made_at": [0]})) is None  # it keeps its scale
    assert restart.state_missing(twice(went_on, scaler=SCALED | {"made_at": [0, 60]})) is not None


def test_a_scaler_that_was_not_saved_matters_if_steps_are_skipped_for_it() -> None:
    happened = events("optimizer-loaded", holds=("model", "optimizer", "progress"))
    happened[1]["scaler_attempts"] = 60
    claim = restart.state_missing(twice(happened, scaler=SCALED))
    assert claim is not None
    assert (claim.severity, claim.evidence["skipped"]) == ("warning", 2)
    assert restart.state_missing(twice(happened, scaler=SCALED | {"skip_steps": [5]})) is None


TWO_FILES = """
import os, tempfile
os.chdir(tempfile.mkdtemp())
def made():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)

def train(model, optimizer, steps):
    for step in steps:
        rows = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if step in (20, 120):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{step}.pt")

model, optimizer = made()
train(model, optimizer, range(1, 121))
model, optimizer = made()
first, second = torch.load("120.pt"), torch.load("FILE.pt")
model.load_state_dict(first["model"])
optimizer.load_state_dict(second["optimizer"])
train(model, optimizer, range(121, 160))
"""


def test_moments_of_an_earlier_file_do_not_belong_to_later_weights(watch) -> None:  # type: ignore[no-untyped-def]
    run = watch(CLASSES, TWO_FILES.replace("FILE", "20"))
    assert run.causes == ["optim.stale-state"]
    found = run.finding("optim.stale-state")
    assert "are of step 120" in found.summary
    assert (found.evidence["step_of_weights"], found.evidence["step_of_moments"]) == (120, 20)
    assert watch(CLASSES, TWO_FILES.replace("FILE", "120")).causes == []


def test_files_of_an_earlier_process_are_compared_by_the_age_of_their_moments(watch) -> None:  # type: ignore[no-untyped-def]
    unknown = "import io; kept = io.BytesIO(); torch.save(state, kept); open(f'{step}.pt', 'wb').write(kept.getvalue())"
    script = TWO_FILES.replace('torch.save(state, f"{step}.pt")', unknown)
    found = watch(CLASSES, script.replace("FILE", "20")).finding("optim.stale-state")
    assert (found.evidence["step_of_weights"], found.evidence["step_of_moments"]) == (120, 20)
    assert watch(CLASSES, script.replace("FILE", "120")).causes == []


def test_another_model_from_another_file_is_no_restart_with_old_moments() -> None:
    happened = events("optimizer-loaded")
    happened[1] |= {"saved_at_step": 120}
    happened[2] |= {"file": 0}
    happened[3] |= {"file": 0, "optimizer": 1, "age": 60.0}
    other = {
        "event": "file-loaded",
        "step": 60,
        "backward": 60,
        "site": LOADED,
        "holds": ["model"],
        "saved_at_step": 20,
    }
    average = {"event": "model-loaded", "step": 60, "site": LOADED, "file": 1}
    assert restart.moments_of_another_step(twice([*happened, other, average])) is None
    happened[2] |= {"file": 1}
    claim = restart.moments_of_another_step(twice([happened[0], happened[1], other, *happened[2:]]))
    assert claim is not None
    assert claim.evidence == {"step_of_weights": 20, "step_of_moments": 120}


SCALER = """
import os, tempfile
os.chdir(tempfile.mkdtemp())
def made():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=4.0)

def train(model, optimizer, scaler, steps):
    for step in range(steps):
        rows = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x[rows]), y[rows])).backward()
        scaler.step(optimizer)
        scaler.update()

names = "model optimizer scaler".split()
run = made()
train(*run, 60)
torch.save(dict(zip(names, [part.state_dict() for part in run])) | {"step": 60}, "run.pt")
run = made()
state = torch.load("run.pt")
for name, part in zip(names[:COUNT], run):
    part.load_state_dict(state[name])
train(*run, 60)
"""


def test_a_restart_without_the_state_of_the_scaler_is_named(watch) -> None:  # type: ignore[no-untyped-def]
    found = watch(CLASSES, SCALER.replace("COUNT", "2")).names_first(
        "resume.state-missing", step=60, at="|torch.load", evidence={"not_loaded"}
    )
    assert found.evidence["not_loaded"] == ["scaler"]
    assert watch(CLASSES, SCALER.replace("COUNT", "3")).causes == []


REMADE = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
for step in range(40):
    if step % EVERY == 0:
        RESET
        optimizer = MAKE
    rows = torch.randint(0, len(x), (16,))
    optimizer.zero_grad()
    F.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
"""


AGAIN = """first = globals().get("first") or [each.detach().clone() for each in model.parameters()]
        for each, value in zip(model.parameters(), first): each.data.copy_(value)"""


def remade_by(make: str, every: int = 4, reset: str = "pass") -> str:
    return REMADE.replace("MAKE", make).replace("EVERY", str(every)).replace("RESET", reset)


def test_an_optimizer_that_is_created_in_the_loop_is_named(watch) -> None:  # type: ignore[no-untyped-def]
    run = watch(CLASSES, remade_by("torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)"))
    found = run.names_first(
        "optim.stale-state", step=4, at="|optimizer = ", evidence={"optimizers", "steps_each", "parameters"}
    )
    assert (found.evidence["optimizers"], found.evidence["steps_each"]) == (10, 4)
    assert found.fixes[0] == "Create the optimizer once, before the loop."


@pytest.mark.parametrize(
    "script",
    [
        remade_by("torch.optim.SGD(model.parameters(), lr=0.01)"),  # keeps nothing
        remade_by("torch.optim.AdamW(model.parameters(), lr=0.01)", every=20),
        remade_by("torch.optim.AdamW(model.parameters(), lr=0.01)", reset="model.load_state_dict(model.state_dict())"),
        remade_by("torch.optim.AdamW(model.parameters(), lr=0.01)", reset="model = nn.Linear(8, 3)"),
        remade_by("torch.optim.AdamW(model.parameters(), lr=0.1)", reset=AGAIN, every=5),
    ],
    ids=["no moments", "seldom", "loaded each time", "another model each time", "the same beginning each time"],
)
def test_new_optimizers_that_lose_nothing_are_fine(watch, script: str) -> None:  # type: ignore[no-untyped-def]
    assert "optim.stale-state" not in watch(CLASSES, script).causes


PRETRAINED = """
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(200, 6), torch.randint(2, (200,))
y[x[:, 0] > 0] = 1
base = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
torch.save({PREFIX + name: value for name, value in base.state_dict().items()}, "base.pt")
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
model.load_state_dict(torch.load("base.pt"), strict=False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    rows = torch.randint(200, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
"""


def test_a_state_of_which_nothing_was_loaded_is_named(watch: Nursery) -> None:
    run = watch(PRETRAINED.replace("PREFIX", "'module.'"))
    first = run.names_first("resume.state-missing", step=0, at="|strict=False", evidence={"given", "expected"})
    assert "removeprefix('module.')" in first.fixes[0]


def test_a_state_that_was_loaded_without_strictness_is_fine(watch: Nursery) -> None:
    assert "resume.state-missing" not in watch(PRETRAINED.replace("PREFIX", "''")).causes


def test_a_state_of_buffers_alone_was_loaded(watch: Nursery) -> None:
    made = "model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))\n"
    with_buffer = PRETRAINED.replace(made, made + "model.register_buffer('scale', torch.ones(6))\n")
    script = with_buffer.replace('torch.load("base.pt")', '{"scale": x.std(0)}')
    assert "resume.state-missing" not in watch(script).causes
