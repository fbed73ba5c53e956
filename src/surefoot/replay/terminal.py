"""The result of a replay as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.diagnose.terminal import printable

if TYPE_CHECKING:
    from surefoot.replay.export.export import ReproductionData
    from surefoot.replay.tensor_difference import TensorDifference
    from surefoot.replay.verdict import Replayed

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
