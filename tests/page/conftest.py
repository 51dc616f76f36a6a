"""One browser for all tests of the page; every server has a port, and so storage, of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from page.browser import Browser, BrowserError


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    try:
        browser = Browser()
    except (BrowserError, OSError) as error:
        pytest.skip(f"no browser: {error}")
    with browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser, which must not have complained of anything at the end."""
    chromium.problems()
    yield chromium
    problems = chromium.problems()
    origin = chromium.run("return location.origin")
    chromium.devtools("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
    chromium.open("about:blank")
    assert problems == []
