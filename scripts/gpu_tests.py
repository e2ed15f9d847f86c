"""Run of the GPU tests with several processes on one device, with a report of the failures.

Most of their time is the compiling of kernels, which one process does on one core. Files run side by side; those that
need the device's memory to themselves, or start servers, come one by one behind them. A file that is not done in time
is interrupted, so that what failed until then is still told. Arguments are handed on to pytest.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
ALONE: Final = ("tests/gpu/test_memory.py", "tests/gpu/test_placed.py", "tests/gpu/test_server.py")
GRACE_S: Final = 20.0
"""Seconds that an interrupted file has to write its report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Result of one file: exit status of pytest, seconds and output."""

    file: str
    status: int
    seconds: float
    text: str

    @property
    def is_good(self) -> bool:
        """Whether every selected test passed. Status 5 means that none was selected."""
        return self.status in (0, 5)

    @property
    def last(self) -> str:
        """The last line of pytest's summary."""
        lines = self.text.strip().splitlines()
        return lines[-1].strip("= ") if lines else "printed nothing"


def gpu_files(root: Path = ROOT) -> list[str]:
    """Return the files with GPU tests; those that need the device alone come last."""
    found = [*root.glob("tests/gpu/test_*.py"), *root.glob("plugins/*/tests/**/test_gpu*.py")]
    return sorted((str(path.relative_to(root)) for path in found), key=lambda name: (name in ALONE, name))


def run(file: str, words: Sequence[str], until: float) -> Ran:
    """Run one file and interrupt it at `until` (monotonic clock)."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *words, file]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=max(1.0, until - started))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            text, _ = process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
        text += "\nnot done in time"
    return Ran(file=file, status=process.returncode, seconds=time.monotonic() - started, text=text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the files; print the output of failed ones and a line for each. Returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=6, help="files at a time (default 6)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all (default 600)")
    parser.add_argument("--file", action="append", help="these files only; may be repeated")
    options, words = parser.parse_known_args(arguments)
    until = time.monotonic() + options.limit - GRACE_S
    files = options.file or gpu_files()
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda file: run(file, words, until), [name for name in files if name not in ALONE]))
    done += [run(file, words, until) for file in files if file in ALONE]
    for ran in done:
        if not ran.is_good:
            print(f"--- {ran.file}\n{ran.text}", flush=True)
    for ran in done:
        print(f"{'ok    ' if ran.is_good else 'FAILED'} {ran.file} {ran.seconds:.0f} s: {ran.last}", flush=True)
    return int(not all(ran.is_good for ran in done))


if __name__ == "__main__":
    sys.exit(main())
