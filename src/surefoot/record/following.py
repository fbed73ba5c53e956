"""Follow a run while it is being written: what is new since the last look.

`surefoot watch` and `surefoot serve` call `poll` now and then:

    follower = RunFollower("runs/exp1")
    while True:
        news = follower.poll()       # News(scalars, layers, histograms, device, events, restarted)
        if news.restarted: forget everything shown so far
        show(news)

The first poll gives everything there is (as `load_run` would), later ones only what came since. `restarted` is true on
the first poll, and whenever what was given before no longer holds: another session has superseded some of it, or the
folder was emptied; then everything is given anew. A folder that does not exist yet has no news.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.record import events as event_file
from surefoot.record.reading import RunTables, is_run_folder, load_run
from surefoot.record.schema import public_schema
from surefoot.record.segments import FOLDER, segments_in

if TYPE_CHECKING:
    import os

    import pyarrow as pa

    from surefoot.record.messages import Event


@dataclass(frozen=True)
class News:
    """Rows and events that came since the last poll, in the columns of `RunTables`."""

    scalars: pa.Table
    layers: pa.Table
    histograms: pa.Table
    device: pa.Table
    events: list[Event] = field(default_factory=list)
    restarted: bool = False
    """Forget what was given before: this is everything."""

    def __bool__(self) -> bool:
        tables = (self.scalars, self.layers, self.histograms, self.device)
        return self.restarted or bool(self.events) or any(table.num_rows for table in tables)


class RunFollower:
    """Looks at one run folder again and again. Not for several threads at once."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._seen: tuple[object, ...] = ()

    def poll(self) -> News:
        """What is new since the last poll. Never raises for the state of the files."""
        state = self._state()
        if state == self._seen or not is_run_folder(self.folder):
            return News(
                *(public_schema(table).empty_table() for table in ("scalars", "layers", "histograms", "device"))
            )
        self._seen = state
        run: RunTables = load_run(self.folder)
        return News(run.scalars, run.layers, run.histograms, run.device, run.events, restarted=True)

    def _state(self) -> tuple[object, ...]:
        paths = [
            self.folder / event_file.NAME,
            *(self.folder / FOLDER / str(name) for name in segments_in(self.folder)),
        ]
        return tuple((path.name, path.stat().st_size) for path in paths if path.exists())
