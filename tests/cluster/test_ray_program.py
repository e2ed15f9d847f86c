"""The program that calls Ray, where no cluster runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SURVEY = "from mstar_core.cluster.survey import survey; survey('auto', ())"
ALONE = ("unshare", "--pid", "--fork", "--mount-proc")
"""Hides clusters of other tests, which Ray finds among the processes of the host."""


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_auto_without_a_cluster_is_refused_with_the_way_to_start_one(tmp_path: Path) -> None:
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, to hide other processes")
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    command = [*ALONE, sys.executable, "-c", SURVEY]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "Unreachable: no Ray cluster runs on this host" in result.stderr
