"""Requests that only read: what runs of a program, and what a later request with the same beginning finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mstar_core.conductor.reading import reading_only
from mstar_core.conformance.fake_api import SampleRequest, SentRequest
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin import Run
from mstar_core.plugin.program import ProgramGenerator
from mstar_llm.checkpoint.config import read_config
from mstar_llm.plugin import bind, llm
from mstar_llm.sources.tiny import write_tiny

PAGE = 16


def test_reading_stops_within_a_list_of_runs_and_passes_on_results() -> None:
    got: list[object] = []

    def program() -> ProgramGenerator:
        got.append((yield Run("prefill")))
        got.append((yield [Run("prefill"), Run("prefill"), Run("decode"), Run("prefill")]))
        raise AssertionError("it does not go on")

    reading = reading_only(program(), lambda walk: walk == "decode")
    assert next(reading).walk == "prefill"  # type: ignore[union-attr]
    assert [run.walk for run in reading.send("first")] == ["prefill", "prefill"]  # type: ignore[union-attr]
    assert got == ["first"] and next(reading, "over") == "over"


def test_a_prompt_that_was_read_ahead_is_found_by_the_request_that_answers(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "llm")

    def made() -> LocalRuntime:
        return LocalRuntime(bind(llm(read_config(folder)), folder, {}), folder)

    def sent(runtime: LocalRuntime, text: str, *, reads_only: bool = False) -> tuple[list[Any], int]:
        runtime.api.session, runtime.api.reads_only = "talk", reads_only
        call: SentRequest = runtime.send(SampleRequest(text=text, params={"max_output_tokens": 8, "temperature": 0.0}))
        runtime.run()
        assert call.finished is not None and runtime.leaks() == []
        return [item.array.tolist() for item in call.items], call.finished.cached_tokens

    spoken = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    runtime = made()
    assert sent(runtime, spoken[:40], reads_only=True) == ([], 0)
    assert sent(runtime, spoken[:80], reads_only=True)[0] == []
    (memory,) = [runner.memory() for runner in runtime.workers[0].executor._runners.values()]
    assert memory.pages_leased > 0 and memory.pages_used == 0
    answer, cached = sent(runtime, spoken)
    fresh, none = sent(made(), spoken)
    assert answer == fresh and len(answer) > 0
    assert none == 0 and cached >= PAGE
