"""Do no harm, checked: every script of the zoo and a list of odd ones, with and without `surefoot run`.

Compared bit for bit: what the script printed, how it ended, and at its end every parameter, buffer and optimizer state
of every module and optimizer it ever made, and the Python, NumPy and torch random streams.

    python benchmarks/bitwise.py [--device cuda] [--jobs 16] [--only PART] [--odd | --zoo] [--json FILE]

Each script runs twice as it is and twice watched. Where the two plain runs agree, the watched ones must agree with
them; what differs between plain runs (on a GPU, sums whose order is not fixed) is listed and not compared. A difference
counts only if two more plain runs do not show it.

torch is imported once; each run is a fork of that process, so that hundreds of scripts take minutes. (The start of a
run, with torch not yet imported, is the business of tests/watch.) The parent never touches the GPU: a fork could not
use it then.

The scripts are written for a CPU. With `--device cuda` they run unmodified after `surefoot.zoo.on_device.use_device`,
the same with and without surefoot: the default device is the GPU. A script that ends with an error nevertheless is
listed with it and not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # pyarrow's own thread would miss in forks
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from odd_scripts import ODD, PRELUDE
from torch import Tensor, nn

from surefoot.zoo.fork_server import import_watching
from surefoot.zoo.on_device import use_device

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

DEADLINE_SECONDS = 240.0
GPU = "cuda"


def digest_of(value) -> str:
    """A hash of nested state; tensors by their bytes."""
    made = hashlib.sha256()
    if isinstance(value, Tensor):
        if value.is_meta or isinstance(value, nn.parameter.UninitializedParameter):
            return f"empty{tuple(value.shape) if value.is_meta else ''}"
        value = value.detach()
        if value.layout is not torch.strided:
            value = value.coalesce().to_dense() if value.layout is torch.sparse_coo else value.values()
        value = value.as_subclass(Tensor).cpu().contiguous()
        made.update(f"{value.dtype}{tuple(value.shape)}".encode())
        made.update(torch.view_as_real(value).numpy().tobytes() if value.is_complex() else bytes_of(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            made.update(f"{key}={digest_of(item)};".encode())
    elif isinstance(value, (list, tuple)):
        for item in value:
            made.update(digest_of(item).encode())
    else:
        made.update(repr(value).encode() if not callable(value) else b"f")
    return made.hexdigest()[:16]


def bytes_of(value: Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


class Census:
    """Every module and optimizer a script makes, in the order it makes them."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for kind, members in ((nn.Module, self.modules), (torch.optim.Optimizer, self.optimizers)):
            self._count(kind, members)

    @staticmethod
    def _count(kind, members) -> None:
        original = kind.__init__

        def counted(self, *args, **kwargs):
            members.append(self)
            return original(self, *args, **kwargs)

        kind.__init__ = counted

    def state(self) -> dict[str, object]:
        modules, optimizers = list(self.modules), list(self.optimizers)
        found: dict[str, object] = {"modules": len(modules), "optimizers": len(optimizers)}
        with torch._C.DisableTorchFunction():
            for number, module in enumerate(modules):
                held = {**module.__dict__.get("_parameters", {}), **module.__dict__.get("_buffers", {})}
                for name, tensor in held.items():
                    if tensor is not None:
                        found[f"{number} {type(module).__name__}.{name}"] = digest_of(tensor)
                        found[f"{number} {type(module).__name__}.{name}.grad"] = digest_of(tensor.grad)
            for number, optimizer in enumerate(optimizers):
                groups = getattr(optimizer, "param_groups", [])
                found[f"groups {number}"] = [digest_of(group) for group in groups]
                found[f"state {number}"] = [
                    digest_of(optimizer.state.get(tensor, {})) for group in groups for tensor in group["params"]
                ]
        found["torch stream"] = digest_of(torch.get_rng_state())
        if torch.cuda.is_initialized():
            found["CUDA stream"] = digest_of(torch.cuda.get_rng_state())
        found["python stream"] = digest_of(random.getstate())
        found["numpy stream"] = digest_of(np.random.get_state())
        return found


def run_in_child(path: str, arguments: tuple[str, ...], watched: bool, folder: Path, device: str = "cpu") -> None:
    """In a forked child: become the script."""
    from surefoot.commands import run as command
    from surefoot.watch import messages
    from surefoot.watch import run_script as execute

    folder.mkdir(parents=True, exist_ok=True)
    out = os.open(folder / "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.chdir(folder)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    messages._stream = sys.stderr
    random.seed(20)  # a fork draws a new seed of its own
    if device == GPU:
        use_device(torch.device(GPU))
    census = Census()
    target = execute.Target(path, arguments)
    session = command.RunSession(command.Request(target, str(folder / "run")))
    leave = os._exit
    try:
        if watched:
            session.run()
        else:
            execute.run(target, session.ending)
    except SystemExit:
        pass
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    os._exit = leave
    code = session.ending.code
    try:
        state = census.state()
    except RuntimeError as error:  # a GPU that has failed an assertion answers nothing more
        state = {"state": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    if watched:
        session._close()
    sys.stdout.flush()
    (folder / "state.json").write_text(json.dumps({"code": code, **state}))


@dataclass(frozen=True)
class Script:
    """What is run."""

    name: str
    path: str
    arguments: tuple[str, ...] = ()


@dataclass
class Result:
    """What came of one script."""

    name: str
    verdict: str = "equal"
    """`equal`, `differs`, `varies` (nothing of it is the same in two plain runs) or `cannot run`."""
    why: str = ""
    """Why it cannot run."""
    differences: list[str] = field(default_factory=list)
    """What differs when it is watched."""
    varying: list[str] = field(default_factory=list)
    """What differs between plain runs; the rest was compared."""
    compared: int = 0
    unwatched: dict[str, str] = field(default_factory=dict)
    """Probes that failed in the watched runs."""
    seconds: float = 0.0
    """Of all its runs together."""


class Outcome:
    """What one run left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors = _text(folder / "stderr")
        path = folder / "state.json"
        self.state: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        if self.state is not None:
            self.state["stdout"] = _text(folder / "stdout")

    @property
    def trouble(self) -> str:
        """How it failed; empty if it came to its end."""
        last = next((line for line in reversed(self.errors.splitlines()) if line.strip()), "nothing was said")
        if self.state is None:
            return f"no end was reached: {last[:200]}"
        return f"{last[:200]}" if self.state["code"] or "state" in self.state else ""

    def problems(self) -> dict[str, str]:
        """Probes that failed."""
        facts, found = self.folder / "run" / "facts.json", {}
        if facts.exists():
            found = json.loads(facts.read_text()).get("problems", {})
        if not (self.folder / "run" / "findings.json").exists():
            found["diagnosis"] = self.errors[-300:]
        return found


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def examine(script: Script, device: str, times: int) -> Generator[list[bool], list[Outcome], Result]:
    """Yields whether the next runs are watched, gets what they left, and returns what follows."""
    result = Result(script.name)
    plain = yield [False] * times
    trouble = next((each.trouble for each in plain if each.trouble), "")
    if any(each.state is None for each in plain) or (trouble and device != "cpu"):
        result.verdict, result.why = "cannot run", trouble
        return result
    watched = yield [True] * times
    for each in watched:
        result.unwatched |= each.problems()
    for each in watched:
        if each.state is None:
            result.verdict, result.differences = "differs", [f"watched: {each.trouble}"]
            return result
    suspects = _differing(plain[0], watched)
    if suspects:
        plain += yield [False] * 2
    varying = _differing(plain[0], plain[1:])
    result.varying = list(varying)
    result.differences = [words for key, words in suspects.items() if key not in varying]
    result.compared = len((plain[0].state or {}).keys() - varying.keys())
    result.verdict = "differs" if result.differences else "equal" if result.compared else "varies"
    return result


def _differing(one: Outcome, others: list[Outcome]) -> dict[str, str]:
    """What is not the same in all of them, with words for it."""
    found: dict[str, str] = {}
    for other in others:
        left, right = one.state or {}, other.state or {}
        for key in {**left, **right}:
            if left.get(key) != right.get(key):
                found[key] = f"stdout: {first_difference(left[key], right[key])}" if key == "stdout" else key
    return found


def first_difference(left: str, right: str) -> str:
    one, other = left.splitlines(), right.splitlines()
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"line {number + 1}: {a[:160]!r} against {b[:160]!r}"
    return f"{len(one)} lines against {len(other)}"


@dataclass
class _Job:
    """A script on its way."""

    script: Script
    talk: Generator[list[bool], list[Outcome], Result]
    folder: Path
    wanted: list[bool]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    count: int = 0
    seconds: float = 0.0


class Runner:
    """Runs scripts side by side, each run in a fork of this process."""

    def __init__(self, device: str, jobs: int, times: int, deadline: float, scratch: Path) -> None:
        self.device, self.jobs, self.times, self.deadline, self.scratch = device, jobs, times, deadline, scratch
        self._waiting: deque[tuple[_Job, int]] = deque()
        self._running: dict[int, tuple[_Job, int, Path, float]] = {}

    def results(self, scripts: list[Script], until: float = float("inf")) -> Iterator[Result]:
        """What came of each, as they end; scripts that were not begun by `until` are left out."""
        ahead = deque(enumerate(scripts))
        while ahead or self._waiting or self._running:
            while len(self._running) < self.jobs and (self._waiting or ahead):
                if not self._waiting:
                    if time.monotonic() > until:
                        ahead.clear()
                        break
                    number, script = ahead.popleft()
                    talk = examine(script, self.device, self.times)
                    self._ask(_Job(script, talk, self.scratch / str(number), next(talk)))
                self._start(*self._waiting.popleft())
            for job in self._ended():
                result = self._answer(job)
                if result is not None:
                    yield result

    def _ask(self, job: _Job) -> None:
        job.outcomes = {}
        self._waiting.extend((job, number) for number in range(len(job.wanted)))

    def _start(self, job: _Job, number: int) -> None:
        folder = job.folder / str(job.count) / "x"  # of the same name in every run: scripts print paths
        job.count += 1
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.setsid()
            code = 1
            try:
                run_in_child(job.script.path, job.script.arguments, job.wanted[number], folder, self.device)
                code = 0
            finally:
                os._exit(code)
        self._running[child] = (job, number, folder, time.monotonic())

    def _ended(self) -> list[_Job]:
        """The scripts all of whose runs have ended."""
        time.sleep(0.005)
        whole = []
        for child, (job, number, folder, began) in list(self._running.items()):
            if time.monotonic() - began > self.deadline:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            if os.waitpid(child, os.WNOHANG)[0] == 0:
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)  # whatever it started
            del self._running[child]
            job.seconds += time.monotonic() - began
            job.outcomes[number] = Outcome(folder)
            if len(job.outcomes) == len(job.wanted):
                whole.append(job)
        return whole

    def _answer(self, job: _Job) -> Result | None:
        """Tell a script's examination what its runs left: its result, or `None` if it wants more runs."""
        try:
            job.wanted = job.talk.send([job.outcomes[number] for number in range(len(job.wanted))])
        except StopIteration as end:
            end.value.seconds = round(job.seconds, 2)
            shutil.rmtree(job.folder, ignore_errors=True)
            return end.value
        self._ask(job)
        return None


def scripts(only: str, odd: bool, zoo: bool, seed: int, scratch: Path) -> Iterator[Script]:
    if odd:
        for name, text in ODD.items():
            if only in f"odd/{name}":
                path = scratch / f"{name}.py"
                path.write_text(PRELUDE + text + "\n")
                yield Script(f"odd/{name}", str(path))
    if zoo:
        from surefoot.zoo import specimens

        for specimen in specimens(only=only):
            yield Script(specimen.name, str(specimen.path), (str(seed),))


def machine(device: str) -> str:
    """What it runs on. The GPU is asked for its name by a process of its own; empty if there is none."""
    words = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"{os.cpu_count()} cores"]
    if device == GPU:
        ask = [
            sys.executable,
            "-c",
            f"import torch; torch.ones(1, device={GPU!r}); print(torch.cuda.get_device_name())",
        ]
        told = subprocess.run(ask, capture_output=True, text=True)
        if told.returncode:
            return ""
        words.insert(0, told.stdout.strip())
    return ", ".join(words)


VERDICTS = ("equal", "differs", "varies", "cannot run")


def report(results: list[Result], facts: dict[str, Any]) -> None:
    """A table by kind of script, then everything that is not plainly equal."""
    kinds: dict[str, list[Result]] = {}
    for result in results:
        kinds.setdefault(result.name.partition("/")[0], []).append(result)
    print(f"{'':10}{'scripts':>10}" + "".join(f"{verdict:>12}" for verdict in VERDICTS))
    for kind, members in [*kinds.items(), ("all", results)]:
        counts = [sum(each.verdict == verdict for each in members) for verdict in VERDICTS]
        print(f"{kind:10}{len(members):>10}" + "".join(f"{count:>12}" for count in counts))
    for result in results:
        if result.verdict == "cannot run":
            print(f"CANNOT RUN {result.name}: {result.why}")
        elif result.varying:
            shown = ", ".join(result.varying[:3])
            print(f"VARIES {result.name}: {len(result.varying)} of its plain values by themselves ({shown})")
    compared = [result for result in results if result.verdict in ("equal", "differs")]
    equal, unwatched = sum(not each.differences for each in compared), sum(bool(each.unwatched) for each in results)
    left = f"; {facts['left_out']} not run for lack of time" if facts["left_out"] else ""
    print(f"{facts['date']}, {facts['machine']}, device {facts['device']}, {facts['jobs']} at a time")
    took = f"{facts['seconds']:.0f} s{left}"
    print(f"bitwise equal: {equal} of {len(compared)} scripts; probes failed in {unwatched}; {took}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--times", type=int, default=2, help="runs of each script, plain and watched")
    parser.add_argument("--only", default="", help="only scripts with this in their name")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--odd", action="store_true", help="only the odd scripts")
    parser.add_argument("--zoo", action="store_true", help="only the zoo")
    parser.add_argument("--deadline", type=float, default=DEADLINE_SECONDS, help="seconds that one run may take")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no script after so many")
    parser.add_argument("--json", type=Path, help="also write the results into this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    import_watching()
    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine(asked.device)}
    if not facts["machine"]:
        parser.error("no CUDA device here: use `--device cpu`")
    facts |= {"device": asked.device, "jobs": asked.jobs, "times": asked.times}
    began, found, every = time.monotonic(), [], not asked.odd and not asked.zoo
    with tempfile.TemporaryDirectory() as scratch:
        wanted = list(scripts(asked.only, asked.odd or every, asked.zoo or every, asked.seed, Path(scratch)))
        runner = Runner(asked.device, asked.jobs, asked.times, asked.deadline, Path(scratch))
        for result in runner.results(wanted, began + 60 * asked.minutes):
            found.append(result)
            said = [f"DIFFERS {result.name}: {difference}" for difference in result.differences[:6]]
            said += [f"UNWATCHED {result.name}: {probe}: {why}" for probe, why in result.unwatched.items()]
            for line in said:
                print(line, flush=True)
    found.sort(key=lambda result: result.name)
    facts |= {"seconds": round(time.monotonic() - began, 1), "left_out": len(wanted) - len(found)}
    if asked.json:
        asked.json.write_text(json.dumps({**facts, "results": [asdict(result) for result in found]}, indent=1))
    report(found, facts)
    sys.exit(any(result.differences for result in found))


if __name__ == "__main__":
    main()
