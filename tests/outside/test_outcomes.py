"""Exclusions of outside suites: each has a reason, covers what it names alone, and is reported when not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outside.outcomes import Exclusion, Outcome, judged, read_exclusions
from tests.outside.servers import Servers
from tests.outside.suites import suites


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
    outcomes = [Outcome("a::x[strict]", "failed"), Outcome("a::y", "failed"), Outcome("a::z", "passed")]
    exclusions = [Exclusion("a::x[strict]", "no"), Exclusion("a::z", "never")]
    result = judged("suite", "1", "llm:tiny", outcomes, exclusions)
    assert [each.test for each in result.failures] == ["a::y"]
    assert (result.count("excluded"), result.count("passed")) == (1, 1)
    assert (result.reasons, result.stale) == ((("no", 1),), ("a::z",))
