"""The experiments of `surefoot bisect`: one row per change, and the losses of the runs in one chart.

The chart shows the baseline, the changes that cure it, and a few that do not; the table has all of them. The file may
come from another version or have been edited, so whatever does not fit is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.core.wording import capital
from surefoot.report.page.charts import one_series

if TYPE_CHECKING:
    from surefoot.report.page.sections import ExperimentRow, ExperimentSection, PageChart, PageSeries

MOST_CURVES = 6
_ORDER = {"fails": 0, "cures": 1, "does not": 2, "cannot tell": 3}
_TEXT = 500


def experiments_of(bisected: Mapping[str, object] | None) -> ExperimentSection | None:
    """The section of the page; `None` if there were no experiments."""
    runs = (bisected or {}).get("runs")
    rows = [row for run in runs if (row := _row(run)) is not None] if isinstance(runs, list) else []
    if not rows or not isinstance(runs, list):
        return None
    sentence = str((bisected or {}).get("sentence", ""))[:_TEXT]
    return {"sentence": capital(sentence), "rows": rows, "chart": _chart(runs)}


def _row(run: object) -> ExperimentRow | None:
    if not isinstance(run, dict) or run.get("name") == "repeat":
        return None
    loss = run.get("final_loss")
    return {
        "title": str(run.get("title") or run.get("name", ""))[:_TEXT],
        "verdict": str(run.get("verdict", ""))[:_TEXT],
        "why": str(run.get("why", ""))[:_TEXT],
        "steps": run["steps"] if isinstance(run.get("steps"), int) and run["steps"] > 0 else None,
        "loss": float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None,
    }


def _chart(runs: list[object]) -> PageChart | None:
    drawn = [
        run for run in runs if isinstance(run, dict) and run.get("verdict") in _ORDER and run.get("name") != "repeat"
    ]
    drawn.sort(key=lambda run: _ORDER[run["verdict"]])
    series = [one for run in drawn[:MOST_CURVES] if (one := _series(run)) is not None]
    if len(series) < 2:
        return None
    for one in series:
        one.pop("constant", None)
    caption = "The same script with one change each."
    return {"id": "experiments", "title": "Loss", "unit": "", "caption": caption, "log": True, "series": series}


def _series(run: Mapping[str, Any]) -> PageSeries | None:
    try:
        points = [(int(step), float(value)) for step, value in run.get("loss", [])]
    except (TypeError, ValueError, OverflowError):
        return None
    if not points:
        return None
    steps, values = np.array([step for step, _ in points]), np.array([value for _, value in points])
    return one_series(str(run.get("title") or run.get("name", ""))[:_TEXT], "", "line", steps, values, ())
