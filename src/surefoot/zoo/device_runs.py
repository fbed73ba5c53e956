"""The runs of a score on a device other than the CPU that the scripts were written for.

Each script runs under `surefoot run` after `surefoot.zoo.on_device.use_device`. One that ends with an error is run
again without surefoot: first as it is, on the CPU. If it fails there too, the error is the script's own, and the run
counts. Otherwise it runs without surefoot on the device. An error there means that this script cannot run on it: the
run is listed with the error and not counted. Without one, surefoot has caused it, and the run counts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.core.files import write_file
from surefoot.zoo.fork_server import ForkedRun, ForkServer
from surefoot.zoo.score import DEVICE_FILE, TIMEOUT_S, Result, folder_of, prepare, read

if TYPE_CHECKING:
    from surefoot.zoo import Specimen


def run_all(
    device: str,
    chosen: list[Specimen],
    seeds: list[int],
    jobs: int,
    keep: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every script with every seed on a device, `jobs` at a time, and diagnose each."""
    found = []
    with tempfile.TemporaryDirectory(prefix="surefoot-zoo-") as scratch, ForkServer(jobs) as server:
        root = keep.absolute() if keep is not None else Path(scratch, "runs")
        waiting: dict[Path, Generator[ForkedRun, int | None, Result]] = {}
        for specimen in chosen:
            for seed in seeds:
                own = Path(scratch, str(len(waiting)))
                examined = DeviceRun(device, specimen, seed, folder_of(root, specimen, seed), own, timeout_s)
                waiting[own] = steps = examined.steps()
                server.submit(next(steps))
        for run, code in server.ended():
            try:
                server.submit(waiting[Path(run.place).parent].send(code))
            except StopIteration as end:
                found.append(end.value)
                done(end.value)
    return sorted(found, key=lambda result: result.name)


@dataclass(frozen=True)
class DeviceRun:
    """A script on a device, and what else must be run to judge an error."""

    device: str
    specimen: Specimen
    seed: int
    folder: Path
    scratch: Path
    """Where each of its runs gets a working directory, which is new."""
    timeout_s: float

    def steps(self) -> Generator[ForkedRun, int | None, Result]:
        """Yields what to run next, is sent its exit code, and returns the result."""
        prepare(self.folder)
        code = yield self._run("watched", self.folder / "output.txt", self.device, watched=True)
        result = self._read(code)
        if code is not None and (result.trouble or result.exit_code):
            result.cannot_run = yield from self._error_on_device()
        write_file(self.folder / DEVICE_FILE, json.dumps({"device": self.device, "cannot_run": result.cannot_run}))
        result.device = self.device
        return result

    def _error_on_device(self) -> Generator[ForkedRun, int | None, str]:
        """The error that the script by itself has on the device and not on the CPU; empty if there is none."""
        output = self.scratch / "output.txt"
        if (yield self._run("cpu", output)) == 0 and (yield self._run("device", output, self.device)) not in (0, None):
            return _last_line(output)
        return ""

    def _run(self, name: str, output: Path, device: str = "", watched: bool = False) -> ForkedRun:
        place = self.scratch / name
        place.mkdir(parents=True)
        return ForkedRun(
            script=str(self.specimen.path),
            arguments=(str(self.seed),),
            place=str(place),
            output=str(output),
            run_folder=str(self.folder) if watched else "",
            timeout_s=self.timeout_s,
            device=device,
        )

    def _read(self, code: int | None) -> Result:
        trouble = ""
        if code is None:
            trouble = f"still running after {self.timeout_s:g} s"
        elif not (self.folder / "facts.json").exists():
            trouble = f"left no facts, exit code {code}: {_last_line(self.folder / 'output.txt')}"
        held = self.specimen
        return read(self.folder, held.half, held.truth, held.path.stem, self.seed, trouble)


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n") if output.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
