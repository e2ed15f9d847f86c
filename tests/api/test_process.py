"""`python -m mstar_core.api` as started by the supervisor: failed starts, and loaded modules."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import ExitCode


def start(folder: Path, port: int) -> subprocess.CompletedProcess[str]:
    spec = DeploymentSpec(
        name="orpheus",
        model="orpheus",
        plugin="orpheus",
        run_dir=str(folder),
        log_dir=str(folder),
        plan=Plan(ranks=(), placements=()),
        api=ApiConfig(host="127.0.0.1", port=port),
    )
    spec.ipc_dir.mkdir(mode=0o700)
    spec.uploads.mkdir(mode=0o700)
    (folder / "spec.json").write_bytes(spec.encode())
    supervisor = f"ipc://{folder}/ipc/supervisor.0"
    command = [
        sys.executable,
        "-m",
        "mstar_core.api",
        str(folder / "spec.json"),
        "--incarnation",
        "0",
        "--supervisor",
        supervisor,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, cwd=Path(__file__).parents[2], check=False
    )


def cause(folder: Path) -> dict[str, object]:
    record: dict[str, object] = json.loads((folder / "children" / "api.fatal.json").read_text())
    return record


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = start(tmp_path, port)
    assert ended.returncode == ExitCode.START_FAILED
    record = cause(tmp_path)
    assert str(port) in str(record["message"])
    assert "--port" in str(record["hint"])
    assert not list((tmp_path / "ipc").iterdir())


def test_a_processor_that_cannot_start_ends_the_process_with_its_cause(tmp_path: Path) -> None:
    ended = start(tmp_path, 0)
    assert ended.returncode == ExitCode.INVALID
    assert cause(tmp_path)["class"] == "WeightsError"
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines[-1]["level"] == "CRITICAL" and lines[-1]["child"] == "api"
    assert not list((tmp_path / "ipc").iterdir())


@pytest.mark.parametrize(
    "word", ["torch", "mstar_core.conductor", "mstar_core.worker", "mstar_core.engine", "transformers"]
)
def test_the_api_loads_neither_torch_nor_its_siblings(word: str) -> None:
    code = f"import sys, mstar_core.api.main; sys.exit({word!r} in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], timeout=250, cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == 0
