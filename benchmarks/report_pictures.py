"""Make the pictures of docs/report.md: the report of a broken and of a healthy run, as a browser shows them.

    python benchmarks/report_pictures.py

Runs two scripts of the zoo under `surefoot run`, writes their reports and photographs them with headless Chromium.
Needs playwright and Chromium; about a minute on one core.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from surefoot.report.page.html import write_report

ROOT = Path(__file__).parents[1]
ZOO = ROOT / "src" / "surefoot" / "zoo" / "tuning"
SCRIPTS = {"broken": "lr.too-high/digits_sgd.py", "healthy": "healthy/char_gpt.py"}
WIDTH, TALLEST = 1120, 1900
MOST_BYTES = 300_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def report_of(script: str, scratch: Path) -> Path:
    """The report of one script, run as a user would from its own folder."""
    path = ZOO / script
    folder = scratch / path.stem
    command = [sys.executable, "-m", "surefoot", "run", "--out", str(folder), path.name]
    subprocess.run(command, cwd=path.parent, capture_output=True, check=True)
    return write_report(folder)


def photograph(page: Path, picture: Path) -> None:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        tab = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-drawn]", state="attached")
        tab.wait_for_timeout(300)
        # As many whole charts as fit.
        ends = tab.evaluate("[...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().bottom)")
        tall = max(end for end in ends if end <= TALLEST) + 16
        tab.screenshot(path=picture, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": tall})
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, script in SCRIPTS.items():
            picture = ROOT / "docs" / f"report-{name}.png"
            photograph(report_of(script, Path(scratch)), picture)
            size = picture.stat().st_size
            print(f"{picture.relative_to(ROOT)}: {size / 1000:.0f} kB")
            if size > MOST_BYTES:
                raise SystemExit(f"{picture.name} is larger than {MOST_BYTES / 1000:.0f} kB")


if __name__ == "__main__":
    main()
