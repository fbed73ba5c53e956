"""One pass of a replay, in its own process: `python -m surefoot.replay.worker ORDER.json`.

The order names the incident, the script or target, and the file of the answer. The process ends as soon as the answer
is written, whatever the script would still do.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from surefoot.errors import SurefootError
from surefoot.experiments.changes.guard import protect
from surefoot.record.incidents.bundle import as_plain
from surefoot.record.incidents.environment import hardware, switches, versions
from surefoot.record.incidents.reading import StoredIncident, read_incident
from surefoot.replay.export.export import Execute, export_found
from surefoot.replay.locate.find import OriginSearch, first_bad, result_of, run_step
from surefoot.replay.locate.names import Names
from surefoot.replay.locate.recorder import OperationRecorder
from surefoot.replay.locate.result import as_data
from surefoot.replay.tensor_difference import differences
from surefoot.watch.run_script import Target, clean

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.experiments.changes.guard import Guard, WriteRules
    from surefoot.record.incidents.summary import IncidentPrints
    from surefoot.replay.first_step import FirstStep
    from surefoot.replay.locate.memory_writes import MemoryWrite
    from surefoot.replay.processes import PassOrder


class Answer:
    """The result of one pass; written once, and then the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.notes: list[str] = []
        self.found: dict[str, object] = {"status": "failed", "notes": self.notes}

    def leave(self) -> NoReturn:
        """Write the answer and end the process, without any of the script's exit hooks."""
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(as_plain(self.found), allow_nan=False))
        os.replace(part, self._path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def fail(self, why: str) -> NoReturn:
        """The step could not be run."""
        self.found |= {"status": "failed", "error": why}
        self.leave()

    def ran(
        self, incident: StoredIncident, prints: IncidentPrints, gradients: Mapping[str, Tensor], home: torch.device
    ) -> None:
        """The step was run."""
        recorded = incident.state.get("gradients") or {}
        self.found |= {
            "status": "ran",
            "prints": prints,
            "differences": differences(recorded, gradients),
            "versions": versions(),
            "hardware": hardware(home),
            "switches": switches(),
        }

    def located(self, found: tuple[OriginSearch, MemoryWrite] | None, again: Execute, export: str | None) -> None:
        """Add the first bad operation, and write the reproduction if one is wanted."""
        self.found["origin"] = None if found is None else as_data(result_of(*found))
        if export is None:
            return
        if found is None:
            self.found["reproduction"] = {"error": "every value of the step is finite: there is nothing to reproduce"}
            return
        try:
            made = export_found(*found, again, export, check=True)
        except Exception as error:
            self.found["reproduction"] = {"error": f"{type(error).__name__}: {error}"}
        else:
            self.found["reproduction"] = made.as_data()


def main(order_path: str) -> NoReturn:
    """Execute one order."""
    order: PassOrder = json.loads(Path(order_path).read_text())
    answer = Answer(Path(order["answer"]))
    rules: WriteRules = {
        "scratch": order["scratch"],
        "out": order["export"],
        "writable": order["writable"],
        "began": order["began"],
    }
    files: Guard | None = None
    try:
        incident = read_incident(order["incident"])
        files = protect(rules)
        _use_threads(incident)
        if order["target"] is not None:
            _run_target(order, incident, answer)
        else:
            _run_script(order, incident, answer)
    except SurefootError as error:
        answer.fail(" ".join(str(error).split()))
    except BaseException as error:
        if files is not None and files.refused:
            answer.fail(
                f"the script writes to {files.refused}, which existed before and is outside the working "
                "directory; a replay would change it. Make it write elsewhere: its arguments may follow `--script`"
            )
        if isinstance(error, PermissionError):
            answer.fail(
                f"the script ended with PermissionError: {error}. In a replay it may write only inside the working "
                "directory: have it write there, or name the folder with --allow-writes"
            )
        error.__traceback__ = clean(error.__traceback__)
        traceback.print_exception(error)
        line = (str(error).strip().splitlines() or [""])[0]
        answer.fail(f"{'the script ended' if isinstance(error, SystemExit) else type(error).__name__}: {line}")
    answer.leave()


def _use_threads(incident: StoredIncident) -> None:
    """Use the recorded number of threads: sums that are split over threads add up in another order."""
    threads = incident.facts["switches"].get("threads")
    if isinstance(threads, int) and 1 <= threads <= 4096:
        torch.set_num_threads(threads)


def _run_target(order: PassOrder, incident: StoredIncident, answer: Answer) -> None:
    from surefoot.replay.target import TargetStep

    target = order["target"]
    assert target is not None, "an order has a script, a module or a target"
    step = TargetStep(target, incident)
    step.run()
    answer.notes += step.notes
    answer.ran(incident, step.prints(), step.gradients(), step.home)
    if order["locate"]:
        model = step.models[0] if len(step.models) == 1 else torch.nn.ModuleList(step.models)
        names = Names(step.run, model, step.optimizer)

        def again(make: Callable[[Names], OperationRecorder]) -> OriginSearch:
            return run_step(step.run, names, make(names))

        try:
            found = first_bad(lambda repair: again(lambda names: OperationRecorder(names, repair)))
            answer.located(found, again, order["export"])
        except Exception as error:
            answer.notes.append(f"the first bad operation was not found: {type(error).__name__}: {error}")


def _run_script(order: PassOrder, incident: StoredIncident, answer: Answer) -> None:
    from surefoot.replay.first_step import FirstStep
    from surefoot.replay.hooks import install
    from surefoot.replay.script import ScriptRuns

    name = order["script"] or order["module"]
    assert name is not None, "an order has a script, a module or a target"
    target = Target(name, tuple(order["arguments"]), is_module=order["script"] is None)
    scratch = Path(tempfile.mkdtemp(prefix="surefoot-replay-", dir=Path(order["answer"]).parent))
    first_step = FirstStep(incident)
    install(first_step, scratch)
    runs = ScriptRuns(target, first_step)

    def over() -> NoReturn:
        objects = first_step.objects
        assert objects is not None
        answer.notes += first_step.notes
        answer.ran(incident, objects.prints(), objects.gradients(), objects.layout.home)
        if order["locate"]:
            try:
                runs.locate(located)
            except BaseException as error:
                answer.notes.append(f"the first bad operation was not found: {type(error).__name__}: {error}")
        answer.leave()

    def located(found: tuple[OriginSearch, MemoryWrite] | None) -> NoReturn:
        answer.located(found, runs.again, order["export"])
        answer.leave()

    try:
        runs.run(over)
    except SystemExit as leaving:
        answer.fail(f"the script ended (exit code {leaving.code}) before its first step{_why(first_step)}")
    answer.fail(f"the script ended before its first step was complete{_why(first_step)}")


def _why(first_step: FirstStep) -> str:
    if first_step.objects is None:
        return ": it does not train a model with the names and shapes of the captured weights"
    if first_step.feeds and first_step.draws_seen == 0:
        return ": it drew no batch for training from a DataLoader or from stabilizer.resume"
    return f": it drew {first_step.draws_seen} batches and did not complete a step"


if __name__ == "__main__":
    main(sys.argv[1])
