"""The table of results: on the terminal, in docs/compatibility.md and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from tests.outside.environment import FOLDER, ROOT
from tests.outside.outcomes import SuiteResult

PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = FOLDER / "outside.json"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def markdown(results: Sequence[SuiteResult]) -> str:
    """Return the table, and below it the reasons of the exclusions."""
    lines = ["| suite | version | against | passed | failed | skipped | excluded |", "|---|---|---|---|---|---|---|"]
    for result in results:
        counts = " | ".join(str(result.count(verdict)) for verdict in ("passed", "failed", "skipped", "excluded"))
        lines.append(f"| {result.suite} | {result.version} | {_server(result)} | {counts} |")
    excluded = [result for result in results if result.reasons]
    if excluded:
        lines += ["", "Excluded:", ""]
        for result in excluded:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in result.reasons)
            lines.append(f"- {result.suite}, {_server(result)}: {reasons}.")
    return "\n".join(lines)


def _server(result: SuiteResult) -> str:
    return f"`{result.server}`" + (" behind a gateway" if result.is_through_gateway else "")


def write_page(results: Sequence[SuiteResult]) -> None:
    """Replace the table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(
        f"{before}{BEGIN}\n{markdown(results)}\n{END}{rest.partition(END)[2]}",
        encoding="utf-8",
    )


def save(results: Sequence[SuiteResult], path: Path) -> None:
    """Write outcomes as JSON, with the environment. Results of other suites in the file stay."""
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    kept = {result.key: result for result in [*read_saved(path), *results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    suites = [asdict(result) for result in kept.values()]
    saved = json.dumps({"environment": machine, "suites": suites}, separators=(",", ":"))
    path.write_text(f"{saved}\n", encoding="utf-8")


def read_saved(path: Path) -> list[SuiteResult]:
    """Return the results in a file that `save` wrote; none if it does not exist."""
    if not path.is_file():
        return []
    return msgspec.convert(json.loads(path.read_text(encoding="utf-8"))["suites"], list[SuiteResult])
