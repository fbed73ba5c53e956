"""What two passes and the record say together.

| the passes | and the record | verdict | exit code |
|---|---|---|---|
| are equal | is the same, inputs included | `reproduced`: the failure is deterministic | 0 |
| are equal | differs, with the same inputs, versions, device and settings | `silent-corruption`: suspected | 3 |
| differ | - | `nondeterministic` | 4 |
| are equal | cannot be compared bit for bit, or something else differs too | `inconclusive` | 5 |

Equal is bit for bit: every loss and every gradient. Where all of them are NaN that says little, since any NaN is as
good as another: so the inputs of the model count too. On an accelerator corruption is suspected only if deterministic
algorithms were on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from surefoot.core.formats import REPLAY
from surefoot.diagnose.terminal import printable
from surefoot.record.incidents.reading import number

if TYPE_CHECKING:
    from surefoot.record.incidents.summary import IncidentFacts, IncidentPrints
    from surefoot.replay.export.export import ReproductionData
    from surefoot.replay.processes import ReplayPass
    from surefoot.replay.tensor_difference import TensorDifference

LossValue: TypeAlias = float | str | None
"""The value of a loss; NaN and infinities are words in JSON."""
Kind: TypeAlias = Literal["reproduced", "silent-corruption", "nondeterministic", "inconclusive"]
EXIT_CODES: dict[str, int] = {"reproduced": 0, "silent-corruption": 3, "nondeterministic": 4, "inconclusive": 5}
NOT_EXPORTED = 1
"""The exit code if a reproduction was requested and could not be written."""
CORRUPTION = "hw.silent-corruption"


class ReplayLosses(TypedDict, total=False):
    """The losses of the step, by microbatch."""

    recorded: list[LossValue]
    """In the record."""
    first: list[LossValue]
    """In the first pass."""
    second: list[LossValue]
    """In the second pass."""


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    step: int
    kind: Kind
    summary: str
    fails_again: bool
    """Whether the replayed step has a loss or a gradient that is not finite."""
    cause: str | None = None
    different: dict[str, TensorDifference] = field(default_factory=dict)
    """By tensor: recorded and replayed, or the first and the second pass."""
    surroundings: list[str] = field(default_factory=list)
    """What differs from the record: versions, device, threads, settings."""
    notes: list[str] = field(default_factory=list)
    origin: Mapping[str, object] | None = None
    """The first operation that made a non-finite value."""
    losses: ReplayLosses = field(default_factory=ReplayLosses)
    reproduction: ReproductionData | None = None
    """The exported script, or under `error` why there is none; `None` if none was asked for."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.reproduction is not None and "error" in self.reproduction:
            return EXIT_CODES[self.kind] or NOT_EXPORTED
        return EXIT_CODES[self.kind]

    def as_json(self) -> dict[str, object]:
        """The result as JSON."""
        return {"schema": REPLAY.version, **{name: getattr(self, name) for name in self.__dataclass_fields__}}


def judge(facts: IncidentFacts, first: ReplayPass, second: ReplayPass) -> Replayed:
    """Compare two passes with each other and with the record."""
    record = facts["fingerprints"]
    changed = _surroundings(facts, second)
    undecided = Replayed(
        step=int(facts["step"]),
        kind="inconclusive",
        summary="",
        fails_again=fails(second.prints),
        surroundings=changed,
        notes=list(dict.fromkeys([*first.notes, *second.notes])),
        origin=second.origin,
        reproduction=second.reproduction,
        losses={
            "recorded": _losses(record),
            "first": _losses(first.prints),
            "second": _losses(second.prints),
        },
    )
    between = _different(first.prints, second.prints)
    if between:
        return replace(undecided, kind="nondeterministic", different=between, summary=_unsteady(between, second))
    from_record = _different(record, second.prints)
    comparable = _comparable(record)
    same_inputs = _same_inputs(record, second.prints)
    if not from_record and comparable and same_inputs is not False:
        if same_inputs is None and facts["inexact"] and _all_alike(second.prints):
            return replace(undecided, summary=_another_batch_perhaps(facts["inexact"]))
        again = (
            "The failure is the same"
            if undecided.fails_again
            else "The numbers are the same, and all of them are finite"
        )
        what = f"{again}: every loss and all {len(second.prints['gradients'])} gradients are bit for bit as recorded."
        return replace(undecided, kind="reproduced", summary=f"{what} The failure is deterministic.")
    obstacles = _obstacles(facts, comparable, same_inputs, changed)
    details: dict[str, TensorDifference] = {
        name: {**both, **second.differences.get(name, {})} for name, both in from_record.items()
    }
    if obstacles:
        return replace(undecided, different=details, summary=_unclear(obstacles, undecided.fails_again))
    return replace(
        undecided, kind="silent-corruption", cause=CORRUPTION, different=details, summary=_corrupted(details)
    )


def _comparable(record: IncidentPrints) -> bool:
    """Whether the record can be compared bit for bit."""
    return bool(record["gradients"]) and all("sha256" in each for each in record["gradients"].values())


def _all_alike(prints: IncidentPrints) -> bool:
    """Whether no value of any loss or gradient is finite: any other failing batch has the same fingerprints."""
    losses = map(number, _losses(prints))
    gradients = prints["gradients"].values()
    return not any(map(math.isfinite, losses)) and all(
        each.get("nonfinite") == math.prod(each["shape"]) for each in gradients
    )


def _obstacles(facts: IncidentFacts, comparable: bool, same_inputs: bool | None, changed: list[str]) -> list[str]:
    """Why a difference from the record proves nothing."""
    found = [str(reason) for reason in facts["inexact"]]
    if not comparable and not found:
        found.append("the record has no gradients to compare with")
    if same_inputs is False:
        found.append(
            "the model's inputs differ from the recorded ones: the loop prepares its batches in a way that depends on "
            "more than the batch and the random streams"
        )
    elif same_inputs is None:
        found.append("the record has no inputs of the model, so they may have been different")
    if facts["hardware"].get("device", "cpu") != "cpu" and not facts["switches"].get("deterministic"):
        found.append(
            "deterministic algorithms were off, and on a device two passes may agree by chance (set "
            "`torch.use_deterministic_algorithms(True)` in the run)"
        )
    return found + [f"different from the record: {each}" for each in changed]


def _same_inputs(record: IncidentPrints, now: IncidentPrints) -> bool | None:
    """Whether the model's inputs are those of the record; `None` if they were not recorded."""
    pairs = zip(_input_prints(record), _input_prints(now), strict=False)
    same = [then == here for then, here in pairs if then]
    return all(same) if same else None


def _input_prints(prints: IncidentPrints) -> list[list[list[str]]]:
    return [[[tensor["sha256"] for tensor in call] for call in calls] for calls in prints.get("inputs", [])]


def _different(one: IncidentPrints, other: IncidentPrints) -> dict[str, TensorDifference]:
    """Losses and gradients whose fingerprints differ, with both norms."""
    found: dict[str, TensorDifference] = {}
    ours = [each for losses in one.get("losses", []) for each in losses]
    theirs = [each for losses in other.get("losses", []) for each in losses]
    for i, (our_loss, their_loss) in enumerate(zip(ours, theirs, strict=False)):
        if our_loss["sha256"] != their_loss["sha256"]:
            name = "loss" if len(ours) == 1 else f"loss of microbatch {i}"
            found[name] = {"norms": [our_loss["value"], their_loss["value"]]}
    if len(ours) != len(theirs):
        found["losses"] = {"norms": [len(ours), len(theirs)]}
    for name in dict.fromkeys([*one["gradients"], *other["gradients"]]):
        a, b = one["gradients"].get(name), other["gradients"].get(name)
        if a is None or b is None:
            found[name] = {"norms": [None if a is None else a.get("norm"), None if b is None else b.get("norm")]}
        elif a.get("sha256") != b.get("sha256"):
            found[name] = {
                "norms": [a.get("norm"), b.get("norm")],
                "nonfinite": [a.get("nonfinite"), b.get("nonfinite")],
            }
    return found


def fails(prints: IncidentPrints) -> bool:
    """Whether a loss or a gradient is not finite."""
    bad_loss = any(not math.isfinite(value) for value in map(number, _losses(prints)))
    return bad_loss or any(each.get("nonfinite") for each in prints["gradients"].values())


def _losses(prints: IncidentPrints) -> list[LossValue]:
    found: list[LossValue] = [each["value"] for losses in prints.get("losses", []) for each in losses]
    return found if found or prints.get("loss") is None else [prints["loss"]]


def _surroundings(facts: IncidentFacts, now: ReplayPass) -> list[str]:
    """What differs from the record, as text."""
    found = []
    for name, then, current in (
        *_pairs(facts["versions"], now.versions),
        *_pairs(facts["hardware"], now.hardware),
        *_pairs(facts["switches"], now.switches),
    ):
        if name not in ("cpu_count", "surefoot"):  # neither computes anything here
            found.append(f"{name} is {current}, was {then}")
    return found


def _pairs(then: Mapping[str, object], now: Mapping[str, object]) -> list[tuple[str, object, object]]:
    return [(name, then[name], now.get(name)) for name in then if then[name] != now.get(name)]


def _unsteady(between: Mapping[str, TensorDifference], second: ReplayPass) -> str:
    named = ", ".join(list(between)[:4])
    text = f"Two passes differ from each other, in {len(between)} tensors ({named}): the step is not deterministic"
    if not second.switches.get("deterministic"):
        text += (
            ". Deterministic algorithms are off: operations that add with atomics (index_add, scatter_add, embedding "
            "backward, interpolation backward, cuDNN convolutions chosen by benchmark) may be part of it. Set "
            "`torch.use_deterministic_algorithms(True)` and replay, or look for random numbers from a generator of "
            "the script's own"
        )
    return text + "."


def _unclear(obstacles: list[str], fails_again: bool) -> str:
    failing = "The step fails again" if fails_again else "The step does not fail again"
    return f"{failing}, but it cannot be compared with the record bit for bit: {'; '.join(obstacles)}."


def _another_batch_perhaps(reasons: Sequence[object]) -> str:
    return (
        "It fails again in the same way. It is not known whether it is the same batch: no loss and no gradient has a "
        f"finite value, one NaN is like another, and {'; '.join(map(str, reasons))}."
    )


def _corrupted(details: Mapping[str, TensorDifference]) -> str:
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


_TITLES = {
    "reproduced": "reproduced bit for bit",
    "silent-corruption": "silent corruption suspected (hw.silent-corruption)",
    "nondeterministic": "not deterministic",
    "inconclusive": "cannot be compared bit for bit",
}
_MOST_TENSORS = 10


def as_text(found: Replayed) -> str:
    """A few lines."""
    lines = [f"step {found.step}: {_TITLES[found.kind]}", "", found.summary]
    differences = ["", *_tensors(found)] if found.different else []
    origin = _origin(found)
    # Differences that are expected say less than the operation.
    lines += origin + differences if found.kind == "inconclusive" else differences + origin
    if found.reproduction is not None:
        lines += ["", *_reproduction(found.reproduction)]
    if found.surroundings:
        lines += ["", "Different from the record:", *(f"  {each}" for each in found.surroundings)]
    if found.notes:
        lines += ["", *(f"note: {note}" for note in found.notes)]
    return printable("\n".join(lines))


def _origin(found: Replayed) -> list[str]:
    if found.origin is not None:
        return ["", "First bad operation:", f"  {found.origin['text']}"]
    if found.fails_again:
        return ["", "Every value was finite when the first bad operation was searched for: the step ran differently."]
    return []


def _reproduction(about: ReproductionData) -> list[str]:
    if "error" in about:
        return [f"No reproduction was written: {about['error']}"]
    return ["Reproduction, which needs only torch:", f"  {about['text']}"]


def _tensors(found: Replayed) -> list[str]:
    heads = ("first pass", "second pass") if found.kind == "nondeterministic" else ("recorded", "replayed")
    lines = [f"Differs ({heads[0]}, {heads[1]}):"]
    for name, both in list(found.different.items())[:_MOST_TENSORS]:
        lines.append(f"  {name}: {_pair(both)}")
    if len(found.different) > _MOST_TENSORS:
        lines.append(f"  and {len(found.different) - _MOST_TENSORS} more")
    return lines


def _pair(both: TensorDifference) -> str:
    if "values" in both:
        return (
            f"{both['values']:,} of {both['of']:,} values, first at {both['first']}: {both['recorded']}, "
            f"{both['replayed']} ({both['bits']} bits); largest difference {both['largest']}"
        )
    then, now = both["norms"]
    return f"{then}, {now}"
