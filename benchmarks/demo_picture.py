"""Draws docs/demo.svg: the training loss of the demo's three runs."""

from __future__ import annotations

from pathlib import Path

from surefoot.build.picture import Chart, Series, to_svg
from surefoot.demo import Faults, load_digits_split, train

STEPS, SEED, SMOOTH = 400, 0, 9


def smoothed(values: list[float]) -> list[float]:
    return [sum(values[max(0, i - SMOOTH + 1) : i + 1]) / (i + 1 - max(0, i - SMOOTH + 1)) for i in range(len(values))]


def main() -> None:
    data, faults = load_digits_split(), Faults(STEPS)
    lines = []
    for name, injected, guard in [("bare", faults, False), ("guarded", faults, True), ("no faults", None, False)]:
        losses = train(name, data, STEPS, SEED, injected, guard).losses
        # The guarded loss of a refused step belongs to a batch that never reached the weights.
        shown = [losses[max(i - 1, 0)] if guard and i in vars(faults).values() else v for i, v in enumerate(losses)]
        lines.append(Series(name, range(STEPS), smoothed(shown)))
    chart = Chart(
        "Digits: the same faults, bare and guarded",
        "step",
        "training loss",
        tuple(lines),
        log_y=True,
        marks=(
            (faults.exploding, "gradient x 10,000"),
            (faults.nan_batch, "NaN pixels"),
            (faults.flipped_bit, "flipped bit"),
        ),
    )
    Path(__file__).parents[1].joinpath("docs/demo.svg").write_text(to_svg(chart))


if __name__ == "__main__":
    main()
