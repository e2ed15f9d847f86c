"""Ways to run an outside program and read its outcomes: pytest, and programs that print one JSON line per case."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.outside.outcomes import Outcome

LIMIT_S = 1800


def pytest_outcomes(
    python: str, tests: Sequence[str], folder: Path, variables: Mapping[str, str], options: Sequence[str] = ()
) -> list[Outcome]:
    """Run tests with pytest in their own environment. Returns an outcome for each, by `file::class::test`."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *options, *tests]
        done = _run(command, folder, variables)
        if not report.is_file():
            raise RuntimeError(f"pytest gave no report:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        outcomes = junit_outcomes(report)
    if not outcomes:
        raise RuntimeError(f"pytest ran no test:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return outcomes


def junit_outcomes(report: Path) -> list[Outcome]:
    """Return the outcomes of a report in JUnit's form."""
    return [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def program_outcomes(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> list[Outcome]:
    """Run a program that prints {"test", "verdict", "message"} for each case. A crash is a failed case."""
    done = _run(command, folder, variables)
    outcomes = []
    for line in done.stdout.splitlines():
        if line.startswith('{"test"'):
            case = json.loads(line)
            outcomes.append(Outcome(case["test"], case["verdict"], case.get("message", "")))
    if done.returncode or not outcomes:
        outcomes.append(Outcome("the program itself", "failed", _line(done.stderr or done.stdout, -1)))
    return outcomes


def _outcome(case: ElementTree.Element) -> Outcome:
    name = f"{case.get('classname', '')}::{case.get('name', '')}"
    for kind in ("failure", "error"):
        problem = case.find(kind)
        if problem is not None:
            return Outcome(name, "failed", _line(problem.get("message") or problem.text or kind))
    skipped = case.find("skipped")
    if skipped is not None:
        return Outcome(name, "skipped", _line(skipped.get("message") or ""))
    return Outcome(name, "passed")


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    return subprocess.run(
        command,
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def _line(text: str, index: int = 0) -> str:
    """Return one line of a text that is not empty, the first by default."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[index][:300] if lines else ""
