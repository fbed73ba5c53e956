"""What the accelerator ends a script with: an assertion of a kernel whose values were not seen, or no memory left."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import HeldMemory

GIB = 2**30
_TRIED = re.compile(r"Tried to allocate ([\d.]+) ([KMG]iB)")
_CAPACITY = re.compile(r"total capacity of ([\d.]+) ([KMG]iB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}
_FEWEST = 6
"""At so many notes in a row more must be held than at the one before: batches of different lengths vary by chance."""
_GROWN = 1.1


def failed_assertion(run: RecordedRun) -> Claim | None:
    """A kernel's assertion failed, and it was none of the calls whose ids and labels were noted."""
    crash = run.facts.crash
    if crash is None or "device-side assert" not in crash.message or crash.step is not None:
        return None
    seen = crash.calls_checked or 0
    fitted = (
        f"The ids and labels of the last {seen:,} calls of embedding, cross_entropy and nll_loss that reached the "
        "host all fit"
        if seen
        else "No call of embedding, cross_entropy or nll_loss was seen on the device"
    )
    return Claim(
        0.6,
        f"A kernel failed an assertion on the device, which was reported at {crash.site or 'no line of the script'} "
        f"after {run.steps:,} steps; the call that failed is an earlier one. {fitted}: an index that does not fit "
        "elsewhere (`table[ids]`, `gather`, `scatter`, `index_select`, `one_hot`, a compiled function), or a value "
        "outside the domain of `binary_cross_entropy` or `multinomial`.",
        where=(crash.site or "",),
        evidence={"message": crash.message[:300], "calls_checked": seen},
    )


def compiled_misfit(run: RecordedRun) -> Claim | None:
    """A compiled model was given whole numbers that are beyond every table in it."""
    crash = run.facts.crash
    given = crash.arguments if crash is not None and crash.call == "compiled model" else None
    if crash is None or given is None or given.indices is None or given.weight is None:
        return None
    low, high, rows = int(given.indices.min or 0), int(given.indices.max or 0), given.weight.shape[0]
    table = f" (`{crash.table}`)" if crash.table else ""
    name = f"`{crash.indices}` goes" if crash.indices else "A tensor goes"
    later = f", which the device reported at {crash.reported_at}" if crash.reported_at else ""
    return Claim(
        0.9,
        f"{name} into the compiled model at {crash.site} with values from {low} to {high}; the largest table in "
        f"the model{table} has {rows} rows, for 0 to {rows - 1}: an id or a label that does not fit. The call failed "
        f"at step {crash.step}{later}.",
        step=crash.step,
        where=(crash.site or "", crash.table or ""),
        evidence={"lowest": low, "highest": high, "rows": rows},
    )


def out_of_memory(run: RecordedRun) -> Claim | None:
    """The device had no memory left: because more was held with every step, or because a step needs that much."""
    crash = run.facts.crash
    if crash is None or crash.type != "OutOfMemoryError":
        return None
    asked, total = _bytes(_TRIED, crash.message), _bytes(_CAPACITY, crash.message)
    what = f"for {_size(asked)} " if asked else ""
    of = f" of {_size(total)}" if total else ""
    begun = f"At {crash.site or 'no line of the script'}, after {run.steps:,} steps, no memory {what}was left{of}."
    held = _of_fullest(run.facts.held_memory)
    evidence = {
        "asked": asked,
        "capacity": total,
        "held": [[each.step, each.allocated, each.peak] for each in held[:: max(1, len(held) // 20)]],
    }
    grown = _growth(held)
    if grown is not None:
        first, last = grown
        each = (last.allocated - first.allocated) / max(1, last.step - first.step)
        words = (
            f" What is still held after a step grew from {_size(first.allocated)} at step {first.step} to "
            f"{_size(last.allocated)} at step {last.step}, by {_size(each)} per step: something keeps tensors of past "
            "steps."
        )
        fixes: tuple[str, ...] = ("Keep numbers, not tensors: `loss.item()` or `loss.detach()` in lists and sums.",)
        return Claim(0.9, begun + words, where=(crash.site or "",), evidence=evidence, fixes=fixes)
    if held:
        last = held[-1]
        words = (
            f" What is held after a step did not grow ({_size(last.allocated)} at step {last.step}); within a step the "
            f"most so far was {_size(last.peak)}. This step, or what is done beside training, needs more."
        )
    else:
        words = " No step was completed: the model and its first batch need more than there is."
    return Claim(0.9, begun + words, where=(crash.site or "",), evidence=evidence)


def _of_fullest(held: list[HeldMemory]) -> list[HeldMemory]:
    """The notes of the device on which most is held."""
    fullest = max(held, key=lambda each: each.allocated, default=None)
    return [] if fullest is None else [each for each in held if each.device == fullest.device]


def _growth(held: list[HeldMemory]) -> tuple[HeldMemory, HeldMemory] | None:
    """The step since which memory has grown at every note, and the last; `None` if it has not, or hardly.

    The first two steps allocate gradients and the state of the optimizer: they do not count.
    """
    later = [each for each in held if each.step >= held[0].step + 2]
    start = len(later)
    for before, after in reversed(list(pairwise(later))):
        if after.allocated <= before.allocated:
            break
        start = later.index(before)
    grown = later[start:]
    if len(grown) < _FEWEST or grown[-1].allocated < _GROWN * grown[0].allocated:
        return None
    return grown[0], grown[-1]


def _bytes(pattern: re.Pattern[str], message: str) -> float | None:
    found = pattern.search(message)
    return None if found is None else float(found[1]) * _UNITS[found[2]]


def _size(count: float | None) -> str:
    count = count or 0.0
    return f"{count / GIB:.2f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"


RULES = (
    Rule("device.assert", "crash", failed_assertion),
    Rule("device.assert", "crash", compiled_misfit),
    Rule("device.out-of-memory", "crash", out_of_memory),
)
