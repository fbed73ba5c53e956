"""Errors of the accelerator that end a script: a kernel's failed assertion or access, no memory, a failed collective.

The texts of the errors are those of `cudaGetErrorString`, of `ncclGetErrorString` in torch's `DistBackendError`, and of
gloo.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.core.wording import at_place
from surefoot.diagnose.rule import Claim, Rule
from surefoot.record.collectives import COLLECTIVE_FAILED, COLLECTIVE_WORDS
from surefoot.record.facts import IncidentEvent

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Evidence
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import CrashFacts, HeldMemory, ModuleMemory

GIB = 2**30


class _Collective(NamedTuple):
    """A kind of failure of a collective."""

    pattern: re.Pattern[str]
    """The text in its message."""
    meaning: str
    fix: str


_COLLECTIVE = (
    _Collective(
        re.compile(r"Duplicate GPU detected"),
        "two ranks use the same GPU",
        "Assign each rank its own GPU before the first CUDA call: "
        "`torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`.",
    ),
    _Collective(
        re.compile(r"Cuda failure \d+ 'out of memory'|Failed to CUDA calloc"),
        "the device had no memory left for the buffers of the collective, which are outside of torch's allocator",
        "Leave memory free outside of torch: use a smaller batch, or "
        "`torch.cuda.set_per_process_memory_fraction(0.9)`.",
    ),
    _Collective(
        re.compile(r"collective operation timeout|NCCL timeout|Timed out waiting|Original reason for failure was"),
        "not every rank made this call in time: a rank waits elsewhere, has ended, or has more or fewer batches",
        "Print the current line of each rank (`py-spy dump --pid PID`): all ranks must make the same calls in the same "
        "order.",
    ),
    _Collective(
        re.compile(r"ncclRemoteError|Connection closed by peer|Connection reset by peer|remote process exited"),
        "another rank has ended or cannot be reached",
        "Read the output and the run folder of the rank that ended first. This rank only reports that it ended.",
    ),
    _Collective(
        re.compile(r"ncclUnhandledCudaError"),
        "a call of CUDA inside it failed, perhaps because of an earlier error of this device",
        "Run once with `NCCL_DEBUG=WARN`: NCCL then prints the call that failed.",
    ),
    _Collective(
        re.compile(r"ncclSystemError"),
        "a socket, shared memory or a driver failed",
        "Run once with `NCCL_DEBUG=WARN`; in a container give it more shared memory (`--shm-size=8g`).",
    ),
)
_TRIED = re.compile(r"Tried to allocate ([\d.]+) ([KMG]iB)")
_CAPACITY = re.compile(r"total capacity of ([\d.]+) ([KMG]iB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}
_ASSERTED = "device-side assert triggered"
"""Every message of torch about CUDA ends with how "to enable device-side assertions"."""
_ILLEGAL = (
    "an illegal memory access was encountered",
    "misaligned address",
    "an illegal instruction was encountered",
    "invalid program counter",
    "hardware stack error",
    "operation not supported on global/shared address space",
    "unspecified launch failure",
)
_NCCL_KIND = re.compile(r"\b(nccl(?:[A-Z]\w+Error|InvalidArgument|InvalidUsage))\b")
_SOURCE = re.compile(r"^\[[^\]]*\.cc:\d+\]\s*")
"""The source line with which gloo begins a message."""
_LAST_ERROR = re.compile(r"Last error:\s*\n(.+)")
_FEWEST = 6
"""The number of consecutive records at which more must be held than before: batch lengths vary by chance."""
_GROWN = 1.1
_MOST_MODULES = 3
_WORTH_NAMING = 2**20
"""A module that leaves fewer bytes allocated is not named."""


def failed_assertion(run: RecordedRun) -> Claim | None:
    """A kernel's assertion failed, in none of the calls whose ids and labels were recorded."""
    crash = run.facts.crash
    if crash is None or _ASSERTED not in crash.message:
        return None
    if crash.step is not None:
        return _nan_probability(crash)
    return Claim(
        0.6,
        f"A kernel failed an assertion on the device, which {_reported(run, crash)}. {_fitted(crash)}: another index "
        "may be out of range (`table[ids]`, `gather`, `scatter`, `index_select`, `one_hot`, a compiled function), or a "
        "value outside the domain of `multinomial`.",
        where=(crash.site or "",),
        evidence={"message": crash.message[:300], "calls_checked": crash.calls_checked or 0},
    )


def _nan_probability(crash: CrashFacts) -> Claim | None:
    """`binary_cross_entropy` got non-finite values; other rules may find the reason."""
    given = crash.arguments.input if crash.arguments is not None else None
    if crash.call != "binary_cross_entropy" or given is None or not given.nonfinite:
        return None
    return Claim(
        0.6,
        f"binary_cross_entropy{at_place(crash.site)} got values that are not finite. On a device this fails an "
        f"assertion; on the CPU it raises an error.",
        where=(crash.site or "",),
        evidence={"message": crash.message[:300]},
        fixes=(
            "Find the origin of the first non-finite value: the data, the learning rate, a root or a logarithm of 0.",
            "Skip such steps with `surefoot run --guard`.",
        ),
    )  # fmt: skip


def illegal_access(run: RecordedRun) -> Claim | None:
    """A kernel used an invalid address or instruction."""
    crash = run.facts.crash
    if crash is None or crash.step is not None:
        return None
    words = next((words for words in _ILLEGAL if words in crash.message), None)
    if words is None or _is_collective(crash):
        return None
    return Claim(
        0.7,
        f"A kernel ended with `{words}`, which {_reported(run, crash)}. {_fitted(crash)}. torch's own kernels check "
        "most indices, so check code outside of torch first: an extension, a Triton or CUDA kernel, an attention or "
        "quantisation library, or memory that was freed or is used on another stream.",
        where=(crash.site or "",),
        evidence={"message": crash.message[:300], "error": words, "calls_checked": crash.calls_checked or 0},
    )


def _reported(run: RecordedRun, crash: CrashFacts) -> str:
    where = crash.site or "no line of the script"
    return f"was reported at {where} after {run.steps:,} steps; the call that failed came earlier"


def _fitted(crash: CrashFacts) -> str:
    """What is known about the ids and labels of the calls before."""
    seen = crash.calls_checked or 0
    if not seen:
        return "No call of embedding, cross_entropy, nll_loss or binary_cross_entropy was seen on the device"
    return (
        f"The ids and labels of the last {seen:,} calls of embedding, cross_entropy and nll_loss that reached the "
        "host, and the values that binary_cross_entropy took, all fit"
    )


def collective_failed(run: RecordedRun) -> Claim | None:
    """A collective of several ranks has failed: NCCL reports the kind of error, and often the reason."""
    crash = run.facts.crash
    logged = next((event for event in run.events(IncidentEvent) if event.kind == COLLECTIVE_FAILED), None)
    if crash is not None and _is_collective(crash):
        message, place = crash.message, f" at {crash.site or 'no line of the script'}"
    elif crash is None and logged is not None:  # a stabilizer records no crash
        message, place = logged.summary.split(": ", 2)[-1], ""  # after "a collective failed" and the class
    else:
        return None
    kind = _NCCL_KIND.search(message)
    last = _LAST_ERROR.search(message)
    reason = last[1].strip()[:200] if last is not None and last[1].strip() else ""
    error = kind[1] if kind is not None else _SOURCE.sub("", message.strip().splitlines()[0]).split(". ")[0][:160]
    named = f"`{error}`" + (f" (`{reason}`)" if reason else "")
    rank = "" if run.description.rank is None else f" of rank {run.description.rank}"
    known = next((each for each in _COLLECTIVE if each.pattern.search(message)), None)
    return Claim(
        0.8,
        f"A collective{rank} failed{place} after {run.steps:,} steps with {named}"
        f"{'' if known is None else f': {known.meaning}'}.",
        where=((crash.site if crash is not None else None) or "",),
        evidence={"message": message[:300], "error": error, "reason": reason},
        fixes=() if known is None else (known.fix,),
    )


def _is_collective(crash: CrashFacts) -> bool:
    """Whether an error comes from communication between ranks."""
    return crash.type == "DistBackendError" or any(words in crash.message for words in COLLECTIVE_WORDS)


def compiled_misfit(run: RecordedRun) -> Claim | None:
    """A compiled model got integers that exceed a table in it."""
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
        f"{name} into the compiled model{at_place(crash.site)} with values from {low} to {high}; a table in the "
        f"model{table} has {rows} rows, for 0 to {rows - 1}: an id or a label is out of range. The call failed at "
        f"step {crash.step}{later}.",
        step=crash.step,
        where=(crash.site or "", crash.table or ""),
        evidence={"lowest": low, "highest": high, "rows": rows},
    )


def out_of_memory(run: RecordedRun) -> Claim | None:
    """The device ran out of memory: because more was held with every step, or because a step needs that much."""
    crash = run.facts.crash
    if crash is None or crash.type != "OutOfMemoryError":
        return None
    asked, total = _bytes(_TRIED, crash.message), _bytes(_CAPACITY, crash.message)
    what = f"for {_size(asked)} " if asked else ""
    of = f" of {_size(total)}" if total else ""
    begun = f"At {crash.site or 'no line of the script'}, after {run.steps:,} steps, no memory {what}was left{of}."
    held = _of_fullest(run.facts.held_memory)
    evidence: Evidence = {
        "asked": asked,
        "capacity": total,
        "held": [[each.step, each.allocated, each.peak] for each in held[:: max(1, len(held) // 20)]],
    }
    by_module, evidence["modules"] = _largest_modules(run.facts.module_memory, held)
    grown = _growth(held)
    if grown is not None:
        first, last = grown
        each = (last.allocated - first.allocated) / max(1, last.step - first.step)
        words = (
            f" The memory in use after a step grew from {_size(first.allocated)} at step {first.step} to "
            f"{_size(last.allocated)} at step {last.step}, by {_size(each)} per step: the script keeps tensors of past "
            "steps."
        )
        fixes: tuple[str, ...] = ("Keep numbers, not tensors: `loss.item()` or `loss.detach()` in lists and sums.",)
        return Claim(0.9, begun + words + by_module, where=(crash.site or "",), evidence=evidence, fixes=fixes)
    if held:
        last = held[-1]
        words = (
            f" The memory in use after a step did not grow ({_size(last.allocated)} at step {last.step}); the peak "
            f"within a step was {_size(last.peak)}. This step, or work outside of training, needs more."
        )
    else:
        words = " No step was completed: the model and its first batch need more memory than is available."
    return Claim(0.9, begun + words + by_module, where=(crash.site or "",), evidence=evidence)


def _largest_modules(notes: list[ModuleMemory], held: list[HeldMemory]) -> tuple[str, list[list[Any]]]:
    """The modules that left the most memory allocated in the last sampled step, as text and as evidence."""
    fullest = held[-1].device if held else max(notes, key=lambda each: each.peak).device if notes else ""
    notes = [each for each in notes if each.device == fullest and each.held >= _WORTH_NAMING]
    if not notes:
        return "", []
    step = notes[-1].step
    largest = sorted((each for each in notes if each.step == step), key=lambda each: -each.held)[:_MOST_MODULES]
    words = [f"`{each.module}` {_size(each.held)}{_earlier(each, notes)}" for each in largest]
    top = max(largest, key=lambda each: each.peak)
    return (
        f" In step {step}, the last sampled step, the calls of these modules left the most memory allocated: "
        f"{', '.join(words)}; up to {_size(top.peak)} were in use while `{top.module}` ran."
    ), [[each.module, each.step, each.held, each.peak] for each in largest]


def _earlier(now: ModuleMemory, notes: list[ModuleMemory]) -> str:
    """The memory that a module left allocated when it was first observed, if that is much less."""
    first = next(each for each in notes if each.module == now.module)
    return f" ({_size(first.held)} in step {first.step})" if now.held > _GROWN * first.held else ""


def _of_fullest(held: list[HeldMemory]) -> list[HeldMemory]:
    """The records of the device with the most memory held."""
    fullest = max(held, key=lambda each: each.allocated, default=None)
    return [] if fullest is None else [each for each in held if each.device == fullest.device]


def _growth(held: list[HeldMemory]) -> tuple[HeldMemory, HeldMemory] | None:
    """The steps between which memory has grown at every record; `None` if it has not, or hardly.

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
    Rule("device.illegal-access", "crash", illegal_access),
    Rule("device.out-of-memory", "crash", out_of_memory),
    Rule("dist.collective-failed", "crash", collective_failed, from_steps=True),
)
