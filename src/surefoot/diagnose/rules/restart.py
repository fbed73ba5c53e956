"""Restarts that forget part of the state or go over old batches, and runs nobody can repeat."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.data_summary import stream, where_of
from surefoot.diagnose.engine import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun


def restarts(run: RecordedRun) -> list[dict[str, Any]]:
    """Where a checkpoint was read from a file and put into a model that was then trained on.

    Each has the events from reading the file up to the next training step, and the optimizers that trained after it.
    """
    events = run.facts.get("events", [])
    found: list[dict[str, Any]] = []
    for position, event in enumerate(events):
        if event["event"] != "file-loaded":
            continue
        near = [e for e in events[position:] if e["step"] - event["step"] <= 1]
        if not any(e["event"] == "model-loaded" for e in near):
            continue
        after = [o for o in run.optimizers if _trains_after(o, run, position)]
        if after:
            found.append({"file": event, "events": near, "optimizers": after, "position": position})
    return found


def _trains_after(optimizer: dict[str, Any], run: RecordedRun, position: int) -> bool:
    """Whether an optimizer was made around, or stepped after, the loading of a file."""
    loaded = run.facts["events"][position]["step"]
    return bool(optimizer["born_at"] >= loaded - 1 or optimizer["born_at"] + optimizer["steps"] > loaded + 5)


def has_memory(optimizer: dict[str, Any]) -> bool:
    """Whether an optimizer keeps moments, so that starting over loses something."""
    settings = optimizer["settings"][0] if optimizer["settings"] else {}
    if optimizer["type"] == "SGD":
        return bool(settings.get("momentum"))
    return True


def state_missing(run: RecordedRun) -> Claim | None:
    """The parameters continue, something else that was there before starts over."""
    for restart in reversed(restarts(run)):
        file, events = restart["file"], restart["events"]
        holds, names = file.get("holds", []), {event["event"] for event in events}
        later = [o for o in restart["optimizers"] if has_memory(o)]
        saved = [e for e in run.facts["events"][: restart["position"]] if e["event"] == "saved"]
        forgotten = []
        if "optimizer" in holds and "optimizer-loaded" not in names and later:
            forgotten.append("optimizer")
        if "scheduler" in holds and "scheduler-loaded" not in names and run.facts.get("schedulers"):
            forgotten.append("scheduler")
        if forgotten:
            return _claim_forgotten(run, restart, forgotten)
        before = _before(run, restart)
        resumed = "progress" in holds or before is not None
        if resumed and "optimizer-loaded" not in names and later and "optimizer" not in holds:
            return _claim_unsaved(run, restart, before, saved)
        kept = "scheduler-loaded" in names
        if (
            before is not None
            and "optimizer-loaded" in names
            and not kept
            and (jump := _rate_jump(run, before, restart))
        ):
            return _claim_rate(restart, jump)
    return None


def _before(run: RecordedRun, restart: dict[str, Any]) -> dict[str, Any] | None:
    """The optimizer of the same kind, settings and job that worked before the restart, in this very process."""
    new = restart["optimizers"][-1]
    shapes = _shapes(run, new["number"])
    for old in run.optimizers:
        if old["number"] >= new["number"] or old["type"] != new["type"] or old["steps"] < 5:
            continue
        if _shapes(run, old["number"]) == shapes and _first_rate(old) == _first_rate(new):
            return old
    return None


def _shapes(run: RecordedRun, optimizer: int) -> list[list[int]]:
    return sorted(p["shape"] for p in run.parameters.values() if optimizer in p["optimizers"])


def _first_rate(optimizer: dict[str, Any]) -> Any:
    settings = optimizer["settings"][0] if optimizer["settings"] else {}
    return settings.get("initial_lr", settings.get("lr"))


def _losses(run: RecordedRun, optimizer: dict[str, Any]) -> list[float]:
    return run.curve_of(optimizer).finite


def _jump(run: RecordedRun, restart: dict[str, Any]) -> dict[str, Any]:
    """Loss and learning rate on both sides of the restart, if both are in this run."""
    new, old = restart["optimizers"][-1], _before(run, restart)
    if old is None:
        return {}
    before, after = _losses(run, old)[-10:], _losses(run, new)[:10]
    found: dict[str, Any] = {}
    if before and after:
        found = {"loss_before": median(before), "loss_after": median(after), "highest_after": max(after)}
    rates = _rate_jump(run, old, restart)
    return found | ({"lr_before": rates[0], "lr_after": rates[1]} if rates else {})


def _rate_jump(run: RecordedRun, old: dict[str, Any], restart: dict[str, Any]) -> tuple[float, float] | None:
    new = restart["optimizers"][-1]
    before = [v for v in run.column("lr", old) if v is not None]
    after = [v for v in run.column("lr", new) if v is not None]
    if not before or not after or not run.facts.get("schedulers"):
        return None
    moved = before[-1] > 0 and abs(math.log(max(after[0], 1e-300) / before[-1])) > math.log(1.3)
    began_anew = math.isclose(after[0], before[0], rel_tol=0.02)  # a schedule that went on is not where it began
    return (before[-1], after[0]) if moved and began_anew else None


def _told(jump: dict[str, Any]) -> str:
    parts = []
    if jump.get("lr_before") is not None:
        parts.append(f"the learning rate jumps from {jump['lr_before']:.3g} to {jump['lr_after']:.3g}")
    if jump.get("loss_before") is not None:
        parts.append(f"the loss goes from {jump['loss_before']:.3g} to {jump['highest_after']:.3g} at its highest")
    return "; " + " and ".join(parts) if parts else ""


def _claim_forgotten(run: RecordedRun, restart: dict[str, Any], forgotten: list[str]) -> Claim:
    file, jump = restart["file"], _jump(run, restart)
    kind = restart["optimizers"][-1]["type"]
    lost = " and ".join({"optimizer": f"the moments of {kind}", "scheduler": "the schedule"}[f] for f in forgotten)
    return Claim(
        0.95,
        f"The checkpoint read at {file['site']} holds {', '.join(file['holds'])}, but its {' and '.join(forgotten)} "
        f"state is never loaded: the parameters continue, {lost} start{'s' * (forgotten == ['scheduler'])} over"
        f"{_told(jump)}.",
        step=file["step"],
        where=where_of(file["site"], restart["optimizers"][-1]["site"]),
        evidence={"holds": file["holds"], "not_loaded": forgotten} | jump,
        fixes=tuple(f"Call `{name}.load_state_dict(...)` right after the model's." for name in forgotten),
    )


def _claim_unsaved(
    run: RecordedRun, restart: dict[str, Any], before: dict[str, Any] | None, saved: list[dict[str, Any]]
) -> Claim:
    file, jump, new = restart["file"], _jump(run, restart), restart["optimizers"][-1]
    again = f", which had made {before['steps']} steps," if before is not None else ""
    at = f" (saved at {saved[-1]['site']})" if saved else ""
    return Claim(
        0.88 if before is not None else 0.7,
        f"The checkpoint read at {file['site']}{at} holds the model but no optimizer state: the parameters continue, "
        f"and {new['type']}{again} starts with empty moments at step {file['step']}{_told(jump)}.",
        step=file["step"],
        where=where_of(file["site"], saved[-1]["site"] if saved else None),
        evidence={"holds": file.get("holds", []), "optimizer": new["type"]} | jump,
        severity="error" if before is not None else "warning",
        fixes=("Save `optimizer.state_dict()` (and the scheduler's and scaler's) beside the model's, and load them.",),
    )


def _claim_rate(restart: dict[str, Any], jump: tuple[float, float]) -> Claim:
    file = restart["file"]
    return Claim(
        0.8,
        f"After the checkpoint was read at {file['site']} the learning rate is {jump[1]:.3g}, where it had been "
        f"{jump[0]:.3g}: the schedule starts over while parameters and moments continue.",
        step=file["step"],
        where=where_of(file["site"]),
        evidence={"lr_before": jump[0], "lr_after": jump[1]},
    )


def data_replayed(run: RecordedRun) -> Claim | None:
    """After a restart in the middle of an epoch, the batches of that epoch come from its beginning again."""
    for restart in restarts(run):
        at = restart["file"]["step"]
        if at < 2:
            continue
        notes = stream(run)
        prints = [hash((note.get("x"), note.get("y"))) for note in notes]
        split = next((i for i, note in enumerate(notes) if note["backward"] > restart["file"]["backward"]), None)
        if not split:
            continue
        before, after = prints[:split], prints[split:]
        replay = _replayed(before, after)
        if replay is None:
            continue
        if not _in_mid_epoch(run, restart, before, after, replay):
            continue
        start, length = replay
        return Claim(
            0.9,
            f"After the restart at step {at} ({restart['file']['site']}) the first {length} batches are those of steps "
            f"{start} to {start + length - 1}, in the same order: the epoch had not ended there, and its beginning is "
            "trained on twice.",
            step=at,
            where=where_of(restart["file"]["site"]),
            evidence={"replayed": length, "first_seen_at": start, "restart": at},
        )
    return None


def _replayed(before: list[Any], after: list[Any]) -> tuple[int, int] | None:
    """Where the batches after the restart had been seen before it, and for how long they follow the old order."""
    places = [i for i, print_ in enumerate(before) if print_ == after[0]]
    best = None
    for start in places:
        length = 0
        while length < len(after) and start + length < len(before) and after[length] == before[start + length]:
            length += 1
        if length >= 2 and (best is None or length > best[1]):
            best = (start, length)
    return best


def _in_mid_epoch(
    run: RecordedRun, restart: dict[str, Any], before: list[Any], after: list[Any], replay: tuple[int, int]
) -> bool:
    """Whether the epoch went on beyond what had been seen: then its beginning should not have come again."""
    start, length = replay
    if start + length < min(len(before), start + len(after)):
        return False  # the replay left the old order by itself: another epoch, or chance
    if after[0] in before[start + 1 :] or len(set(before[start:])) < len(before) - start:
        return False  # the sequence had come round already: one more epoch in a fixed order
    if after[0] in after[1:]:
        return False  # it comes round afterwards: the restart was at the end of an epoch
    until = restart["file"]["backward"]
    drawn = [b for b in run.facts.get("batches", []) if b["backward"] < until and b.get("grad")]
    if length >= len(after) and drawn:
        last = drawn[-1]
        loader = next(held for held in run.facts["loaders"] if held["number"] == last["loader"])
        seen = sum(b["loader"] == last["loader"] and b["iteration"] == last["iteration"] for b in drawn)
        return loader.get("batches") is None or seen < loader["batches"]
    return length >= 5


def unseeded(run: RecordedRun) -> Claim | None:
    """No seed was ever set for the random numbers of torch."""
    seeds = run.facts.get("seeds", {})
    if not run.steps or run.facts.get("seeds") is None or seeds.get("torch"):
        return None
    others = [kind for kind in ("numpy", "python") if seeds.get(kind)]
    own = [key for key in run.facts.get("reseeds", {}) if key.startswith("numpy.random.default_rng")]
    have = f" (only {' and '.join(others)} {'were' if len(others) > 1 else 'was'} seeded)" if others else ""
    return Claim(
        0.7 if others else 0.6,
        f"`torch.manual_seed` was never called{have}: initial weights and the order of the data differ from "
        "run to run.",
        step=0,
        evidence={"seeded": others, "generators": own[:4]},
        severity="info",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "resume.state-missing",
        "wiring",
        state_missing,
        explains=("optim.stale-state", "lr.schedule-broken", "lr.too-high", "data.bad-batch"),
    ),
    Rule("resume.data-replayed", "wiring", data_replayed, explains=("data.repeated-batches",)),
    Rule("repro.unseeded", "remark", unseeded),
)
