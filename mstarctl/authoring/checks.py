"""Run of all conformance checks on one plugin, and the grade that it reaches. Used by `mstarctl plugins check`."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mstar_core.plugin.conformance import CHECKS, GRADES, CheckResult, Grade, run_check, subjects
from mstar_core.plugin.loader import find_entry, load_plugin


def run_checks(name: str) -> tuple[CheckResult, ...]:
    """Run every check on the plugin called `name` and each of its models. Raises PluginError if it cannot be loaded."""
    entry = find_entry(name)
    models = load_plugin(entry.name)
    results = [run_check(check, subject) for check in CHECKS for subject in subjects(check, entry, models)]
    return tuple(told_once(results))


def told_once(results: Sequence[CheckResult]) -> Iterator[CheckResult]:
    """Yield the results, with the cause of a failure and its error only at the first check of a model that met it."""
    first: dict[tuple[str, str], str] = {}
    for result in results:
        name = result.name
        if result.outcome == "failed":
            name = first.setdefault((result.model, result.detail), result.name)
        yield result if name == result.name else replace(result, detail=f"the same cause as {name}", error=None)


def tracebacks(results: Sequence[CheckResult]) -> Iterator[str]:
    """Yield the traceback of each failed check, with its name."""
    for result in results:
        if result.error is not None:
            yield f"{result.name}: {''.join(traceback.format_exception(result.error)).rstrip()}"


def grade_of(results: Sequence[CheckResult]) -> Grade | None:
    """Return the highest grade that the plugin reaches, None below bronze.

    A grade counts if all its checks and those of the grades below passed. A skipped check has not passed.
    """
    reached: Grade | None = None
    for grade in GRADES:
        of_grade = [result for result in results if result.check.grade == grade]
        if not of_grade or any(result.outcome != "passed" for result in of_grade):
            break
        reached = grade
    return reached


def facts_of(result: CheckResult) -> dict[str, Any]:
    """Return plain data for `-o json`."""
    return {
        "name": result.name,
        "grade": result.check.grade,
        "outcome": result.outcome,
        "model": result.model,
        "detail": result.detail,
        "doc": result.check.doc,
    }
