"""Run the fault tests of the public API and record what they tried: inputs, cuts, cancellations, requests lost.

Run from the repository root: `python bench/api_faults.py [--save] [--thorough]`. Prints one JSON object. The tests fail
if anything is lost or left over. They report their figures as properties in pytest's JUnit file, which are summed here.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.serving.figures import ROOT, head

RESULTS: Final = ROOT / "bench" / "results" / "api"
AGAINST_FAKES: Final = (
    "access",
    "admission",
    "cuts",
    "errors",
    "faults",
    "fetch",
    "fuzz",
    "media_limits",
    "messages",
    "multipart",
    "output_queue",
    "pool",
    "storage",
    "streams",
)
AGAINST_PROCESSES: Final = ("bad_input", "ends", "faults", "soak")


def main() -> int:
    """Return pytest's status: 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"also write it to {RESULTS.relative_to(ROOT)}/faults.json")
    parser.add_argument("--thorough", action="store_true", help="cut at every single byte")
    parser.add_argument("--without-processes", action="store_true", help="only the tests against fake peers")
    options = parser.parse_args()
    files = [ROOT / "tests" / "api" / f"test_{name}.py" for name in AGAINST_FAKES]
    if not options.without_processes:
        files += [ROOT / "tests" / "runtime" / f"test_{name}.py" for name in AGAINST_PROCESSES]
    about = head()
    status, found = run(files, {"MSTAR_CUTS": "1"} if options.thorough else {})
    report = {**about, "files": [str(path.relative_to(ROOT)) for path in files], "thorough": options.thorough, **found}
    print(json.dumps(report, indent=1))
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "faults.json").write_text(json.dumps(report, indent=1) + "\n")
    return status


def run(files: list[Path], settings: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Run the tests. Returns pytest's status and the figures of its JUnit file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not gpu and not slow",
            f"--junitxml={path}",
            "-o",
            "junit_family=xunit1",  # the other family has no properties of tests
            *map(str, files),
        ]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False, stdout=sys.stderr)
        return done.returncode, told(ElementTree.parse(path).getroot())


def told(root: ElementTree.Element) -> dict[str, Any]:
    """Return tests by result, the sums of their figures, and the inputs that hypothesis tried."""
    cases = list(root.iter("testcase"))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if is_failed(case)]
    sums: Counter[str] = Counter()
    for name, value in properties(cases):
        sums[name] += int(value)
    sums.setdefault("requests_lost", 0)
    fuzzed = {name: examples(value) for name, value in properties([root]) if "hypothesis-statistics" in name}
    return {
        "tests": len(cases),
        "failed": failed,
        "seconds": round(sum(float(case.get("time") or 0) for case in cases), 1),
        "figures": dict(sorted(sums.items())),
        "fuzz_inputs": sum(fuzzed.values()),
        "fuzz_tests": len(fuzzed),
    }


def is_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def properties(elements: list[ElementTree.Element]) -> Iterator[tuple[str, str]]:
    """Yield the properties of some elements: those of tests, or those of the whole run."""
    for element in elements:
        found = element.iter("property") if element.tag == "testcase" else element.findall("./testsuite/properties/*")
        for each in found:
            yield str(each.get("name")), str(each.get("value"))


def examples(statistics: str) -> int:
    """Return the number of inputs that a test tried, from hypothesis' report (base64 text)."""
    text = base64.b64decode(statistics.partition(",")[2] or statistics).decode(errors="replace")
    return sum(int(passing) + int(failing) for passing, failing in EXAMPLES.findall(text))


EXAMPLES: Final = re.compile(r"(\d+) passing, (\d+) failing")


if __name__ == "__main__":
    raise SystemExit(main())
