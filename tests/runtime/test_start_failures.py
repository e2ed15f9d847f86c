"""Starts that fail: the cause in outcome.json, the exit code, nothing left behind, and soon."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ConfigError, ExitCode
from mstar_core.host.run_dir import RunDirectory
from tests.runtime.deployment import Deployment
from tests.runtime.golden import Golden

SOON_S = 10.0
MARGIN_S = 80.0
"""Allowance for the start of processes on a loaded host before the failure itself."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Golden.find().lay_out(tmp_path / "checkpoint")


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def fails(deployment: Deployment, **start: Any) -> dict[str, Any]:
    """Start it, wait for its end, probe for leftovers, give the outcome."""
    try:
        deployment.start(**start)
        code = deployment.wait_ended(SOON_S + MARGIN_S)
        outcome = deployment.outcome()
        assert outcome.get("exit_code") == code != 0, deployment.last_words()
        deployment.assert_gone()
    finally:
        deployment.end()
    cause: dict[str, Any] = outcome["cause"]
    return {**cause, "exit": code}


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def scramble(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 0x5A for byte in path.read_bytes()[:2000]) + path.read_bytes()[2000:])


def swap(path: Path) -> None:
    """The right format, another model's tensors."""
    shutil.copyfile(Golden.find().folder / "snac_weights.safetensors", path)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("lm/model.safetensors", cut),
        ("lm/model.safetensors", scramble),
        ("lm/model.safetensors", swap),
        ("lm/model.safetensors", Path.unlink),
        ("snac/pytorch_model.bin", cut),
        ("lm/config.json", cut),
        ("snac/config.json", Path.unlink),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_bad_weights_are_named(file: str, damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder / file)
    cause = fails(Deployment(folder=folder, max_seq_len=1024))
    assert cause["exit"] in (ExitCode.START_FAILED, ExitCode.INVALID)
    told = f"{cause['message']} {cause['detail']}"
    assert str(folder) in told or Path(file).name in told, told
    assert cause["hint"] and cause["code"] != "internal_error"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    cause = fails(Deployment(folder=tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in f"{cause['message']} {cause['detail']}" and cause["hint"]
    assert cause["exit"] in (ExitCode.START_FAILED, ExitCode.INVALID)


def test_a_taken_port_is_named_with_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cause = fails(Deployment(api={"port": port}))
    assert (cause["exit"], cause["code"]) == (ExitCode.START_FAILED, "port_in_use")
    assert str(port) in cause["message"] and "--port" in cause["hint"]


def test_an_unknown_plugin_is_named() -> None:
    cause = fails(Deployment(plugin="orfeus"))
    assert "orfeus" in cause["message"] and "orpheus" in cause["hint"]


def test_a_second_deployment_of_a_name_is_refused_and_harms_not_the_first(root: Path) -> None:
    with Deployment(root=root) as first:
        second = Deployment(root=root)
        second.start()
        code = second.wait_ended(SOON_S + MARGIN_S)
        cause = second.outcome()["cause"]
        assert code == second.outcome()["exit_code"] == ExitCode.START_FAILED
        assert "already running" in cause["message"] and str(first.pids()["supervisor"]) in cause["detail"]
        assert "mstarctl down orpheus" in cause["hint"]
        assert first.admin("/v1")["state"] == "ready"
        first.assert_clean()
    first.assert_gone()


def test_a_run_directory_that_cannot_be_written_is_named(root: Path) -> None:
    (root / "file").write_text("")
    with pytest.raises(ConfigError, match="run directory cannot be written"):
        RunDirectory(root / "file" / "orpheus").create()
    deployment = Deployment(root=root)
    (root / deployment.name).write_text("in the way")
    deployment.start(makes_directory=False)
    code = deployment.wait_ended(SOON_S + MARGIN_S)
    cause = deployment.outcome()["cause"]
    assert code == deployment.outcome()["exit_code"] == ExitCode.INVALID
    assert "run directory" in cause["message"] and str(root) in cause["detail"] and cause["hint"]
    assert not deployment.processes()


def test_a_supervisor_that_breaks_leaves_word_and_nothing_else() -> None:
    broken = "from mstar_core.supervisor.main import main; main(kinds=lambda spec: 1 / 0)"
    cause = fails(Deployment(), entry=("-c", broken))
    assert cause["exit"] == ExitCode.INTERNAL
    assert "supervisor" in cause["message"] and "ZeroDivisionError" in cause["detail"]
