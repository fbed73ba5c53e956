"""Weights & Biases: scalars, histograms, events as text, and W&B's own alerts for severe events.

W&B numbers the rows of a run itself and drops a row whose number decreases, which both a rollback and a second part of
the run would cause. So rows are logged without a number; each part logs its step as a value (`step`, `generator/step`),
and every curve names the one that is its x axis. Names are passed to W&B one by one or by their group
(`layer_grad_norm/*`): a rule for `*` would match the other parts too.

Offline (`mode="offline"` or `WANDB_MODE=offline`) there is no login and no network access; the run begins when the sink
is constructed. Online it begins in the sink's thread, so that a slow network does not delay training. W&B's helper
process is started at construction in both cases: its exit handler is then older than the run log's and runs after the
last rows are written. (And Python 3.12 starts no threads at exit, when the first rows of a very short run arrive.)

Not enabled: W&B's console capture, which replaces `sys.stdout`; `settings=wandb.Settings(console="auto")` does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from surefoot.errors import UsageError, require
from surefoot.record.bins import EDGES
from surefoot.record.sinks.extras import load
from surefoot.record.sinks.named_values import BatchReader, PlacedItem, Point, encodable, full_name, sentence, shortened

if TYPE_CHECKING:
    from surefoot.record.messages import Batch, Event
    from surefoot.types import Severity

LONGEST_NAME = 250
LONGEST_TITLE = 63
FINISH_SECONDS = 30.0
LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


class WandbSink:
    """Writes the run log into a W&B run. Needs `pip install -e ".[wandb]"`."""

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        alerts: Sequence[Severity] = ("error",),
        every_steps: int = 1,
        layers_every_steps: int = 100,
        **init: Any,
    ) -> None:
        """Further arguments (`name`, `mode`, `dir`, `config`, `tags`, …) go to `wandb.init`.

        `run` is one that you began: it is written to and left open. `alerts` are the severities that are also sent as
        W&B alerts, by mail or Slack according to your W&B settings; `()` for none. `layers_every_steps=0` leaves the
        per-layer numbers out; skipped and non-finite steps are always sent.
        """
        require(not set(alerts) - set(LEVELS), f"`alerts` may hold {', '.join(LEVELS)}; got {alerts!r}.")
        require(run is None or (project is None and not init), "pass either `run` or arguments of a new one, not both.")
        self._wandb = load("wandb", "wandb")
        self._reader = BatchReader(every_steps, layers_every_steps)
        self._alerts = frozenset(alerts)
        self._run = run
        self._owns_run = run is None
        self._init = {"project": project, **init}
        self._defined: set[str] = set()
        self._closed = False
        if self._owns_run:
            self._prepare()

    def write(self, batch: Batch) -> None:
        """Log one row per step, layer row and event."""
        if self._closed:
            return
        reading = self._reader.read(batch)
        self._begin()
        for point in reading.points:
            self._log(point, point.values.items())
        for placed in reading.histograms:
            self._log(placed, self._histogram(placed))
        for placed in reading.events:
            self._log(placed, [("events/log", sentence(placed.item))])
            if placed.item.severity in self._alerts:
                self._alert(placed.item)

    def tick(self) -> None:
        """Begin the run, if it has not begun."""
        if not self._closed:
            self._begin()

    def close(self) -> None:
        """Finish the run, unless it was given."""
        if self._closed:
            return
        self._closed = True
        if self._owns_run and self._run is not None:
            self._run.finish()

    def _prepare(self) -> None:
        """Start W&B's helper process, and make sure that no thread asks for a password."""
        wandb = self._wandb
        service = wandb.setup()
        is_local = (self._init.get("mode") or service.settings.mode) in ("offline", "disabled")
        if not is_local and not wandb.login(prompt=False, verify=False):
            raise UsageError(
                "WandbSink found no W&B credentials. Run `wandb login` or set WANDB_API_KEY; to log without a "
                'network, use `WandbSink(mode="offline")` or WANDB_MODE=offline.'
            )
        given = self._init.get("settings")
        ours = {"console": "off", "silent": True, "finish_timeout": FINISH_SECONDS}
        theirs = given if isinstance(given, dict) else given.model_dump(exclude_unset=True) if given else {}
        self._init["settings"] = wandb.Settings(**{**ours, **theirs})
        self._init.setdefault("reinit", "create_new")  # `wandb.log` continues to write to the user's own run
        if is_local:
            with suppress(Exception):  # the first batch tries again; training must not fail because of this
                self._begin()
        elif hasattr(service, "ensure_service"):  # not documented by W&B; without it the last rows may be missing
            service.ensure_service()

    def _begin(self) -> None:
        if self._run is None:
            self._run = self._wandb.init(**self._init)

    def _log(self, at: Point | PlacedItem, values: Iterable[tuple[str, Any]]) -> None:
        part = _plain(at.part)
        row = {}
        for name, value in values:
            self._define(part, name)
            row[shortened(full_name(part, name), LONGEST_NAME)] = value
        if row:
            self._run.log({**row, full_name(part, "step"): at.step, full_name(part, "time"): at.time})

    def _define(self, part: str, name: str) -> None:
        group, slash, _ = name.partition("/")
        label = full_name(part, f"{group}/*" if slash else group)
        if label not in self._defined:
            self._defined.add(label)
            self._run.define_metric(label, step_metric=full_name(part, "step"), step_sync=False)

    def _histogram(self, placed: PlacedItem) -> list[tuple[str, Any]]:
        histogram = placed.item
        counts = [int(count) for count in histogram.counts]
        if not any(counts):
            return []
        value = self._wandb.Histogram(np_histogram=(counts, list(EDGES)))
        return [(f"histogram_{histogram.kind}/{histogram.layer}", value)]

    def _alert(self, event: Event) -> None:
        title = f"{event.event}: {event.cause}" if event.cause else str(event.event)
        self._run.alert(title=encodable(title)[:LONGEST_TITLE], text=sentence(event), level=LEVELS[event.severity])


def _plain(part: str) -> str:
    """A part's name without characters that W&B reads as a path or a pattern in a metric's name."""
    return part.replace(".", "_").replace("*", "_")
