"""Log lines about requests that wait for slots or pages."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mstar_core.engine.base import MemoryUse
from mstar_core.worker.report import LONG_S, Waits


class Full:
    """A runner whose request 7 waits as the test says."""

    name = "LLM"
    why = "waits for slots"

    def pages_and_waits(self) -> dict[int, tuple[int, str]]:
        return {7: (0, self.why), 8: (800, "")}

    def memory(self) -> MemoryUse:
        return MemoryUse(pages_total=2547, pages_used=800, slots_total=520, slots_used=402)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def test_a_long_wait_and_its_end_are_logged_once_with_the_use(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waits, runner = Waits(), Full()
    runners: Any = {"LLM": runner}
    for number in range(40):
        waits.update(100.0 + number, runners, steps=number)
    (told,) = said(caplog)
    in_use = "402 of 520 slots, 800 of 2,547 pages in use"
    assert told == ("INFO", f"request 7 waits for slots of LLM ({in_use}) for {LONG_S:.0f} s")
    runner.why = ""
    waits.update(150.0, runners, steps=50)
    assert said(caplog) == [("INFO", "request 7 no longer waits for slots of LLM, after 50.0 s")]


def test_a_long_wait_in_which_nothing_ran_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    waits, runners = Waits(), dict[str, Any](LLM=Full())
    waits.update(100.0, runners, steps=5)
    waits.update(100.0 + LONG_S, runners, steps=5)
    ((level, text),) = said(caplog)
    assert level == "WARNING" and text.endswith("for 10 s, and no step ran meanwhile")


def test_short_waits_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waits, runner = Waits(), Full()
    for number in range(40):
        runner.why = "" if number % 9 == 0 else "waits for pages"
        waits.update(100.0 + number, {"LLM": runner}, steps=number)  # type: ignore[dict-item]
    assert said(caplog) == []
