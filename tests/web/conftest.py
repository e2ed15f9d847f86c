"""Headless Chromium and tabs of it for tests of the web pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.web.devtools import Tab, chromium, find_chromium

OpenTab = Callable[..., Tab]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The DevTools address of a running Chromium. Skips without one, fails in `make test-web`."""
    binary = find_chromium()
    if binary is None:
        why = "runs where Chromium is installed (Debian: apt-get install chromium); MSTAR_CHROMIUM can name it"
        if os.environ.get("MSTAR_NEED_BROWSER"):
            pytest.fail(why)
        pytest.skip(why)
    with chromium(binary, Path(tmp_path_factory.mktemp("chromium"))) as address:
        yield address


@pytest.fixture
def tab(browser: str) -> Iterator[OpenTab]:
    """Open tabs of a width; all are closed after the test."""
    tabs: list[Tab] = []

    def make(width: int = 1280, *, is_dark: bool = False) -> Tab:
        tabs.append(Tab(browser, width, is_dark=is_dark))
        return tabs[-1]

    yield make
    for each in tabs:
        each.close()
