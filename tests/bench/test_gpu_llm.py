"""Sections of the benchmark of plain language models: bounded, written one by one, and compared with the plain load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu_llm import Measured, Run, steady_rate
from bench.serving.client import Heard


def measured() -> Measured:
    return Measured(port=1, context=4, ids=8, vocab=256)


def heard(first: float, count: int, code: str = "") -> Heard:
    marks = [first + 0.1 * number for number in range(count)]
    return Heard(sent_s=first - 0.05, text_marks=marks, usage={} if code else {"completion_tokens": count}, code=code)


def test_each_section_is_written_when_it_ends(tmp_path: Path) -> None:
    out, made = tmp_path / "llm.json", measured()
    run = Run({"sections": {}}, made, section_s=60, out=out)

    def fails() -> None:
        raise RuntimeError("no adapter")

    run.section("plain_4", lambda: made.figures.add("decode_ids_per_s_plain_4", [100.0, 120.0, 110.0], "1/s"))
    assert json.loads(out.read_text())["metrics"]["decode_ids_per_s_plain_4"]["p50"] == 110
    run.section("adapters_4", fails)
    run.section("regex_4", lambda: made.figures.add("decode_ids_per_s_regex_4", [99.0], "1/s"))
    made.share("regex", 4)
    made.share("schema", 4)
    run.save()
    found = json.loads(out.read_text())
    assert found["sections"]["adapters_4"]["error"] == "no adapter"
    assert found["errors"] == {"section_adapters_4": 1} and set(found["sections"]) == {
        "plain_4",
        "adapters_4",
        "regex_4",
    }
    assert found["metrics"]["share_of_plain_regex_4"]["p50"] == pytest.approx(0.9)
    assert "share_of_plain_schema_4" not in found["metrics"]


def test_a_section_whose_requests_were_disconnected_is_marked_and_keeps_its_rate(tmp_path: Path) -> None:
    class Answered(Measured):
        async def _together(self, *_: object) -> list[Heard]:
            assert 0 < self.left_s <= 60
            return [heard(10.0, 21), heard(10.5, 21, code="left"), heard(10.0, 0, code="overloaded")]

    made = Answered(port=1, context=4, ids=8, vocab=256)
    run = Run({"sections": {}}, made, section_s=60, out=tmp_path / "llm.json")
    run.section("schema_3", lambda: made.decode("schema", 3, [{}]))
    run.section("plain_1", lambda: None)
    assert run.report["sections"]["schema_3"]["cut"] and "cut" not in run.report["sections"]["plain_1"]
    assert run.report["errors"] == {"overloaded": 1}
    assert run.report["metrics"]["decode_ids_per_s_schema_3"]["p50"] == pytest.approx(20, rel=0.1)


def test_the_rate_is_that_of_the_time_in_which_all_decode() -> None:
    assert steady_rate([heard(0.0, 31), heard(1.0, 31)]) == pytest.approx(20, rel=0.01)
    assert steady_rate([heard(0.0, 5), heard(9.0, 5)]) == 0
