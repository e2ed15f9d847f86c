"""The measurement of what the host does around captured steps runs, and counts what a step asks of a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_steps_are_timed_and_their_launches_counted() -> None:
    command = [sys.executable, "-m", "bench.launch_step", "--rows", "2", "--no-world", "--repeats", "3"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True)
    content = json.loads(done.stdout)
    kinds = [f"{what} of 2, {part}" for what in ("cameras", "prefixes", "flows") for part in ("launch", "collect")]
    assert list(content) == kinds and all(figure["us"] > 0 for figure in content.values())
    assert content["cameras of 2, launch"]["uploads"] == 2, "an image for each request"
    assert content["flows of 2, launch"]["uploads"] == 1, "all that both flows begin from"
