"""`mstarctl unit` and the notifications that `up` sends to a service manager."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.errors import ExitCode, UsageError
from mstarctl.client.log_dirs import new_log_dir
from mstarctl.main import run
from mstarctl.start.service.notify import READY, notify
from mstarctl.start.service.unit import STOP_S, quoted, service_words, unit_text, without_replace
from tests.cli.conftest import Cli


def directives(text: str) -> dict[str, list[str]]:
    by_key: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            by_key.setdefault(key, []).append(value)
    return by_key


def record(name: str, *argv: str) -> None:
    """Leave the record of a start, as `up` does."""
    folder = new_log_dir(name)
    spec = DeploymentSpec(
        name=name,
        model="toy",
        plugin="toy",
        run_dir="",
        log_dir=str(folder),
        plan=Plan(ranks=(), placements=()),
        argv=argv,
    )
    (folder / "start.json").write_bytes(spec.encode())


def test_a_unit_runs_up_with_the_words_that_started_the_deployment(cli: Cli) -> None:
    record("front", "--no-color", "up", "toy", "--name", "front", "--gpus", "0,1", "-d", "--wait")
    said = cli("unit", "front")
    assert said.code == 0, said.err
    command = directives(said.out)["ExecStart"][0]
    assert command.endswith("mstarctl up toy --name front --gpus 0,1")
    assert "mstar-front.service" in said.err


def test_a_unit_for_a_model_takes_the_options_of_up(cli: Cli) -> None:
    said = cli("unit", "toy", "--", "--name", "voice", "--port", "8001")
    assert said.code == 0, said.err
    assert directives(said.out)["ExecStart"][0].endswith("up toy --name voice --port 8001")
    assert directives(said.out)["ExecReload"][0].endswith("reload voice")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["orpheus:mini"], "orpheus"),
        (["orpheus_replicas:tiny"], "orpheus"),
        (["bagel:mini", "--", "--name=b"], "b"),
        (["bagel_cfg_parallel:mini"], "bagel_cfg_parallel"),
    ],
)
def test_a_unit_has_the_name_that_the_deployment_will_have(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(tmp_path))
    assert run(["unit", *words]) == 0
    said = capsys.readouterr()
    assert directives(said.out)["ExecReload"][0].endswith(f"reload {name}") and f"mstar-{name}.service" in said.err


def test_an_unknown_name_is_answered_with_the_nearest_model(cli: Cli) -> None:
    said = cli("unit", "tov")
    assert said.code == ExitCode.NOT_FOUND and "'toy'" in said.err


def test_a_users_unit_names_no_user_and_no_system_folder() -> None:
    user_unit = directives(unit_text("a", "/bin/mstarctl", ["a"], is_system=False, user="ana"))
    assert (
        "User" not in user_unit and "RuntimeDirectory" not in user_unit and user_unit["WantedBy"] == ["default.target"]
    )
    everyone = directives(unit_text("a", "/bin/mstarctl", ["a"], is_system=True, user="ana"))
    assert everyone["User"] == ["ana"] and everyone["WantedBy"] == ["multi-user.target"]


@pytest.mark.parametrize("words", [["--api-key", "s"], ["--api-key=s"], ["--api-key", "[hidden]"], ["[hidden]"]])
def test_an_api_key_is_refused_in_a_unit_with_the_way_out(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        service_words(["orpheus", *words], tmp_path)
    assert "--api-key-file" in caught.value.hint


def test_relative_paths_become_absolute_and_missing_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "two.yaml").touch()
    (tmp_path / "one.yaml").touch()
    words = ["one.yaml", "--config", "files/two.yaml", "--config=files/two.yaml", "orpheus:tiny", "--gpus", "0"]
    two = str(tmp_path / "files" / "two.yaml")
    assert service_words(words, tmp_path) == [
        str(tmp_path / "one.yaml"),
        "--config",
        two,
        f"--config={two}",
        "orpheus:tiny",
        "--gpus",
        "0",
    ]
    assert service_words(["mstar-orpheus/orpheus", "--port", "1"], tmp_path) == ["mstar-orpheus/orpheus", "--port", "1"]
    with pytest.raises(UsageError, match="org/model"):
        service_words(["orpheus", "--weights", "org/model"], tmp_path)
    with pytest.raises(UsageError, match="other/three"):
        service_words(["other/three.yaml"], tmp_path)


def test_a_service_starts_alone_what_has_replaced_another_deployment() -> None:
    words = ["orpheus:tiny", "--replace", "voice", "--stop-first", "-d"]
    alone = ["orpheus:tiny", "-d", "--name", "voice", "--host", "::1", "--port", "9"]
    assert without_replace(words, "voice", "::1", 9) == alone
    assert without_replace(["a", "--replace=voice"], "voice", "h", 1)[:3] == ["a", "--name", "voice"]


@pytest.mark.parametrize(
    ("word", "written"),
    [("plain", "plain"), ("a b", '"a b"'), ('a"b', '"a\\"b"'), ("50%", "50%%"), ("$HOME", "$$HOME"), ("", '""')],
)
def test_words_are_quoted_as_the_service_manager_reads_them(word: str, written: str) -> None:
    assert quoted(word) == written


def test_systemd_gives_a_drain_all_its_time() -> None:
    longest = DeploymentSpec(
        name="a", model="a", plugin="a", run_dir="", log_dir="", plan=Plan(ranks=(), placements=())
    ).drain_timeout_s
    assert STOP_S >= longest + 30


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    tool, program = shutil.which("systemd-analyze"), shutil.which("true")
    if tool is None or program is None:
        pytest.skip("runs where systemd is installed")
    path = tmp_path / "mstar-a.service"
    path.write_text(unit_text("a", program, ["a b", "50%"], is_system=True, user="root"))
    done = subprocess.run([tool, "verify", str(path)], capture_output=True, text=True, check=False)
    assert "mstar-a" not in done.stderr, done.stderr


def test_a_service_manager_hears_that_the_deployment_is_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not notify(READY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert notify(READY, "serves on 127.0.0.1:8000")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serves on 127.0.0.1:8000"
    assert notify(READY)  # the manager has gone: the deployment runs all the same
