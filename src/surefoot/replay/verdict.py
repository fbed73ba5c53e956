"""What two passes and the record say together.

| the passes | and the record | verdict | exit code |
|---|---|---|---|
| are equal | is the same, inputs included | `reproduced`: the failure is deterministic | 0 |
| are equal | differs, with the same inputs, versions, device and settings | `silent-corruption`: suspected | 3 |
| differ | - | `nondeterministic` | 4 |
| are equal | cannot be compared bit for bit, or something else differs too | `inconclusive` | 5 |

Equal is bit for bit: every loss and every gradient. Where all of them are NaN that says little, since any NaN is as
good as another: so the inputs of the model count too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from surefoot.core.formats import REPLAY
from surefoot.record.incidents.reading import number

if TYPE_CHECKING:
    from surefoot.replay.processes import ReplayPass

Kind: TypeAlias = Literal["reproduced", "silent-corruption", "nondeterministic", "inconclusive"]
EXIT_CODES: dict[str, int] = {"reproduced": 0, "silent-corruption": 3, "nondeterministic": 4, "inconclusive": 5}
NOT_EXPORTED = 1
"""The exit code where a reproduction was asked for and none could be written."""
CORRUPTION = "hw.silent-corruption"


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    step: int
    kind: Kind
    summary: str
    fails_again: bool
    """Whether the replayed step has a loss or a gradient that is not finite."""
    cause: str | None = None
    different: dict[str, Any] = field(default_factory=dict)
    """By tensor: recorded and replayed, or the first and the second pass."""
    surroundings: list[str] = field(default_factory=list)
    """What is not as it was: versions, device, threads, settings."""
    notes: list[str] = field(default_factory=list)
    origin: dict[str, Any] | None = None
    """The first operation that made a value which is not finite."""
    losses: dict[str, Any] = field(default_factory=dict)
    reproduction: dict[str, Any] | None = None
    """The exported script, or under `error` why there is none; `None` if nobody asked."""

    @property
    def exit_code(self) -> int:
        """What the command ends with."""
        if self.reproduction is not None and "error" in self.reproduction:
            return EXIT_CODES[self.kind] or NOT_EXPORTED
        return EXIT_CODES[self.kind]

    def as_json(self) -> dict[str, Any]:
        """For other programs."""
        return {"schema": REPLAY.version, **{name: getattr(self, name) for name in self.__dataclass_fields__}}


def judge(facts: dict[str, Any], first: ReplayPass, second: ReplayPass) -> Replayed:
    """Compare two passes with each other and with the record."""
    record = facts["fingerprints"]
    changed = _surroundings(facts, second)
    common: dict[str, Any] = {
        "step": int(facts["step"]),
        "fails_again": fails(second.prints),
        "surroundings": changed,
        "notes": list(dict.fromkeys([*first.notes, *second.notes])),
        "origin": second.origin,
        "reproduction": second.reproduction,
        "losses": {
            "recorded": _losses(record),
            "first": _losses(first.prints),
            "second": _losses(second.prints),
        },
    }
    between = _different(first.prints, second.prints)
    if between:
        return Replayed(kind="nondeterministic", different=between, summary=_unsteady(between, second), **common)
    apart = _different(record, second.prints)
    comparable = _comparable(facts, record)
    same_inputs = _same_inputs(record, second.prints)
    if not apart and comparable and same_inputs is not False:
        if same_inputs is None and facts["inexact"] and _all_alike(second.prints):
            return Replayed(kind="inconclusive", summary=_another_batch_perhaps(facts["inexact"]), **common)
        again = "The same failure again" if common["fails_again"] else "The same numbers again, all of them finite"
        what = f"{again}: every loss and all {len(second.prints['gradients'])} gradients bit for bit as recorded."
        return Replayed(kind="reproduced", summary=f"{what} The failure is deterministic.", **common)
    obstacles = _obstacles(facts, comparable, same_inputs is not False, changed)
    details = {name: {**both, **second.differences.get(name, {})} for name, both in apart.items()}
    if obstacles:
        return Replayed(kind="inconclusive", different=details, summary=_unclear(obstacles, common), **common)
    return Replayed(
        kind="silent-corruption", cause=CORRUPTION, different=details, summary=_corrupted(details), **common
    )


def _comparable(facts: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether the record can be compared bit for bit."""
    return bool(record["gradients"]) and all("sha256" in each for each in record["gradients"].values())


def _all_alike(prints: dict[str, Any]) -> bool:
    """Whether no value of any loss or gradient is finite: any other batch that fails has the same prints."""
    losses = map(number, _losses(prints))
    gradients = prints["gradients"].values()
    return not any(map(math.isfinite, losses)) and all(
        each.get("nonfinite") == math.prod(each["shape"]) for each in gradients
    )


def _obstacles(facts: dict[str, Any], comparable: bool, same_inputs: bool, changed: list[str]) -> list[str]:
    """Why a difference from the record proves nothing."""
    found = [str(reason) for reason in facts["inexact"]]
    if not comparable and not found:
        found.append("the record has no gradients to compare with")
    if not same_inputs:
        found.append(
            "the model was called with other inputs than then: the loop prepares its batches in a way that depends on "
            "more than the batch and the random streams"
        )
    return found + [f"not as it was: {each}" for each in changed]


def _same_inputs(record: dict[str, Any], now: dict[str, Any]) -> bool | None:
    """Whether the model was called with the same as then; `None` if that was not noted."""
    pairs = zip(_input_prints(record), _input_prints(now), strict=False)
    same = [then == here for then, here in pairs if then]
    return all(same) if same else None


def _input_prints(prints: dict[str, Any]) -> list[Any]:
    return [[[tensor["sha256"] for tensor in call] for call in calls] for calls in prints.get("inputs", [])]


def _different(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients whose prints differ, with both norms."""
    found: dict[str, Any] = {}
    ours = [each for losses in one.get("losses", []) for each in losses]
    theirs = [each for losses in other.get("losses", []) for each in losses]
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a["sha256"] != b["sha256"]:
            name = "loss" if len(ours) == 1 else f"loss of microbatch {i}"
            found[name] = {"norms": [a["value"], b["value"]]}
    if len(ours) != len(theirs):
        found["losses"] = {"norms": [len(ours), len(theirs)]}
    for name in dict.fromkeys([*one["gradients"], *other["gradients"]]):
        a, b = one["gradients"].get(name), other["gradients"].get(name)
        if a is None or b is None:
            found[name] = {"norms": [a and a.get("norm"), b and b.get("norm")]}
        elif a.get("sha256") != b.get("sha256"):
            found[name] = {
                "norms": [a.get("norm"), b.get("norm")],
                "nonfinite": [a.get("nonfinite"), b.get("nonfinite")],
            }
    return found


def fails(prints: dict[str, Any]) -> bool:
    """Whether a loss or a gradient is not finite."""
    bad_loss = any(not math.isfinite(value) for value in map(number, _losses(prints)))
    return bad_loss or any(each.get("nonfinite") for each in prints["gradients"].values())


def _losses(prints: dict[str, Any]) -> list[Any]:
    found = [each["value"] for losses in prints.get("losses", []) for each in losses]
    return found if found or prints.get("loss") is None else [prints["loss"]]


def _surroundings(facts: dict[str, Any], now: ReplayPass) -> list[str]:
    """What is not as it was, in words."""
    found = []
    for name, then, current in (
        *_pairs("", facts["versions"], now.versions),
        *_pairs("", facts["hardware"], now.hardware),
        *_pairs("", facts["switches"], now.switches),
    ):
        if name not in ("cpu_count", "surefoot"):  # neither computes anything here
            found.append(f"{name} is {current}, was {then}")
    return found


def _pairs(prefix: str, then: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(f"{prefix}{name}", then[name], now.get(name)) for name in then if then[name] != now.get(name)]


def _unsteady(between: dict[str, Any], second: ReplayPass) -> str:
    named = ", ".join(list(between)[:4])
    text = f"Two passes differ from each other, in {len(between)} tensors ({named}): the step is not deterministic"
    if not second.switches.get("deterministic"):
        text += (
            ". Deterministic algorithms are off: operations that add with atomics (index_add, scatter_add, embedding "
            "backward, interpolation backward, cuDNN convolutions chosen by benchmark) may be among it. Set "
            "`torch.use_deterministic_algorithms(True)` and replay, or look for random numbers from a generator of "
            "the script's own"
        )
    return text + "."


def _unclear(obstacles: list[str], common: dict[str, Any]) -> str:
    failing = "It fails again" if common["fails_again"] else "It does not fail again"
    return f"{failing}, but bit for bit it is not the step of the record: {'; '.join(obstacles)}."


def _another_batch_perhaps(reasons: list[Any]) -> str:
    return (
        "It fails again in the same way. Whether it is the same batch cannot be told: no loss and no gradient has a "
        f"finite value, one NaN is like another, and {'; '.join(map(str, reasons))}."
    )


def _corrupted(details: dict[str, Any]) -> str:
    name, first = next(iter(details.items()))
    text = f"Two passes agree bit for bit with each other and not with the record, in {len(details)} tensors"
    if "values" in first:
        text += (
            f"; {name}: {first['values']:,} of {first['of']:,} values, the first at {first['first']}, recorded "
            f"{first['recorded']}, replayed {first['replayed']} ({first['bits']} bits apart)"
        )
    else:
        then, now = first["norms"]
        text += f"; {name}: recorded {then}, replayed {now}"
    return (
        f"{text}. The same inputs, weights and random numbers gave another result then: suspect silent corruption "
        "(memory, processor), or something in the run that is not part of the step."
    )
