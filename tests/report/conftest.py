"""A real browser, without a network, for the tests that need one; left out with a reason where there is none."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from report_browser import Opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a file in a page of its own; a second argument changes the window (`viewport`, `color_scheme`)."""
    contexts = []

    def opened(path: Path | str, offline: bool = True, **options: Any) -> Opened:
        context = browser.new_context(
            offline=offline, **{"viewport": {"width": 1100, "height": 800}, "reduced_motion": "reduce", **options}
        )
        contexts.append(context)
        found = Opened(context.new_page())
        found.go(path if isinstance(path, str) else path.resolve().as_uri())
        return found

    yield opened
    for context in contexts:
        context.close()
