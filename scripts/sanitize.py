"""Run of the project's GPU kernels under compute-sanitizer. `make sanitize` calls this; it needs a GPU.

The kernel tests (`-k kernels`) call each kernel at small and odd sizes. memcheck looks for accesses out of bounds and
misaligned ones; torch's allocator is then told not to pool, so that every tensor has bounds of its own. racecheck looks
for threads of a block that meet in shared memory without a barrier, synccheck for barriers that not all threads reach.
Each tool watches the own kernels alone, with one process per file of tests: a device error ends only that file. What
they find is counted kernel by kernel.

A hazard that racecheck sees and that is none is explained in a comment above its kernel, which begins with
`# racecheck:`. Reports of such kernels are counted and do not fail the run; any other report does.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TOOLKIT: Final = Path("/usr/local/cuda")
TOOLS: Final = {
    "memcheck": "kernels and not captured",
    "racecheck": "kernels and not experts-many",
    "synccheck": "kernels",
}
"""Tool -> its tests. memcheck runs without a pooling allocator, and therefore without CUDA graph capture. racecheck
itself fails with an internal error on products of many experts, in which memcheck finds nothing.
"""

UNPOOLED: Final = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
OPTIONS: Final = {"memcheck": ("--report-api-errors", "no")}
"""Tool -> its options. memcheck would otherwise report driver functions that cuda-bindings probes and does not find."""

FOUND: Final = 99
"""Exit status of compute-sanitizer if the tests passed and it reported errors."""

LAUNCH_S: Final = 120
"""Time limit for a Python process to reach CUDA. Three that import torch from a cold disk exceed the default."""

OWN: Final = "^[a-z_]+_kernel$"
"""Names of the project's kernels: Triton keeps the function's name, C++ names have digits and capitals."""

TESTS: Final = (
    "tests/gpu/test_kernels.py",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/tests/test_gpu_kernels.py")),
)
SHOWN_REPORTS: Final = 6
SHOWN_CHARACTERS: Final = 6000
SUMMARY: Final = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
COUNT: Final = re.compile(r"(\d+) (?:error|hazard)s?")
REPORT: Final = re.compile(
    r"^=+ (?P<kind>Invalid |Misaligned |(?:\w+: )?(?:Race|Potential \w+ hazard)|Barrier error).*\n"
    r"(?:=+.*\n)*?=+ .*\bat (?:0x[0-9a-f]+ in )?(?P<late>\w+)",
    re.MULTILINE,
)
SAME_LINE: Final = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(\w+)\+")
EXPLAINED: Final = re.compile(r"^# racecheck: (?:.+\n)(?:#.*\n)*(?:@.+\n)+def (\w+)\(", re.MULTILINE)
"""A kernel below an explanation of what racecheck reports of it."""

FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one tool on a file of tests. errors: None without a summary. summary: or the reason for its absence.

    kernels: reports by kernel; failed: tests that failed; explained: kernels whose reports are explained beside them.
    """

    tool: str
    tests: str
    errors: int | None
    tests_passed: bool
    summary: str
    wall_s: float
    kernels: Mapping[str, int] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    explained: frozenset[str] = frozenset()

    @property
    def is_clean(self) -> bool:
        """Whether the tests completed and the tool reported no errors but those that are explained."""
        known = sum(count for name, count in self.kernels.items() if name in self.explained)
        return self.errors is not None and self.errors <= known and self.tests_passed

    def lines(self) -> list[str]:
        """Return a line for the tool and one for each kernel with errors and each failed test."""
        state = "ok" if self.is_clean else "FAILED"
        found = [f"{self.tool:<10} {state:<7}{self.wall_s:6.1f} s  {self.tests}  {self.summary}"]
        for name, count in sorted(self.kernels.items()):
            found.append(f"  {self.tool} {count:4} x {name}{', explained' if name in self.explained else ''}")
        return [*found, *(f"  {self.tool} failed: {test}" for test in self.failed)]


def main() -> int:
    """Run the tools. Returns 1 if one reported errors, a test failed, or compute-sanitizer is missing."""
    parser = argparse.ArgumentParser(description="run the GPU kernels under compute-sanitizer")
    parser.add_argument("tools", nargs="*", default=list(TOOLS), help=f"which of {', '.join(TOOLS)}; default: all")
    parser.add_argument("--limit", type=int, default=300, help="seconds that all tools together may take")
    parser.add_argument("--logs", type=Path, help="folder for the tools' output")
    options = parser.parse_args()
    if unknown := sorted(set(options.tools) - set(TOOLS)):
        parser.error(f"no tool {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    program = sanitizer()
    if program is None:
        print(
            "compute-sanitizer was not found: install the CUDA toolkit or the package nvidia-cuda-sanitizer-api, "
            "or put its folder on PATH",
            file=sys.stderr,
        )
        return 1
    ends_at = time.monotonic() + options.limit
    pairs = [(tool, tests) for tests in TESTS for tool in options.tools]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda tests: warm_up(tests, ends_at), TESTS))
        findings = list(pool.map(lambda pair: check(program, *pair, ends_at, options.logs), pairs))
    return 0 if all(finding.is_clean for finding in findings) else 1


def sanitizer() -> str | None:
    """Find compute-sanitizer on the path, in the toolkit, or in NVIDIA's Python package of it."""
    places = [TOOLKIT / folder / "compute-sanitizer" for folder in ("bin", "compute-sanitizer")]
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        places += sorted(Path(folder).glob("*/bin/compute-sanitizer"))
    return shutil.which("compute-sanitizer") or next((str(place) for place in places if place.is_file()), None)


def watched(program: str, tool: str) -> list[str]:
    """Return the command of compute-sanitizer. The other kernels still run after an error in one."""
    return [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--target-processes",
        "application-only",
        "--launch-timeout",
        str(LAUNCH_S),
        "--kernel-name",
        f"regex={OWN}",
        "--destroy-on-device-error",
        "kernel",
        "--print-limit",
        "1000",
        *OPTIONS.get(tool, ()),
    ]


def command(tests: str, chosen: str) -> list[str]:
    """Return the command of a file of tests. chosen: an expression for pytest's -k."""
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", chosen, "-p", "no:cacheprovider", tests]


def warm_up(tests: str, ends_at: float) -> None:
    """Compile the kernels first, so that no compiler runs under a tool. Prints the output of tests that fail."""
    start = time.monotonic()
    output, code = run(command(tests, "kernels"), os.environ, max(ends_at - start, 1.0))
    ended = "no end" if code is None else f"exit status {code}"
    print(f"{'unwatched':<10} {'':<7}{time.monotonic() - start:6.1f} s  {tests}  {ended}", flush=True)
    if code:
        print(failures_of(output), flush=True)


def run(words: Sequence[str], given: Mapping[str, str], limit_s: float) -> tuple[str, int | None]:
    """Run a program and return its output and exit status, None if it exceeded the limit and was killed.

    Kills its process group: the tests are a child of compute-sanitizer and would otherwise keep the device busy.
    """
    with subprocess.Popen(
        words, cwd=ROOT, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as program:
        try:
            return program.communicate(timeout=limit_s)[0], program.returncode
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            return program.communicate()[0], None


def check(program: str, tool: str, tests: str, ends_at: float, logs: Path | None) -> Finding:
    """Run a file of tests under one tool until `ends_at` (monotonic clock) and print the result."""
    given = {
        **os.environ,
        "PYTEST_ADDOPTS": "-o timeout=0",
        **UNPOOLED.get(tool, {}),
    }  # the tools are too slow for a limit per test
    start = time.monotonic()
    output, code = run([*watched(program, tool), *command(tests, TOOLS[tool])], given, max(ends_at - start, 1.0))
    wall_s = time.monotonic() - start
    finding = unfinished(tool, tests, output, wall_s) if code is None else read(tool, tests, output, code, wall_s)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{tool}-{tests.replace('/', '-')}.log").write_text(output)
    shown = [] if finding.is_clean else [failures_of(output)]
    print("\n".join([*finding.lines(), *shown]), flush=True)
    return finding


def failures_of(output: str) -> str:
    """Return the first reports and the first failed tests of an output. Later tests often fail for the same cause."""
    reports = [found.group() for found in REPORT.finditer(output)][:SHOWN_REPORTS]
    start = output.find("= FAILURES =")
    return "\n".join([*reports, output[start : start + SHOWN_CHARACTERS] if start >= 0 else output[-SHOWN_CHARACTERS:]])


def read(tool: str, tests: str, output: str, code: int, wall_s: float) -> Finding:
    """Parse a tool's output. code: 0, FOUND, or the status of failed tests."""
    summaries = SUMMARY.findall(output)
    counts = [int(found.group(1)) for text in summaries if (found := COUNT.search(text))]
    passed = re.search(r"^\d+ passed", output, re.MULTILINE) is not None and code in (0, FOUND)
    errors = sum(counts) if counts else None
    if code == FOUND and not errors:
        errors = 1  # the status reports an error that no pattern matches
    summary = summaries[-1] if summaries else f"no summary, exit status {code}"
    return Finding(
        tool=tool,
        tests=tests,
        errors=errors,
        tests_passed=passed,
        summary=summary,
        wall_s=wall_s,
        kernels=kernels_in(output),
        failed=tuple(FAILED.findall(output)),
        explained=explained_kernels() if tool == "racecheck" else frozenset(),
    )


@cache
def explained_kernels() -> frozenset[str]:
    """Return the names of the kernels in this repository above which a comment explains racecheck's reports."""
    files = (*ROOT.glob("mstar_core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py"))
    return frozenset(name for file in files for name in EXPLAINED.findall(file.read_text(encoding="utf-8")))


def unfinished(tool: str, tests: str, output: str, wall_s: float) -> Finding:
    """Return the finding of a tool that exceeded its limit."""
    return Finding(
        tool=tool,
        tests=tests,
        errors=None,
        tests_passed=False,
        summary=f"no end within {wall_s:.0f} s",
        wall_s=wall_s,
        kernels=kernels_in(output),
    )


def kernels_in(output: str) -> dict[str, int]:
    """Return the reports by kernel. A report's first or second line names the kernel."""
    found: Counter[str] = Counter()
    for report in REPORT.finditer(output):
        first = report.group().partition("\n")[0]
        named = SAME_LINE.search(first)
        found[named.group(1) if named else report.group("late")] += 1
    return dict(found)


if __name__ == "__main__":
    sys.exit(main())
