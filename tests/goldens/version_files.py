"""The files that surefoot writes and reads again: how small ones are made, and what they hold when they are read.

`MAKERS` writes one folder for each format with today's code. The folders of version 1 are kept in `v1/`, packed, and
are never made again. `CONTENTS` reads such a folder with today's code and describes everything in it.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tarfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import surefoot as sf
from goldens.golden import VERSION_1, as_json, described
from goldens.loops import FEATURES, Feature, Loop, seed_all
from surefoot.core.formats import STABILIZER_STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DIGITS = 4
"""Digits of a computed number that every processor agrees on."""
BEGAN = 1_760_000_000.0
SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
x = torch.arange(16.0).reshape(8, 2) / 4
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
for step in range(12):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
"""
"""A run with a learning rate that is too high."""


def unpack(archive: str, folder: Path, version: Path = VERSION_1) -> Path:
    """The folder of one format, of version 1 or as another folder of versions has it, in an empty folder."""
    with tarfile.open(version / f"{archive}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder


def newest(archive: str) -> Path:
    """The newest folder of versions that has an archive: files of the current version."""
    folders = [path.parent for path in VERSION_1.parent.glob(f"v*/{archive}.tar.xz")]
    return max(folders, key=lambda folder: int(folder.name[1:]))


def pack(folder: Path, archive: Path) -> None:
    """Everything in a folder, without owners, times and locks."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.name.startswith("."):
                continue
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                packed.addfile(entry, file)


def up_to_date(tree: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's content with the states of stabilizers in their current version."""
    own = {"stabilizer": STABILIZER_STATE.read(tree["stabilizer"], "the state")}
    also = tree.get("also") or {}
    others = {name: up_to_date(part) if "stabilizer" in part else part for name, part in also.items()}
    return {**tree, **own, **({"also": others} if others else {})}


# ---- checkpoints --------------------------------------------------------------------------------------------------


def make_checkpoint(feature: str, folder: Path) -> None:
    """A checkpoint of one feature."""
    loop = Loop(FEATURES[feature], folder)
    loop.train_and_save()


def make_checkpoints(folder: Path) -> None:
    """One for each feature."""
    for feature in FEATURES:
        make_checkpoint(feature, folder / feature)


def checkpoint_content(feature: str, folder: Path) -> dict[str, Any]:
    """All that is in a checkpoint, without the versions of the packages that wrote it."""
    loaded = sf.CheckpointManager(folder, every_steps=None).load()
    assert loaded is not None, f"no checkpoint of {feature} can be read"
    facts = {name: value for name, value in loaded.facts.items() if name not in ("surefoot", "torch")}
    return {"step": loaded.step, "facts": facts, "state": loaded.tree}


def resumed_content(feature: str, folder: Path) -> dict[str, Any]:
    """All that a new process has after it took up the run: its state, and the rows of the batches that are left."""
    seed_all(1_000)  # what is not restored comes out differently
    loop = Loop(FEATURES[feature], folder)
    batches = loop.batches()
    first = next(batches)
    return {"state": loop.state(), "rows_left": [first[1].tolist(), *(rows.tolist() for _, rows in batches)]}


def checkpoint_text(feature: str, folder: Path, digits: int | None = None) -> str:
    """What the checkpoint of a feature holds and what a run resumes with, as far as the plain one has other lines."""
    content = checkpoint_content(feature, folder)
    saved, current = described(content, digits), described({**content, "state": up_to_date(content["state"])}, digits)
    resumed = described(resumed_content(feature, folder), digits)
    return f"[checkpoint]\n{saved}\n[resumed, where it differs from the checkpoint]\n{_others(resumed, current)}"


def _others(text: str, known: str) -> str:
    there = set(known.splitlines())
    return "".join(f"{line}\n" for line in text.splitlines() if line not in there)


def checkpoint_golden(feature: str, folder: Path) -> str:
    """The text of a feature; of all but the plain one only the lines in which it differs from that."""
    text = checkpoint_text(feature, folder / feature)
    if feature == "plain":
        return text
    plain = checkpoint_text("plain", folder / "plain")
    gone = [f"- {line}\n" for line in _others(plain, text).splitlines()]
    return "".join([*gone, *(f"+ {line}\n" for line in _others(text, plain).splitlines())])


# ---- state dictionaries -------------------------------------------------------------------------------------------

STATE_FEATURE = Feature(
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
    settings={"clip": lambda: sf.AdaptiveGradientClipper(), "scaler": lambda: sf.DynamicLossScaler()},
    signals=True,
)


def make_states(folder: Path) -> None:
    """The states of a stabilizer and of a data position, as a user saves them beside the model's."""
    loop = Loop(STATE_FEATURE, folder / "unused")
    batches = loop.batches()
    for _ in range(5):
        loop.step(next(batches))
    torch.save(loop.stabilizer.state_dict(), folder / "stabilizer.pt")
    position, loader = _position()
    drawn = iter(position.follow(loader, epochs=3))
    for _ in range(5):
        next(drawn)
    torch.save(position.state_dict(), folder / "data_position.pt")
    shutil.rmtree(folder / "unused", ignore_errors=True)


def _position() -> tuple[Any, Any]:
    from surefoot.keep.position.data import DataPosition

    seed_all(0)
    return DataPosition(), FEATURES["data_position"].loader()


def states_text(folder: Path, digits: int | None = None) -> str:
    """Both states as they were saved, the stabilizer's after it was loaded, and the rows that are left."""
    saved = torch.load(folder / "stabilizer.pt", weights_only=True)
    loop = Loop(STATE_FEATURE, folder / "unused")
    loop.stabilizer.load_state_dict(saved)
    placed = torch.load(folder / "data_position.pt", weights_only=True)
    position, loader = _position()
    seed_all(1_000)
    position.load_state_dict(placed)
    left = [rows.tolist() for _, rows in position.follow(loader, epochs=3)]
    text, current = described({"stabilizer": saved}, digits), described(up_to_date({"stabilizer": saved}), digits)
    again = described({"stabilizer": loop.stabilizer.state_dict()}, digits)
    return (
        f"{text}\n[loaded, where it differs]\n{_others(again, current)}\n"
        f"{described({'data_position': placed, 'rows_left': left}, digits)}"
    )


def make_standardizer(folder: Path) -> None:
    """The file of a `Standardizer`, with a feature that is constant."""
    sf.Standardizer.fit(torch.tensor([[0.5, 1.0], [1.5, 1.0], [4.0, 1.0]])).save(folder / "standardizer.json")


def standardizer_text(folder: Path, digits: int | None = None) -> str:
    """Its statistics."""
    return described(vars(sf.Standardizer.load(folder / "standardizer.json")), digits)


# ---- the run log --------------------------------------------------------------------------------------------------


def make_run_log(folder: Path) -> None:
    """Two sessions, the second of which takes the place of the end of the first; every table and kind of row."""
    from surefoot.record.bins import COUNT
    from surefoot.record.messages import DeviceRow, Event, Histogram, LayerRows, StepRow

    for first in (0, 3):
        with sf.RunLog(folder, device_seconds=None) as log:
            for step in range(first, first + 4):
                nan = float("nan") if step == 2 else 1.0
                row = StepRow(step, BEGAN + step, "", nan, 0.5, 0.25, 0.125, 1024.0, 0.0, step == 2, {"kl": step / 4})
                log.take(row)
                norms = {"grad_norm": np.array([0.5, nan]), "update_ratio": np.array([0.25, 0.125])}
                log.take(LayerRows(step, ["weight", "bias"], norms))
            log.part("critic").take(StepRow(first, BEGAN + first, loss=2.0))
            log.take(Histogram(first, "weight", "weight", [*range(3), *[0] * (COUNT - 3)], nan=1))
            log.take(DeviceRow(BEGAN + first, "host", None, {"process_memory": 1024.0}))
            evidence = {"loss": float("nan"), "names": ["weight"]}
            log.take(Event("skip", first + 1, "left out", BEGAN, "warning", "nonfinite", "skip", "", evidence))
            log.take(Event("end", first + 3, "the run ended", BEGAN))
    for path in (folder / "telemetry").glob("session-*.jsonl"):  # which process, and when
        path.write_text(re.sub(r'"pid": \d+, "time": [\d.]+', f'"pid": 1, "time": {BEGAN}', path.read_text()))


def run_log_text(folder: Path, digits: int | None = None) -> str:
    """Every row of every table, and every event."""
    run = sf.load_run(folder)
    content: dict[str, Any] = {
        name: {column: table[column].to_pylist() for column in table.column_names}
        for name in ("scalars", "layers", "histograms", "device")
        for table in [getattr(run, name)]
    }
    content |= {"events": [vars(event) for event in run.events], "dropped": run.dropped, "problems": run.problems}
    return described(content, digits)


# ---- facts, findings and the description of a run -----------------------------------------------------------------


def make_run(folder: Path, watch: Any = None) -> None:
    """The JSON files of `surefoot run`: facts, findings, and what ran."""
    from watched import Nursery

    nursery = watch or Nursery()
    watched = nursery(SCRIPT)
    assert watched.exit_code == 0, watched.errors
    for name in ("run.json", "facts.json", "findings.json"):
        shutil.copy(watched.folder / "run" / name, folder / name)
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    run |= {"started": "2026-01-02T03:04:05+0000", "seconds": 0.5}
    (folder / "run.json").write_text(json.dumps(run, separators=(",", ":")), encoding="utf-8")
    if watch is None:
        nursery.close()


def run_text(folder: Path) -> str:
    """The diagnosis that today's rules make of the recorded facts."""
    said, argv = io.StringIO(), sys.argv
    sys.argv = ["surefoot", "diagnose", str(folder), "--json"]
    try:
        from surefoot.__main__ import main

        with redirect_stdout(said):
            main()
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"surefoot diagnose ended with {end.code}") from None
    finally:
        sys.argv = argv
    return as_json(json.loads(said.getvalue()))


def facts_text(folder: Path, digits: int) -> str:
    """The facts and the findings of a run, leaf by leaf, and its description without versions."""
    files = {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("facts", "findings")}
    for step in files["facts"]["sampled_steps"]:
        step.pop("host_seconds", None)  # how long it took
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in run.items() if name not in ("python", "torch", "platform")}
    return described({**files, "run": kept}, digits)


# ---- an incident --------------------------------------------------------------------------------------------------


def make_incident(folder: Path) -> None:
    """The step of a batch with NaN, kept by a stabilizer."""
    feature = Feature(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        loader=FEATURES["skipped"].loader,
        settings={"incidents": lambda: folder},
    )
    loop = Loop(feature, folder / "unused")
    batches = loop.batches()
    for _ in range(3):
        loop.step(next(batches))
    shutil.rmtree(folder / "unused", ignore_errors=True)
    (place,) = (folder / "incidents").glob("0*")
    facts = json.loads((place / "incident.json").read_text(encoding="utf-8"))
    name = Path(facts["script"]["path"] or facts["script"]["module"] or "no script").name  # a worker of xdist has none
    facts["hardware"] |= {"cpu": "a processor", "cpu_count": 2}
    facts["script"] = {"path": "train.py", "module": None, "arguments": [], "redacted": False}
    (place / "incident.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    page = (place / "summary.md").read_text(encoding="utf-8")
    (place / "summary.md").write_text(re.sub(rf"^- `.*{re.escape(name)}.*`$", "- `train.py`", page, flags=re.MULTILINE))


def incident_text(folder: Path, digits: int | None = None) -> str:
    """What happened, and the whole state before it, without what tells of the machine."""
    from surefoot.record.incidents.reading import read_incident

    (place,) = (folder / "incidents").glob("0*")
    incident = read_incident(place)
    elsewhere = ("versions", "hardware", "switches", "script", "time", "when")
    facts = {name: value for name, value in incident.facts.items() if name not in elsewhere}
    return described({"facts": facts, "state": incident.state}, digits)


# ---- all of them --------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Path], None]] = {
    "checkpoints": make_checkpoints,
    "states": make_states,
    "standardizer": make_standardizer,
    "run_log": make_run_log,
    "run": make_run,
    "incident": make_incident,
}
"""What writes the folder of one format, by the name of its archive in `v1/`."""

CONTENTS: dict[str, Callable[[Path], str]] = {
    "states": states_text,
    "standardizer": standardizer_text,
    "run_log": run_log_text,
    "run": run_text,
    "incident": incident_text,
}
"""What describes such a folder, read by today's code. Checkpoints have a text for each feature."""


def version_1_texts() -> Iterator[tuple[str, Callable[[Path], str]]]:
    """The texts about the files of version 1: their name, and what makes them in an empty folder."""
    for feature in FEATURES:
        yield f"v1/checkpoints/{feature}.txt", lambda scratch, feature=feature: _checkpoint_of_1(feature, scratch)
    for name, text in CONTENTS.items():
        yield f"v1/{name}.txt", lambda scratch, name=name, text=text: text(unpack(name, scratch))


def _checkpoint_of_1(feature: str, scratch: Path) -> str:
    return checkpoint_golden(feature, unpack("checkpoints", scratch))
