"""A real browser for the page, where the machine has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-precise-memory-info", "--in-process-gpu",
]  # fmt: skip


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def can_install() -> bool:
    """Whether this is a machine like a container, where the tests may install what they need."""
    return os.name == "posix" and os.geteuid() == 0 and shutil.which("apt-get") is not None


def install_browser() -> str | None:
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", *command], env=environment, capture_output=True, timeout=300, check=False)
    return find_browser()


@contextmanager
def opened_tab(scale: float = 1) -> Iterator[Any]:
    """The one tab of a headless browser, or a skipped test that says what is missing.

    A page keeps nothing but its address, so one tab serves all visits; a new one takes three times as long.
    """
    found = find_browser()
    if found is None and can_install():
        with FileLock(Path(tempfile.gettempdir()) / "esper-install-chromium.lock"):
            found = find_browser() or install_browser()
    if found is None:
        warnings.warn("THE PAGE IS NOT TESTED: there is no chromium on this machine", stacklevel=2)
        pytest.skip("no chromium on this machine; install it, and the page is tested")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see the extra dev")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield browser.new_context(device_scale_factor=scale).new_page()
        finally:
            browser.close()


class Visit:
    """A page in the tab, with everything that went wrong on it."""

    def __init__(
        self,
        tab: Any,
        address: str,
        hash: str = "",
        width: int = 1440,
        theme: str = "light",
        ready: str = "true",
    ) -> None:
        self.page = tab
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=theme, reduced_motion="reduce")
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
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
