"""Query a run with SQL: DuckDB reads the tables that `load_run` returns, without copying them.

    python examples/query_run.py runs/exp1

Needs `pip install duckdb`. Without a folder it writes a small run first, with a spike in it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import TYPE_CHECKING, NamedTuple

import duckdb
import numpy as np

from surefoot import RunLog, load_run
from surefoot.record.messages import LayerRows, StepRow

if TYPE_CHECKING:
    from surefoot import RunTables

QUESTIONS = {
    "The steps with the largest gradient, and how much of it was cut off": """
        select step, loss, round(grad_norm, 2) as grad_norm, round(1 - clip_factor, 3) as cut_off
        from scalars where isfinite(grad_norm) order by grad_norm desc, step limit 5
    """,
    "How the loss went, by tenths of the run": """
        select tenth, min(step) as from_step, round(median(loss), 4) as median_loss, count(*) as steps_kept,
               count(*) filter (not isfinite(loss)) as not_finite
        from (select *, ntile(10) over (order by step) as tenth from scalars where loss is not null)
        group by tenth order by tenth
    """,
    "The layers whose gradient grew most around the worst step": """
        with worst as (select arg_max(step, grad_norm) as step from scalars where isfinite(grad_norm))
        select layer, round(max(grad_norm) filter (abs(layers.step - worst.step) <= 10) / median(grad_norm), 1) as times
        from layers, worst where isfinite(grad_norm) group by layer having times is not null
        order by times desc, layer limit 5
    """,
    "What happened, and how often": """
        select event, cause, count(*) as times, min(step) as first_step from events group by all order by times desc
    """,
}


class Answer(NamedTuple):
    """What came back for a question."""

    columns: list[str]
    rows: list[tuple[object, ...]]


def ask(run: RunTables) -> dict[str, Answer]:
    """The answer to every question."""
    with duckdb.connect() as database:
        for name in ("scalars", "layers", "histograms", "device"):
            database.register(name, getattr(run, name))
        database.execute("create table events (event text, step bigint, cause text, severity text, summary text)")
        for each in run.events:
            database.execute(
                "insert into events values (?, ?, ?, ?, ?)",
                [each.event, each.step, each.cause, each.severity, each.summary],
            )
        found = {question: database.sql(query) for question, query in QUESTIONS.items()}
        return {question: Answer(answer.columns, answer.fetchall()) for question, answer in found.items()}


def write_a_run(folder: str) -> None:
    """A run of 2,000 steps in which the head explodes at step 1,200."""
    generator = np.random.default_rng(0)
    layers = (*(f"block{index}.weight" for index in range(4)), "head.weight")
    with RunLog(folder) as log:
        for step in range(2000):
            norms = generator.lognormal(0.0, 0.1, len(layers)).astype(np.float32)
            if step == 1200:
                norms[-1] *= 50
                log.event("spike", step, "the gradient is 50 times its usual norm", severity="warning", cause="spike")
            total = float(np.linalg.norm(norms))
            loss = 2.0 * 0.999**step + (5.0 if step == 1200 else 0.0)
            log.take(StepRow(step, time.time(), loss=loss, grad_norm=total, clip_factor=min(1.0, 4.0 / total), lr=1e-3))
            if step % 10 == 0:
                log.take(LayerRows(step, layers, {"grad_norm": norms}))


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = arguments[0] if arguments else made
        if not arguments:
            write_a_run(folder)
        for question, (columns, rows) in ask(load_run(folder)).items():
            print(f"\n{question}")
            for row in (columns, *rows):
                print("  " + "".join(f"{shown(value):<16}" for value in row).rstrip())


def shown(value: object) -> str:
    """A cell of the answer."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(sys.argv[1:])
