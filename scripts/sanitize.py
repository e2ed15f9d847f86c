"""Run every own GPU kernel under compute-sanitizer and say what it found. `make sanitize` calls this; needs a GPU.

The kernel tests (`-k kernels`) call each kernel at small and odd sizes. memcheck looks for accesses out of bounds and
misaligned ones; torch's allocator is then told not to pool, so that every tensor has bounds of its own. racecheck looks
for threads of a block that meet in shared memory without a barrier, synccheck for barriers that not all threads reach.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TOOLKIT: Final = Path("/usr/local/cuda")
TOOLS: Final = {"memcheck": "kernels and not captured", "racecheck": "kernels", "synccheck": "kernels"}
"""Tool -> the tests that run under it. Without a pooling allocator, which memcheck needs, nothing can be captured."""

UNPOOLED: Final = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
FOUND: Final = 99
"""Exit status of compute-sanitizer when it found something and the tests passed."""

TESTS: Final = (
    "tests/gpu/test_kernels.py",
    *sorted(str(p) for p in Path("plugins").glob("*/tests/test_gpu_kernels.py")),
)
SUMMARY: Final = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
COUNT: Final = re.compile(r"(\d+) (?:error|hazard)s?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one tool said. errors: None when it came to no summary. summary: its last, or why there is none."""

    tool: str
    errors: int | None
    tests_passed: bool
    summary: str
    wall_s: float

    @property
    def is_clean(self) -> bool:
        """Whether the tests ran to their end and the tool found nothing."""
        return self.errors == 0 and self.tests_passed


def main() -> int:
    """Returns 1 when a tool found something, a test failed, or compute-sanitizer is not there."""
    parser = argparse.ArgumentParser(description="run the GPU kernels under compute-sanitizer")
    parser.add_argument("tools", nargs="*", default=list(TOOLS), help=f"which of {', '.join(TOOLS)}; default: all")
    parser.add_argument("--limit", type=int, default=900, help="seconds that one tool may take")
    options = parser.parse_args()
    if unknown := sorted(set(options.tools) - set(TOOLS)):
        parser.error(f"no tool {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    program = sanitizer()
    if program is None:
        print("compute-sanitizer was not found: install the CUDA toolkit, or put its folder on PATH", file=sys.stderr)
        return 1
    warm_up()
    findings = [check(program, tool, options.limit) for tool in options.tools]
    return 0 if all(finding.is_clean for finding in findings) else 1


def sanitizer() -> str | None:
    """Where compute-sanitizer is: on the path, or in the toolkit."""
    places = (TOOLKIT / folder / "compute-sanitizer" for folder in ("bin", "compute-sanitizer"))
    return shutil.which("compute-sanitizer") or next((str(place) for place in places if place.is_file()), None)


def command(tests: str) -> list[str]:
    """The tests of the kernels. tests: which, as pytest's -k."""
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", tests, "-p", "no:cacheprovider", *TESTS]


def warm_up() -> None:
    """Compile what will run, so that no compiler is watched. A failure here is shown by the first tool again."""
    subprocess.run(command("kernels"), cwd=ROOT, check=False, capture_output=True)


def check(program: str, tool: str, limit_s: int) -> Finding:
    """Run the tests under one tool and print what came of it."""
    words = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    given = {**os.environ, "PYTEST_ADDOPTS": "-o timeout=0", **UNPOOLED.get(tool, {})}  # slow: no limit for one test
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*words, *command(TOOLS[tool])], cwd=ROOT, env=given, check=False, text=True, timeout=limit_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        finding = read(tool, done.stdout, done.returncode, time.monotonic() - start)
        output = done.stdout
    except subprocess.TimeoutExpired:
        output, why = "", f"no end within {limit_s} s"
        finding = Finding(tool=tool, errors=None, tests_passed=False, summary=why, wall_s=time.monotonic() - start)
    print(
        f"{tool:<10} {'ok' if finding.is_clean else 'FAILED':<7}{finding.wall_s:6.1f} s  {finding.summary}", flush=True
    )
    if not finding.is_clean:
        print(output[-6000:], flush=True)
    return finding


def read(tool: str, output: str, code: int, wall_s: float) -> Finding:
    """Read a tool's output. code: 0, FOUND, or the status of tests that failed."""
    summaries = SUMMARY.findall(output)
    counts = [int(found.group(1)) for text in summaries if (found := COUNT.search(text))]
    passed = re.search(r"^\d+ passed", output, re.MULTILINE) is not None and code in (0, FOUND)
    errors = sum(counts) if counts else None
    if code == FOUND and not errors:
        errors = 1  # it says so by its status, in words that are not known here
    summary = summaries[-1] if summaries else f"no summary, exit status {code}"
    return Finding(tool=tool, errors=errors, tests_passed=passed, summary=summary, wall_s=wall_s)


if __name__ == "__main__":
    sys.exit(main())
