"""Exclusions of outside suites: each has a reason, covers what it names alone, and is reported when not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.outside.loads import Figures, outcomes
from tests.outside.outcomes import Exclusion, Outcome, judged, read_exclusions
from tests.outside.servers import Servers
from tests.outside.suites import suites
from tests.outside.table import read_saved, save


def test_every_exclusion_has_a_reason_and_a_suite() -> None:
    names = {suite.name for suite in suites(Servers())}
    assert set(read_exclusions()) <= names


@pytest.mark.parametrize("text", ['[[a]]\ntests = ["x"]', '[[a]]\nreason = " "\ntests = ["x"]'])
def test_an_exclusion_without_a_reason_fails_the_run(text: str, tmp_path: Path) -> None:
    path = tmp_path / "exclusions.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="no reason"):
        read_exclusions(path)


def test_a_failure_is_excluded_only_by_its_name_and_a_needless_exclusion_is_told() -> None:
    found = [Outcome("a::x[strict]", "failed"), Outcome("a::y", "failed"), Outcome("a::z", "passed")]
    exclusions = [Exclusion("a::x[strict]", "no"), Exclusion("a::z", "never")]
    result = judged("suite", "1", "llm:tiny", found, exclusions)
    assert [each.test for each in result.failures] == ["a::y"]
    assert (result.count("excluded"), result.count("passed")) == (1, 1)
    assert (result.reasons, result.stale) == ((("no", 1),), ("a::z",))


def test_results_of_other_suites_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "outside.json"
    first, second = (judged(name, "1", "llm:tiny", [Outcome("a", "passed")], []) for name in ("one", "two"))
    save([first], path)
    save([second], path)
    later = judged("one", "1", "llm:tiny", [Outcome("a", "failed", "no")], [])
    save([later], path)
    assert read_saved(path) == [later, second]


def test_a_figure_passes_within_a_tenth_of_the_runs_around_it() -> None:
    before = Figures(requests=60, tokens=128, rate=100, latency_ms=1000, token_ms=10, first_ms=50)
    after = replace(before, rate=120)
    judge = {each.test: each.verdict for each in outcomes(before, replace(before, rate=131, token_ms=8.9), after)}
    failed = [test for test, verdict in judge.items() if verdict == "failed"]
    assert failed == ["time of a token in ms"]
