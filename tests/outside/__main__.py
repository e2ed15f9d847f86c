"""Run suites that no one here wrote against running miniatures. Exit status 1: a test failed that is not excluded."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.outside.environment import ROOT
from tests.outside.outcomes import Exclusion, Outcome, SuiteResult, judged, read_exclusions
from tests.outside.servers import Servers
from tests.outside.suites import Suite, suites
from tests.outside.table import RESULTS, markdown, read_saved, save, write_page


def main() -> int:
    """Run the chosen suites and print their table."""
    parser = argparse.ArgumentParser(prog="python -m tests.outside", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="suites whose name has this text")
    parser.add_argument("--server", action="append", default=[], metavar="MODEL", help="suites against this miniature")
    parser.add_argument("--gateway", action="store_true", help="run the suites that can through a gateway")
    parser.add_argument("--write", action="store_true", help="write the table into docs/compatibility.md")
    parser.add_argument("--save", type=Path, default=RESULTS, help="file for all outcomes as JSON; others stay in it")
    options = parser.parse_args()
    exclusions, commit = read_exclusions(), _commit()
    results = []
    with Servers(options.gateway) as servers:
        known = suites(servers)
        for suite in known:
            if options.gateway and not suite.gateway:
                continue
            is_named = not options.only or any(text in suite.name for text in options.only)
            if is_named and (not options.server or suite.server in options.server):
                results.append(_result(suite, servers, exclusions.get(suite.name, []), commit))
                save(results[-1:], options.save)
    print(markdown(results))
    if options.write:
        saved = {result.key: result for result in read_saved(options.save)}
        keys = [(suite.name, suite.server, through) for through in (False, True) for suite in known]
        write_page([saved[key] for key in keys if key in saved])
    return 1 if any(result.failures for result in results) or not results else 0


def _result(suite: Suite, servers: Servers, exclusions: Sequence[Exclusion], commit: str) -> SuiteResult:
    started = time.monotonic()
    try:
        outcomes = suite.run(servers.url(suite.server, suite.gateway), servers.name(suite.server))
    except Exception as error:  # noqa: BLE001  isolation boundary: one suite
        outcomes = [Outcome("the suite itself", "failed", f"{type(error).__name__}: {error}"[:2000])]
    result = judged(suite.name, suite.version, suite.server, outcomes, exclusions)
    result = replace(result, commit=commit, is_through_gateway=servers.has_gateway)
    print(f"{suite.name} against {suite.server}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    for failure in result.failures:
        print(f"  FAILED {failure.test}: {failure.message}", file=sys.stderr)
    for test in result.stale:
        print(f"  an exclusion that nothing needs: {test}", file=sys.stderr)
    return result


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
