"""A real browser for tests of pages: Debian's chromium, offline, with everything that goes wrong collected."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LOCAL = ("file:", "data:", "blob:", "about:")


def find() -> str | None:
    """The browser's executable; playwright's own download is not used, so that Debian's security updates are."""
    if find_spec("playwright") is None:
        return None
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


BROWSER = find()
needs_browser = [
    pytest.mark.e2e,
    pytest.mark.skipif(BROWSER is None, reason="no browser: `apt-get install chromium` and `pip install playwright`"),
]


@contextmanager
def launched() -> Iterator[Any]:
    """One browser process, for a module's fixture: starting it takes about a second."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(
    file: Path | str, *, dark: bool = False, width: int = 1366, height: int = 768, browser: Any = None
) -> Iterator[tuple[Any, list[str]]]:
    """The page, and a list that fills with errors on its console, exceptions and requests that leave the machine.

    Args:
        file: a path, or a `file://` address with a hash.
        browser: of `launched`; without it one is started for this page.
    """
    if browser is None:
        with launched() as own, open_page(file, dark=dark, width=width, height=height, browser=own) as opened:
            yield opened
        return
    address = file if isinstance(file, str) else file.resolve().as_uri()
    context = browser.new_context(
        offline=True,
        color_scheme="dark" if dark else "light",
        viewport={"width": width, "height": height},
        reduced_motion="reduce",
    )
    errors: list[str] = []
    try:
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda line: errors.append(f"console: {line.text}") if line.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(f"exception: {error}"))
        page.on("request", lambda sent: None if sent.url.startswith(LOCAL) else errors.append(f"request: {sent.url}"))
        page.goto(address)
        yield page, errors
    finally:
        context.close()


CONTRAST = """(elements) => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => parse(text).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    const [, , , alpha = 1] = parse(colour);
    if (alpha !== 0 && alpha !== 1) throw new Error(`half transparent: ${colour}`);
    return alpha ? colour : behind(element.parentElement);
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  return [...elements]
    .map((one) => [ratio(light(getComputedStyle(one).color), light(behind(one))), one.textContent])
    .sort((a, b) => a[0] - b[0])[0];
}"""


def lowest_contrast(page: Any, elements: str) -> tuple[float, str]:
    """Returns the lowest contrast of text to what is behind it, by WCAG 2, and that text; `elements` is an expression
    in JavaScript."""
    return page.evaluate(f"({CONTRAST})({elements})")
