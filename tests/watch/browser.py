"""A real browser for the page, where the machine has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-precise-memory-info",
]  # fmt: skip


@contextmanager
def opened_browser() -> Iterator[Any]:
    """A headless browser, or a skipped test that says what is missing."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium on this machine: the page is tested where there is one")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see the extra dev")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page in the browser, with everything that went wrong on it."""

    def __init__(
        self,
        browser: Any,
        address: str,
        hash: str = "",
        width: int = 1440,
        theme: str = "light",
        scale: float = 1,
        ready: str = "true",
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            device_scale_factor=scale,
            color_scheme=theme,
            reduced_motion="reduce",
        )
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("requestfinished", lambda request: self.requests.append(request.url))
        self.page.goto(f"{address}#{hash}")
        self.wait(f"() => document.body.dataset.ready === {ready!r}")

    def wait(self, script: str, seconds: float = 8.0) -> None:
        """Until the page says yes; fails after `seconds`."""
        self.page.wait_for_function(script, timeout=1000 * seconds, polling=20)

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def go(self, hash: str) -> None:
        """To another state of the same page, and until it is drawn."""
        self.ask(f"() => {{ location.hash = {hash!r} }}")
        self.settle()

    def settle(self) -> None:
        self.ask("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.settle()

    def rounds(self, run: str) -> list[int]:
        """The rounds of a run that the page holds."""
        script = "async (run) => (await import('/js/store.js')).runs.get(run).rounds.map((r) => r.round)"
        return list(self.page.evaluate(script, run))

    def close(self) -> None:
        self.context.close()
