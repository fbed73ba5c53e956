"""A training process that is killed again and again, and ends where it would have ended.

    python benchmarks/torture.py [--kills 200] [--seed 0] [--minutes 15] [--epochs 20] [--repeat]

A small network with dropout and batch norm is trained with AdamW, a warm-up and cosine schedule, a shuffling loader and
two microbatches a step, and saves every few steps. One process after another does so; each is ended with SIGKILL at a
random moment, and the next goes on from what it finds on the disk. A part of the kills is aimed: the parent watches for
the hidden folder that a checkpoint is written in, stops the process then, and kills it if the folder is still there.
What such a kill has hit is told by what it left behind. Whenever the run reaches its end, it is compared, and begun
anew in another folder.

Importing torch takes seconds, so this process imports it, starts no thread, and forks every life. What is killed is a
real process with its files, its threads and its page cache; the machine itself stays up, so a power cut is not tried.

With `--repeat` some batches are bad, and `TrainingRecovery(repeat=True)` goes back, takes the steps once more as they
were, and then without the bad batch. A part of the kills is aimed at these repeats. A step then has one state and one
loss for each time that it is taken in the training without kills, and every life must go through some of those.

What is checked, against the same training without any kill:

- every state that a life begins with is finite, is the newest whole one on the disk, and equals, bit for bit, the state
  after that step: parameters, buffers, moments, schedule, and the random streams;
- every step of every life has the very loss that it has there;
- a kill costs at most one interval. A checkpoint is written while training goes on, and one that is not whole is not
  there: the steps taken meanwhile come on top. So of the steps lost, those during which nothing was being written must
  be no more than the interval; the rest is told beside it;
- the end is the same, bit for bit.

Exits with 1 if any of it does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.core.random_state import read_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVERY, ROWS, BATCH = 5, 264, 8
WIDTH = 192
AIMED = 0.55
"""The share of kills that are aimed at a checkpoint being written."""
STEP = struct.Struct("<iid")
"""What a life notes of each step: its number, whether a checkpoint was being written, its loss."""


BAD_EVERY = 110
"""With `--repeat`, every so many steps the batch is one that throws the weights far away."""


def is_bad(step: int) -> bool:
    """Whether the batch of this step is a bad one."""
    return step % BAD_EVERY == 70


def steps_of(epochs: int) -> int:
    return epochs * -(-ROWS // BATCH) // 2


class Training:
    """The run of one life, built anew each time.

    `seed` is 0 for a life that finds nothing to go on from, as a script has it at its top. All others get one of their
    own: whatever is not restored then shows.
    """

    def __init__(self, folder: Path, epochs: int, seed: int, repeats: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(ROWS, 16, generator=generator), torch.randn(ROWS, 1, generator=generator))
        sf.seed_everything(seed)
        self.epochs, self.repeats = epochs, repeats
        self.model = nn.Sequential(
            nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.GELU()
        ).append(nn.Linear(WIDTH, 1))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        if repeats:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = sf.warmup_cosine(self.optimizer, warmup_steps=20, total_steps=steps_of(epochs))
        self.stabilizer = sf.TrainingStabilizer(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            clip=None if repeats else sf.AdaptiveGradientClipper(),
            accumulate=2,
            checkpoints=sf.CheckpointManager(folder, every_steps=EVERY, keep_last=8),
            # Nothing is refused for the size of its gradient: a bad batch reaches the weights.
            checker=sf.StabilityChecker(explosion=None, spike=None) if repeats else None,
            recovery=sf.TrainingRecovery(repeat=True) if repeats else None,
        )
        self.loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    def begin(self) -> Any:
        """Load what there is; gives the batches that are left."""
        return self.stabilizer.resume(self.loader, epochs=self.epochs)

    def steps(self, batches: Any) -> Iterator[tuple[int, float]]:
        """Train on; gives the number and the loss of every optimizer step."""
        total = 0.0
        for x, y in batches:
            bad = self.repeats and is_bad(self.stabilizer.steps)
            loss = F.mse_loss(self.model(x), 300 * y if bad else y)
            self.stabilizer.backward(loss)
            total += float(loss.detach())
            if not self.stabilizer.step().accumulating:
                yield self.stabilizer.steps, total
                total = 0.0

    def digest(self) -> str:
        """One number for everything that decides how the run goes on."""
        tree = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict(), read_streams()]
        digest = hashlib.sha256()
        for leaf in leaves(tree):
            digest.update(
                leaf.detach().contiguous().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode()
            )
        return digest.hexdigest()

    def finite(self) -> bool:
        tree = [self.model.state_dict(), self.optimizer.state_dict()]
        return all(bool(leaf.isfinite().all()) for leaf in leaves(tree) if isinstance(leaf, Tensor))


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key in tree:
            yield key
            yield from leaves(tree[key])
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


# ---- one life, in a process of its own ----------------------------------------------------------------------------


class Book:
    """Files that a life writes to, and that outlive it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.start, self.trace, self.end, self.said = (folder / name for name in ("start", "trace", "end", "said"))

    def steps(self) -> list[tuple[int, bool, float]]:
        """Number, whether a checkpoint was being written, and loss of every step, as far as the life came."""
        noted = self.trace.read_bytes() if self.trace.exists() else b""
        whole = len(noted) // STEP.size * STEP.size
        return [(step, bool(writing), loss) for step, writing, loss in STEP.iter_unpack(noted[:whole])]


def live(folder: Path, book: Book, epochs: int, seed: int, repeats: bool) -> None:
    """Go on from what is on the disk, to the end. Notes each step; the first line says what was loaded."""
    logging.basicConfig(filename=book.said, level=logging.ERROR if repeats else logging.WARNING)
    training = Training(folder, epochs, seed, repeats)
    batches = training.begin()
    start = {"step": training.stabilizer.steps, "finite": training.finite(), "digest": training.digest()}
    book.start.write_text(json.dumps(start) + "\n")
    with book.trace.open("ab", buffering=0) as trace:
        for step, loss in training.steps(batches):
            trace.write(STEP.pack(step, threading.active_count() > 1, loss))
    book.end.write_text(training.digest())


def undisturbed(folder: Path, book: Book, epochs: int, repeats: bool) -> None:
    """The same training, never killed; notes what the state is after every step, each time that it is taken."""
    if repeats:
        logging.getLogger("surefoot").setLevel(logging.ERROR)
    training = Training(folder, epochs, 0, repeats)
    batches = training.begin()
    digests: dict[int, list[str]] = {0: [training.digest()]}
    with book.trace.open("ab", buffering=0) as trace:
        for step, loss in training.steps(batches):
            trace.write(STEP.pack(step, 0, loss))
            digests.setdefault(step, []).append(training.digest())
    book.end.write_text(training.digest())
    training.stabilizer.restore()  # imports what a start imports
    book.start.write_text(json.dumps({"digests": digests, "modules": sorted(sys.modules)}))


def forked(work: Callable[..., None], *given: Any) -> int:
    """Run it in a child; gives its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*given)
        for thread in threading.enumerate():  # as the interpreter would on its way out
            if thread is not threading.main_thread():
                thread.join()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# ---- the one that kills -------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What happened, counted."""

    kills: int = 0
    early: int = 0
    """Before the first step of that life."""
    writing: int = 0
    """A checkpoint was being written, by the half of it that was left behind."""
    starts: int = 0
    from_nothing: int = 0
    taken: int = 0
    lost: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    """Steps lost by each kill during which nothing was being written."""
    ended: int = 0
    repeating: int = 0
    """While steps were being repeated."""
    wrong: list[str] = field(default_factory=list)

    def check(self, holds: bool, claim: str) -> None:
        if not holds:
            self.wrong.append(claim)


@dataclass(frozen=True)
class Reference:
    """The training without any kill."""

    digests: dict[int, list[str]]
    losses: dict[int, set[str]]
    end: str
    repeated: int
    """Steps that were taken more than once."""
    returns: set[int]
    """How many steps were taken when the run went back."""


def reference(folder: Path, epochs: int, repeats: bool) -> Reference:
    book = Book(folder / "book")
    _, status = os.waitpid(forked(undisturbed, folder / "run", book, epochs, repeats), 0)
    if status:
        raise SystemExit("the training without any kill failed; see above.")
    found = json.loads(book.start.read_text())
    for module in found["modules"]:  # so that no life has to import them again
        with suppress(ImportError):
            importlib.import_module(module)
    losses: dict[int, set[str]] = {}
    for step, _, loss in book.steps():
        losses.setdefault(step, set()).add(str(loss))
    digests = {int(step): each for step, each in found["digests"].items()}
    numbers = [step for step, _, _ in book.steps()]
    returns = {then for then, now in pairwise(numbers) if now <= then}
    return Reference(digests, losses, book.end.read_text(), len(numbers) - len(losses), returns)


def hidden(place: Path) -> set[str]:
    """Folders that are being written."""
    return {name for name in listed(place) if name.endswith(".part")}


def whole(place: Path) -> int:
    """The newest checkpoint that is in its place; 0 if there is none."""
    names = (name for name in listed(place) if not name.startswith(".") and not name.endswith(".evidence"))
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def listed(place: Path) -> list[str]:
    try:
        return os.listdir(place)
    except FileNotFoundError:
        return []


def _stop(child: int) -> bool:
    """Have it stand still, so that it cannot finish before it is killed; `False` if it came to its end before."""
    os.kill(child, signal.SIGSTOP)
    return os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED


class Killer:
    """Lets a life live for a while."""

    def __init__(self, chance: random.Random, repeats: bool) -> None:
        self._chance, self._repeats = chance, repeats
        self._start_seconds, self._write_seconds = 0.3, 0.02  # learned as it goes

    def wait(self, child: int, book: Book, place: Path) -> bool:
        """Until it is time to kill; `False` if the child came to its end before."""
        began = time.monotonic()
        if self._repeats and self._chance.random() < AIMED:
            return self._until_repeating(child, book)
        if self._chance.random() < AIMED:
            return self._until_writing(child, book, place, began)
        # From a moment after the fork to a few intervals after the start, short times as likely as long ones.
        seconds = self._start_seconds * 10 ** self._chance.uniform(-1.0, 0.6)
        return self._until(child, lambda: time.monotonic() - began > seconds)

    def _until_repeating(self, child: int, book: Book) -> bool:
        """Until some steps after a return, by what the life has noted."""
        further = self._chance.randrange(1, 25)

        def reached() -> bool:
            steps = [step for step, _, _ in book.steps()]
            back = next((i for i in range(1, len(steps)) if steps[i] <= steps[i - 1]), len(steps))
            return len(steps) >= back + further

        return self._until(child, reached)

    def _until_writing(self, child: int, book: Book, place: Path, began: float) -> bool:
        if not self._until(child, book.trace.exists):
            return False
        self._start_seconds += 0.1 * (time.monotonic() - began - self._start_seconds)
        first = STEP.size * self._chance.randrange(3 * EVERY)
        while self._until(child, lambda: book.trace.stat().st_size > first and bool(hidden(place))):
            seen = time.monotonic()
            due = seen + self._chance.random() * self._write_seconds
            self._until(child, lambda due=due: time.monotonic() > due or not hidden(place))
            if not _stop(child):
                return False
            if hidden(place):
                return True
            self._write_seconds += 0.1 * (time.monotonic() - seen - self._write_seconds)  # it was too quick
            os.kill(child, signal.SIGCONT)
        return False

    def _until(self, child: int, reached: Callable[[], bool]) -> bool:
        while not reached():
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return False
            time.sleep(0.0003)
        return True


def torture(folder: Path, epochs: int, kills: int, seed: int, seconds: float, repeats: bool) -> Tally:
    """Kill that often, or as often as the time allows; then let the run come to its end."""
    tally, chance = Tally(), random.Random(seed)
    (folder / "reference").mkdir()
    expected = reference(folder / "reference", epochs, repeats)
    tally.check(bool(expected.repeated) == repeats, f"{expected.repeated} steps were repeated without any kill")
    assert len(listed(Path("/proc/self/task"))) <= 1, "a process with threads must not be forked"
    killer, until = Killer(chance, repeats), time.monotonic() + seconds
    run, life = folder / "run-0", 0
    while True:
        life += 1
        book, place = Book(folder / f"life-{life}"), run / "checkpoints"
        before = whole(place)
        child = forked(live, run, book, epochs, life if before else 0, repeats)
        spared = tally.kills >= kills or time.monotonic() > until
        killed = not spared and killer.wait(child, book, place)
        if killed:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed = killed and os.WIFSIGNALED(status)  # it may have come to its end just then
        examine(tally, expected, book, before, life)
        if killed:
            count_kill(tally, expected, book, before, place)
            continue
        tally.check(status == 0, f"life {life} failed with status {status}")
        if status == 0:
            tally.ended += 1
            tally.check(book.end.read_text() == expected.end, f"life {life}: the end differs")
        run = folder / f"run-{life}"
        if spared or status:
            return tally


def examine(tally: Tally, expected: Reference, book: Book, before: int, life: int) -> None:
    """Whether a process began and continued as the training without kills does."""
    said = book.said.read_text() if book.said.exists() else ""
    tally.check(not said, f"life {life} said: {said}")
    if book.start.exists() and (line := book.start.read_text()).endswith("\n"):
        start = json.loads(line)
        tally.starts += 1
        tally.from_nothing += start["step"] == 0
        tally.check(start["finite"], f"life {life} loaded a state that is not finite")
        tally.check(start["step"] == before, f"life {life} loaded step {start['step']}, and {before} was there")
        same = start["digest"] in expected.digests[start["step"]]
        tally.check(same, f"life {life}: the state it loaded is not that after step {start['step']}")
    steps = book.steps()
    tally.taken += len(steps)
    differ = [step for step, _, loss in steps if str(loss) not in expected.losses.get(step, ())]  # NaN equals nothing
    tally.check(not differ, f"life {life}: the losses of steps {differ[:5]} differ")
    numbers = [before, *(step for step, _, _ in steps)]
    follow = all(
        now == then + 1 or (expected.repeated and (now <= then or (now == then + 2 and is_bad(then))))
        for then, now in pairwise(numbers)
    )
    tally.check(follow, f"life {life}: steps are left out")


def count_kill(tally: Tally, expected: Reference, book: Book, before: int, place: Path) -> None:
    """What the kill cost. A next life begins with the newest whole checkpoint: `examine` sees to that."""
    tally.kills += 1
    steps, newest = book.steps(), whole(place)
    returns = [i for i in range(1, len(steps)) if steps[i][0] <= steps[i - 1][0]]
    if returns:  # steps that were undone are not lost
        tally.repeating += steps[-1][0] < max(step for step, _, _ in steps)
        steps, before = steps[returns[-1] :], 0
    if steps and steps[-1][0] in expected.returns:  # the return may be under way: its steps are undone
        steps, before = [], 0
    tally.early += not steps
    tally.writing += bool(hidden(place))
    lost = [writing for step, writing, _ in steps if step > newest]
    tally.lost.append(len(lost))
    tally.idle.append(lost.count(False))
    tally.check(newest >= before, f"step {before} was there before a kill, and {newest} after it")
    cost = f"a kill cost {lost.count(False)} steps without any being written: the newest is {newest}, the steps were "
    tally.check(lost.count(False) <= EVERY, cost + ", ".join(f"{step}{'w' * writing}" for step, writing, _ in steps))


def report(tally: Tally, epochs: int, seconds: float) -> None:
    share = tally.writing / max(tally.kills, 1)
    rows = {
        "kills": f"{tally.kills}",
        "  before the life's first step": f"{tally.early}",
        "  in the middle of writing a checkpoint": f"{tally.writing} ({share:.0%})",
        "  while steps were being repeated": f"{tally.repeating}",
        "starts that came to load": f"{tally.starts}, {tally.from_nothing} with nothing there yet",
        "optimizer steps taken": f"{tally.taken}, {sum(tally.lost)} of them lost to kills",
        "steps lost by a kill, at most": f"{max(tally.lost, default=0)} (a save is due every {EVERY})",
        "  while nothing was being written, at most": f"{max(tally.idle, default=0)}",
        "runs that reached their end": f"{tally.ended}, of {steps_of(epochs)} steps each",
        "claims that did not hold": f"{len(tally.wrong)}",
        "seconds": f"{seconds:.0f}",
    }
    for name, value in rows.items():
        print(f"{name:45}{value}")
    for claim in tally.wrong[:10]:
        print(f"WRONG: {claim}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a training run again and again; it must end as if never killed.")
    parser.add_argument("--kills", type=int, default=200, help="how often to kill it")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which it is killed")
    parser.add_argument("--minutes", type=float, default=15.0, help="kill no more after this long")
    parser.add_argument("--epochs", type=int, default=20, help="how long a run is")
    parser.add_argument("--repeat", action="store_true", help="with bad batches, and steps that are repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with TemporaryDirectory(prefix="surefoot-torture-") as folder:
        tally = torture(Path(folder), given.epochs, given.kills, given.seed, 60 * given.minutes, given.repeat)
    report(tally, given.epochs, time.monotonic() - began)
    raise SystemExit(1 if tally.wrong or not tally.ended else 0)


if __name__ == "__main__":
    main()
