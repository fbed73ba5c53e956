"""`export_reproduction`: the failure of a step as one script with its tensors, which needs only torch.

1. `find_nonfinite` finds the first operation that made a non-finite value.
2. The step runs twice more under a `CallRecorder`: once to find the torch function that this operation belongs to, once
   to copy its inputs (and, in backward, the gradient that arrives at it).
3. The function alone is the smallest reproduction. Preceding calls are added if the tensors do not grow, and rows and
   columns are removed while it still fails (`choose`).
4. The script is run in a fresh process that cannot import surefoot. If it does not fail there as it did here, a longer
   one is tried: less shrunk, or the operation itself instead of the function around it.

Not covered: user code. The backward of a custom `autograd.Function` is written as the operations that it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from surefoot.core.wording import count_of
from surefoot.errors import UsageError, require
from surefoot.replay.export.call_recorder import CallRecorder
from surefoot.replay.export.choose import Draft, drafts
from surefoot.replay.export.script import SCRIPT, clear, fails_alone, subject, usable, write
from surefoot.replay.locate.call import mend
from surefoot.replay.locate.describe import Counts, count
from surefoot.replay.locate.find import OriginSearch, first_bad, result_of, run_step, way_of
from surefoot.replay.locate.names import Names
from surefoot.replay.locate.recorder import OperationRecorder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from surefoot.replay.export.call_recorder import CapturedCalls, Key
    from surefoot.replay.locate.memory_writes import MemoryWrite
    from surefoot.replay.locate.result import NonFiniteOrigin

Execute: TypeAlias = "Callable[[Callable[[Names], OperationRecorder]], OriginSearch]"

_MOST_OPERATIONS = 12
"""A function with more operations than this is opened: only the failing operation in it is exported."""


class _OtherStep(UsageError):
    """The step behaved differently when it was run again."""


class ReproductionData(TypedDict, total=False):
    """The JSON of a `Reproduction`, whose fields are described there; or why there is none."""

    script: str
    title: str
    operations: int
    lines: int
    tensor_bytes: int
    came_from_bytes: int
    checked: str
    counts: dict[str, int]
    text: str
    """All of it as a sentence."""
    error: str
    """Why no script was written; then there is no other key."""


@dataclass(frozen=True)
class Reproduction:
    """A folder with a script that fails by itself."""

    folder: Path
    title: str
    """The failing call: `torch.log`, `the backward of torch.sqrt`."""
    counts: Counts
    """The non-finite values that the script produces."""
    operations: int
    """How many torch calls the script makes."""
    lines: int
    """How long the script is."""
    tensor_bytes: int
    """Of all tensors in the folder, including those written into the script."""
    came_from_bytes: int
    """Of all tensors that existed before the step and were read by it: weights, batch, state."""
    checked: str
    """The output of the script in a fresh process without surefoot; empty if it was not checked."""
    origin: NonFiniteOrigin

    @property
    def script(self) -> Path:
        """The script."""
        return self.folder / SCRIPT

    def as_data(self) -> ReproductionData:
        """The numbers, and the sentence."""
        return {
            "script": str(self.script),
            "title": self.title,
            "operations": self.operations,
            "lines": self.lines,
            "tensor_bytes": self.tensor_bytes,
            "came_from_bytes": self.came_from_bytes,
            "checked": self.checked,
            "counts": self.counts._asdict(),
            "text": str(self),
        }

    def __str__(self) -> str:
        text = (
            f"{self.script}: {self.title} made {self.counts}; {count_of(self.operations, 'operation')}, "
            f"{self.lines} lines, {self.tensor_bytes:,} bytes of tensors instead of {self.came_from_bytes:,}"
        )
        return f"{text}. In a fresh process: {self.checked}" if self.checked else text


def export_reproduction(
    step_fn: Callable[[], Any],
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    check: bool = True,
) -> Reproduction | None:
    """Write a script that reproduces a failed step with torch only; `None` if the results of the step are finite.

    >>> import tempfile, torch, surefoot
    >>> w = torch.zeros(3, requires_grad=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = surefoot.export_reproduction(lambda: w.sqrt().sum(), folder, check=False)
    >>> made.title, made.tensor_bytes
    ('the backward of torch.sqrt', 8)

    Args:
        step_fn: As `find_nonfinite` takes it. It is called several times.
        folder: Where the script goes; made if it is not there.
        model: For the names of modules, parameters and buffers.
        optimizer: Restored afterwards if `step_fn` steps it.
        check: Run the script in a fresh process, and fall back to a longer one if it does not fail there.
    """
    require(callable(step_fn), f"`step_fn` must be a function that runs one step; got {type(step_fn).__name__}.")
    names = Names(step_fn, model, optimizer)
    for last_try in (False, True):
        found = first_bad(lambda repair: run_step(step_fn, names, OperationRecorder(names, repair)))
        if found is None:
            return None
        try:
            return export_found(*found, lambda make: run_step(step_fn, names, make(names)), folder, check=check)
        except _OtherStep:  # some objects are created on first use, such as the scale of a loss scaler
            if last_try:
                raise
    return None


def export_found(
    run: OriginSearch, origin: MemoryWrite, execute: Execute, folder: str | Path, *, check: bool
) -> Reproduction:
    """Write the reproduction of a failure that has been found; `execute` runs the step with a recorder."""
    place = usable(Path(folder).absolute())  # the check runs elsewhere
    result = result_of(run, origin)
    at = _operation_of(run, origin)
    recorder = _captured(run, at, execute)
    printed = "its tensors or arguments cannot be written to a script"
    for draft in _attempts(recorder, at, born=at.born and at is origin):
        size = draft.program.bytes
        text = write(place, draft.program, draft.seen, result, _sizes(size, recorder.came_from, draft))
        fails, printed = fails_alone(place) if check else (True, "")
        if fails:
            return Reproduction(
                place, subject(draft.program), draft.seen.counts, draft.program.operations, len(text.splitlines()),
                size, recorder.came_from, printed, result,
            )  # fmt: skip
    clear(place)
    raise UsageError(
        f"no reproduction of {result.op} was written: run alone, it does not fail in the same way ({printed}). {result}"
    )


def _operation_of(run: OriginSearch, origin: MemoryWrite) -> MemoryWrite:
    """The operation to export: the origin, or the first that reads a tensor which was already bad."""
    if origin.index >= 0:
        return origin
    way = way_of(run, origin)
    if len(way) < 2:
        raise UsageError(f"the {origin.op} was already not finite, and no operation of the step reads it")
    return way[1]


def _captured(run: OriginSearch, at: MemoryWrite, execute: Execute) -> CallRecorder:
    """A recorder with everything that went into an operation and into the function around it."""

    def play(**settings: Any) -> CallRecorder:
        ran = execute(lambda names: CallRecorder(names, at.index, **settings))
        if not isinstance(ran.recorder, CallRecorder):
            raise _OtherStep(f"the step could not be run again: {ran.error}")
        return ran.recorder

    def same(recorder: CallRecorder) -> bool:
        return recorder.calls[: at.index + 1] == run.recorder.calls[: at.index + 1]

    recorder = play()
    if not same(recorder):  # some code checks whether a function mode is active, and then behaves differently
        recorder = play(listens=False)
        if not same(recorder):
            raise _OtherStep(
                "the step behaves differently when run again. Check that it does not take its batch from an iterator."
            )
    calls_it = recorder.found_call is not None and recorder.in_backward == (at.phase == "backward")
    return play(call=recorder.found_call) if calls_it else recorder


def _attempts(recorder: CallRecorder, at: MemoryWrite, *, born: bool) -> Iterator[Draft]:
    """Reproductions to try, the most readable first."""
    function, operation = recorder.captured_call, recorder.captured_operation
    assert operation is not None
    backward = recorder.in_backward
    of_operation = drafts(operation, backward=False, fixed=_own(operation, born))
    if function is None or (backward and not at.parents and _arrived_bad(function)):
        yield from of_operation
        return
    of_function = drafts(function, backward=backward, fixed=_own(function, born))
    if function.bad.operations > _MOST_OPERATIONS:
        yield from of_operation
        yield from of_function
        return
    others = []
    for draft in of_function:
        if backward or all(had or not has for had, has in zip(at.counts, draft.seen.counts, strict=True)):
            yield draft
        else:
            others.append(draft)
    yield from of_operation
    yield from others


def _arrived_bad(captured: CapturedCalls) -> bool:
    return any(count(gradient).total for gradient in captured.upstream.values())


def _own(captured: CapturedCalls, born: bool) -> set[Key]:
    """Replace bad inputs that are unrelated to this failure; returns which inputs those were."""
    fixed: set[Key] = set()
    if born:
        for key in captured.bad.inputs:
            value = captured.values.get(key)
            if value is not None and count(value).total:
                mend(value)
                fixed.add(key)
        for gradient in captured.upstream.values():
            mend(gradient)
    return fixed


def _sizes(size: int, before: int, draft: Draft) -> str:
    program = draft.program
    shapes = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in program.leaves.items())
    calls = count_of(program.operations, "operation")
    return f"{calls} on {shapes or 'nothing'}: {size:,} bytes of tensors, where the step read {before:,}."
