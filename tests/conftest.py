"""Order and memory of a whole run, and a fixture: a fresh interpreter that reports its loaded modules."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# A slow moment of a shared host must not fail a test; the time-out per test still ends one that hangs. Examples are the
# same in each run, so that no run fails by chance. For random ones: pytest --hypothesis-profile=explore.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared-host", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("shared-host")

_constants_of_modules = providers._get_local_constants


def _constants() -> providers.Constants:
    """Return the constants that hypothesis mixes into its examples.

    By default these are the constants of all loaded modules. They differ with the tests that a process has run before,
    so the same seed draws other examples there.
    """
    if settings.get_current_profile_name() == "explore":
        return _constants_of_modules()
    return providers.Constants()


providers._get_local_constants = _constants

LONGEST = Path(__file__).with_name("longest_files.txt")
"""Files of tests that take more than about 15 s, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: a process that takes one of them last works on while the others have nothing."""
    ranks = {path: rank for rank, path in enumerate(LONGEST.read_text(encoding="utf-8").splitlines())}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the 800,000 objects of the collected tests from garbage collections, each of which took half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests failed at first that ran again: each is a fault of a test, or a race in the product."""
    reports = terminalreporter.stats.get("rerun", ())
    if reports:
        terminalreporter.section("UNSTEADY: the first failures of tests that ran again")
    for report in reports:
        terminalreporter.write_sep("_", report.nodeid)
        terminalreporter.write_line(report.longreprtext)


# Shells start background jobs with SIGINT ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_TELL = """
import json, sys
before = set(sys.modules)
code = 0
try:
    {body}
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
finally:
    sys.stdout.flush()
    with open({report!r}, "w") as file:
        json.dump({{"code": code, "modules": sorted(set(sys.modules) - before)}}, file)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """Result of one fresh process. modules: the modules that it loaded beyond those of a bare interpreter."""

    code: int
    modules: frozenset[str]
    stdout: str
    stderr: str

    def loaded(self, names: Sequence[str]) -> set[str]:
        """Return those of the top-level names that were loaded."""
        return {name for name in names if name in self.tops()}

    def tops(self) -> set[str]:
        """Return the top-level names of the loaded modules."""
        return {module.partition(".")[0] for module in self.modules}


FreshPython = Callable[[str], Fresh]


@pytest.fixture
def fresh_python(tmp_path: Path) -> FreshPython:
    """Run statements in a new interpreter with an empty home and return its modules. Fails if they raise."""

    def run(body: str) -> Fresh:
        report = tmp_path / "loaded.json"
        command = [sys.executable, "-c", _TELL.format(body=body, report=str(report))]
        dropped = ("COV", "PYTEST", "MSTAR", "_MSTARCTL")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment |= {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
        environment |= {
            "MSTAR_RUNTIME_DIR": str(tmp_path / "run"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert result.returncode == 0, result.stderr
        told = json.loads(report.read_text(encoding="utf-8"))
        modules = frozenset(told["modules"])
        return Fresh(code=told["code"], modules=modules, stdout=result.stdout, stderr=result.stderr)

    return run


@pytest.fixture
def fresh_mstarctl(fresh_python: FreshPython) -> Callable[..., Fresh]:
    """Run one command line of mstarctl in a new interpreter and return its modules."""

    def run(*argv: str) -> Fresh:
        return fresh_python(f"sys.argv = ['mstarctl', *{list(argv)!r}]; from mstarctl.__main__ import main; main()")

    return run
