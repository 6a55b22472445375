"""A real Chromium on the live page of a test's server, and what it complained about."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PATIENCE_MS = 60_000


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Debian's Chromium; skips where it is not installed."""
    binary = shutil.which("chromium")
    if binary is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with sync_playwright() as playwright:
        # CI runs as root, where Chromium has no sandbox; it sees nothing but our own server.
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, url: str, *, width: int = 1280, dark: bool = False) -> Iterator[Page]:
    """The live page, connected; fails at the end when the browser has complained about anything."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"{request.url}: {request.failure}"))
    page.goto(f"{url}/ui")
    page.wait_for_selector("#link[data-state=live]")
    try:
        yield page
        # A stream that the page itself ends is a failed request to the browser.
        assert [text for text in complaints if "net::ERR_ABORTED" not in text] == []
    finally:
        context.close()
