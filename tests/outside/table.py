"""The table of results: on the terminal, in docs/compatibility.md and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.outside.environment import ROOT
from tests.outside.outcomes import SuiteResult

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def markdown(results: Sequence[SuiteResult]) -> str:
    """Return the table, and below it the reasons of the exclusions."""
    lines = ["| suite | version | against | passed | failed | skipped | excluded |", "|---|---|---|---|---|---|---|"]
    for result in results:
        counts = " | ".join(str(result.count(verdict)) for verdict in ("passed", "failed", "skipped", "excluded"))
        lines.append(f"| {result.suite} | {result.version} | `{result.server}` | {counts} |")
    excluded = [result for result in results if result.reasons]
    if excluded:
        lines += ["", "Excluded:", ""]
        for result in excluded:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in result.reasons)
            lines.append(f"- {result.suite}, `{result.server}`: {reasons}.")
    return "\n".join(lines)


def write_page(results: Sequence[SuiteResult]) -> None:
    """Replace the table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(
        f"{before}{BEGIN}\n{markdown(results)}\n{END}{rest.partition(END)[2]}",
        encoding="utf-8",
    )


def save(results: Sequence[SuiteResult], path: Path, commit: str) -> None:
    """Write all outcomes as JSON, with the environment."""
    machine = {"python": platform.python_version(), "machine": platform.machine(), "commit": commit}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"environment": machine, "suites": [asdict(result) for result in results]}, indent=1) + "\n",
        encoding="utf-8",
    )
