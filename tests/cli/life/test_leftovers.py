"""`ps --clear` ends the processes that a killed supervisor has left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mstar_core.host.run_dir import RunDirectory
from tests.cli.life.conftest import Cli
from tests.process.test_entry import begun, entry


def test_clearing_a_stale_deployment_ends_what_it_left(tool: Cli, runtime: Path, make_spec: Any) -> None:
    run = RunDirectory.of("sk")
    run.create()
    run.spec.write_bytes(make_spec("sk").encode())
    assert "stale" in tool("ps").out
    with begun(entry(os.getpid(), run.spec)) as left:
        said = tool("ps", "--clear")
        assert left.wait() < 0
    assert f"forgot sk, which was stale, and ended what it had left running: pid {left.pid}" in said.err
    assert not run.path.exists() and "sk" not in tool("ps").out
