"""Outcomes of a suite, with the exclusions that apply to them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

EXCLUSIONS = Path(__file__).with_name("exclusions.toml")

Verdict = Literal["passed", "failed", "excluded", "skipped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test of a suite. message: why it failed or was skipped, one line."""

    test: str
    verdict: Verdict
    message: str = ""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Tests that may fail. test: a pattern of names with `*`, in which brackets stand for themselves."""

    test: str
    reason: str

    def covers(self, name: str) -> bool:
        return fnmatchcase(name, self.test.replace("[", "[[]"))


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """Result of one suite. version: of the program that no one here wrote. stale: exclusions that nothing needs.

    commit: of this project. is_through_gateway: whether a gateway stood between the program and the server.
    """

    suite: str
    version: str
    server: str
    outcomes: tuple[Outcome, ...]
    reasons: tuple[tuple[str, int], ...]
    stale: tuple[str, ...]
    commit: str = ""
    is_through_gateway: bool = False

    @property
    def key(self) -> tuple[str, str, bool]:
        """Identity of the result: a later one with the same replaces it."""
        return self.suite, self.server, self.is_through_gateway

    def count(self, verdict: Verdict) -> int:
        return sum(outcome.verdict == verdict for outcome in self.outcomes)

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == "failed"]


def read_exclusions(path: Path = EXCLUSIONS) -> dict[str, list[Exclusion]]:
    """Return the exclusions of each suite. Raises ValueError for one without a reason."""
    read: dict[str, list[Exclusion]] = {}
    for suite, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for entry in entries:
            reason = str(entry.get("reason", "")).strip()
            tests = entry["tests"]
            if not reason or not tests:
                raise ValueError(f"{path}: an exclusion of {suite} has no reason or no tests: {entry}")
            read.setdefault(suite, []).extend(Exclusion(test, reason) for test in tests)
    return read


def judged(
    suite: str, version: str, server: str, outcomes: Sequence[Outcome], exclusions: Sequence[Exclusion]
) -> SuiteResult:
    """Return the result of a suite: failures that an exclusion covers are excluded."""
    final, reasons, used = [], {}, set()
    for outcome in outcomes:
        exclusion = next((each for each in exclusions if each.covers(outcome.test)), None)
        if outcome.verdict == "failed" and exclusion is not None:
            used.add(exclusion)
            reasons[exclusion.reason] = reasons.get(exclusion.reason, 0) + 1
            final.append(Outcome(outcome.test, "excluded", exclusion.reason))
        else:
            final.append(outcome)
    stale = tuple(each.test for each in exclusions if each not in used)
    return SuiteResult(suite, version, server, tuple(final), tuple(reasons.items()), stale)
