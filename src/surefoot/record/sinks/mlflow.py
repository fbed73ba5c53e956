"""MLflow: scalars as metrics and events as tags and counts, on any tracking server or a plain sqlite file.

Only `MlflowClient` is used, with its address: the global state of `mlflow.start_run` belongs to the user. On a server
the run begins in the sink's thread; in a sqlite file it begins when the sink is constructed, because a new file takes
seconds to set up, which would otherwise delay training. The run always gets a name: MLflow would otherwise draw one
from Python's random stream, which belongs to the training.

NaN is kept. Inf becomes the largest float, ±1.8e308, in MLflow's sqlite store; the run log has it as it was. MLflow has
no histograms: only the NaN and Inf found in them are sent. It is also the slowest of the sinks, about 0.2 ms of Python
per number: `every_steps` thins.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from surefoot.errors import require
from surefoot.record.sinks.extras import load
from surefoot.record.sinks.named_values import (
    DIGEST_LENGTH,
    BatchReader,
    NamedValues,
    PlacedItem,
    digest,
    full_name,
    sentence,
    shortened,
)

if TYPE_CHECKING:
    from surefoot.record.messages import Batch

LONGEST_NAME = 250
LONGEST_TAG = 5000
MOST_METRICS_PER_CALL = 1000


class MLflowSink:
    """Writes the run log into an MLflow run. Needs `pip install -e ".[mlflow]"`."""

    def __init__(
        self,
        tracking_uri: str = "sqlite:///mlflow.db",
        *,
        experiment: str = "surefoot",
        run_name: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        every_steps: int = 1,
        layers_every_steps: int = 100,
    ) -> None:
        """`run_id` is a run that you began: it is written to and left open.

        `run_name` is by default the date and time. `layers_every_steps=0` leaves the per-layer numbers out; skipped and
        non-finite steps are always sent.
        """
        require(bool(tracking_uri), "`tracking_uri` must be an address like `sqlite:///mlflow.db`; got an empty one.")
        if "mlflow" not in sys.modules:  # MLflow reports its use from threads; disable this
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._tracking = load("mlflow.tracking", "mlflow")
        self._entities = load("mlflow.entities", "mlflow")
        if tracking_uri.startswith("sqlite"):
            load("sqlalchemy", "mlflow")
            load("alembic", "mlflow")
        self._uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name or time.strftime("surefoot-%Y%m%d-%H%M%S")
        self._tags = dict(tags or {})
        self._reader = BatchReader(every_steps, layers_every_steps)
        self._client: Any = None
        self.run_id = run_id
        """The id of the run; on a server `None` until it has begun."""
        self._owns_run = run_id is None
        self._status = "FINISHED"
        self._closed = False
        if tracking_uri.startswith("sqlite"):
            with suppress(Exception):  # the first batch tries again; training must not fail because of this
                self._begin()

    def write(self, batch: Batch) -> None:
        """Log all metrics of the batch in few calls."""
        if self._closed:
            return
        reading = self._reader.read(batch)
        self._begin()
        metrics = self._metrics(reading)
        while chunk := list(islice(metrics, MOST_METRICS_PER_CALL)):
            self._client.log_batch(self.run_id, metrics=chunk)
        for placed in reading.events:
            self._tag(placed)

    def tick(self) -> None:
        """Begin the run, if it has not begun."""
        if not self._closed:
            self._begin()

    def close(self) -> None:
        """Mark the run as finished, or as failed if training was halted; unless it was given."""
        if self._closed:
            return
        self._closed = True
        if self._owns_run and self.run_id is not None:
            self._client.set_terminated(self.run_id, status=self._status)

    def _begin(self) -> None:
        if self._client is None:
            self._client = self._tracking.MlflowClient(tracking_uri=self._uri)
        if self.run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
            run = self._client.create_run(experiment, run_name=self._run_name, tags=self._tags)
            self.run_id = run.info.run_id

    def _metrics(self, reading: NamedValues) -> Iterator[Any]:
        for point in reading.points:
            for name, value in point.values.items():
                key = _allowed(full_name(point.part, name))
                yield self._entities.Metric(key, value, int(point.time * 1000), point.step)

    def _tag(self, placed: PlacedItem) -> None:
        event = placed.item
        if event.event == "halt":
            self._status = "FAILED"
        text = sentence(event)[:LONGEST_TAG]
        self._client.set_tag(self.run_id, "surefoot.last_event", f"{event.event}: {text}")
        if event.severity == "error":
            self._client.set_tag(self.run_id, "surefoot.last_error", f"{event.event}: {text}")


def _allowed(name: str) -> str:
    """A name that MLflow accepts: word characters and `-. :/`, a plain relative path, at most 250 characters.

    A changed name gets a digest at its end: `a<b` and `a>b` stay two curves.
    """
    words = (re.sub(r"[^\w\-. :]", "_", word) for word in name.split("/"))
    plain = "/".join(word if word.strip(".") else "_" for word in words)
    if plain == name:
        return shortened(name, LONGEST_NAME)
    return shortened(f"{plain[: LONGEST_NAME - DIGEST_LENGTH]}{digest(name)}", LONGEST_NAME)
