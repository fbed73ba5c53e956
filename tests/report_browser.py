"""A page of a real browser, with everything it said and asked for."""

from __future__ import annotations

from typing import Any

from patience import HANG_SECONDS


class Opened:
    """A page, with everything it said and asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        page.set_default_timeout(1000 * HANG_SECONDS)
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def go(self, url: str) -> Any:
        self.page.goto(url)
        self.page.wait_for_selector("html[data-drawn]", state="attached")
        # A plot is laid out and drawn in a microtask after it is made.
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self.page

    def unfold(self) -> Any:
        """Open the sections that are closed at first, and wait until their charts are drawn."""
        self.page.evaluate("() => document.querySelectorAll('details.fold').forEach((fold) => { fold.open = true; })")
        self.page.evaluate("() => new Promise((done) => setTimeout(() => requestAnimationFrame(done), 50))")
        return self.page
