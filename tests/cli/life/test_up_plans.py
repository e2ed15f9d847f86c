"""Refusals and warnings of `up` before anything is started."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ConfigError, ExitCode, PluginError, UsageError
from mstar_core.host.run_dir import deployments
from mstarctl.plugins import Plugins
from mstarctl.start.hardware.devices import choose_devices
from mstarctl.start.options import UpOptions
from mstarctl.start.plan import unused_options
from mstarctl.start.target import find, resolve_target
from tests.cli.life.conftest import own_port
from tests.fakes.ports import free_port

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["orpheuss"], ExitCode.NOT_FOUND, "did you mean 'orpheus'?"),
        (["orpheus:tinny"], ExitCode.NOT_FOUND, "did you mean 'tiny'?"),
        (["orpheus", "--device", "cuda"], ExitCode.INVALID, "no GPU was found"),
        (["orpheus", "--gpus", "0"], ExitCode.INVALID, "no GPU was found"),
        (["orpheus", "--weights", "nowhere"], ExitCode.INVALID, "nowhere is not a directory with weights"),
        (["orpheus:tiny", "--weights", "."], ExitCode.INVALID, "exclude each other"),
        (["orpheus", "--set", "kv_cache.page=3"], ExitCode.INVALID, "page"),
        (["orpheus", "--name", "a/b"], ExitCode.INVALID, "'a/b' cannot name a deployment"),
        (["orpheus", "--tensor-comm-protocol", "SMH"], ExitCode.USAGE, "did you mean 'SHM'?"),
        (["orpheus", "--mooncake-port", "70000"], ExitCode.USAGE, "70000 is not in the range"),
        (["orpheus", "--rust-frontend"], ExitCode.USAGE, "mstarctl has one front end"),
        (["orpheus", "--stall", "soon"], ExitCode.USAGE, "--stall is 'soon'"),
        (["orpheus", "--log-level", "loud"], ExitCode.USAGE, "unknown log level 'loud'"),
        (["orpheus", "--api-key-file", "nowhere"], ExitCode.INVALID, "cannot be read"),
        (["orpheus", "--upload-dir", "nowhere"], ExitCode.INVALID, "--upload-dir nowhere cannot be written"),
        (["orpheus", "--log-stats-file", "no/f"], ExitCode.INVALID, "--log-stats-file no/f cannot be written"),
        ([], ExitCode.USAGE, "no model or file was given"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_up_refuses_with_a_reason(tool: Cli, argv: list[str], code: ExitCode, words: str) -> None:
    said = tool("up", *argv, *own_port())
    assert (said.code, words in said.err) == (code, True), said.err
    assert list(deployments()) == []


@pytest.mark.parametrize("key", [[], ["--api-key", "secret"]], ids=["open", "with a key"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1"])
def test_an_open_api_without_a_key_gives_a_warning(tool: Cli, host: str, key: list[str]) -> None:
    said = tool("up", "orpheus:tiny", "--dry-run", "--host", host, "--port", str(free_port()), *key)
    assert said.code == ExitCode.DONE, said.err
    is_open = host != "127.0.0.1" and not key
    shown = f"[{host}]" if ":" in host else host
    assert (re.search(rf"warning: {re.escape(shown)}:\d+ is open to every host", said.err) is not None) is is_open, (
        said.err
    )
    assert ("see --api-key and --host 127.0.0.1" in said.err) is is_open and "warning" not in said.out


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_file_readable_by_others_gives_a_warning(tool: Cli, tmp_path: Path, mode: int, *, is_open: bool) -> None:
    keys = tmp_path / "the keys"
    keys.write_text("secret\n")
    keys.chmod(mode)
    said = tool("up", "orpheus:tiny", "--dry-run", "--port", str(free_port()), "--api-key-file", str(keys))
    assert said.code == ExitCode.DONE, said.err
    assert (f"the keys has mode {mode:04o}: other users may read it; chmod 600 '{keys}'" in said.err) is is_open
    assert "secret" not in said.err + said.out


def test_a_taken_port_is_an_error_that_names_a_free_one(tool: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = tool("up", "orpheus:tiny", "--host", "127.0.0.1", "--port", str(port))
    assert said.code == ExitCode.START_FAILED
    assert f"port {port} on 127.0.0.1 is taken" in said.err and "--port " in said.err


AS_ANOTHER = """
import os, sys
from mstar_core.errors import WeightsError
from mstarctl.start.plan import weights_folder
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    try:
        print(weights_folder(path))
    except WeightsError as error:
        print(f"{error.title}: {error.detail}")
"""


def test_weights_that_this_user_may_not_read_are_named_with_owner_and_mode() -> None:
    """The check runs in a child process that drops root, because no mode excludes root."""
    top = Path(tempfile.mkdtemp(prefix="mst-"))
    top.chmod(0o755)
    shut = top / "shut"
    (shut / "below").mkdir(parents=True)
    shut.chmod(0o000)
    try:
        command = [sys.executable, "-c", AS_ANOTHER, str(shut), str(shut / "below")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    finally:
        shut.chmod(0o700)
        shutil.rmtree(top)
    folder_line, below = said.stdout.splitlines()
    assert folder_line.startswith(f"{shut} cannot be read: owner uid {os.getuid()}, mode 0; this user is uid ")
    assert below.startswith(f"{shut / 'below'} cannot be read: this user, uid 65534, may not enter a parent directory")


def test_a_dry_run_shows_the_plan_and_starts_nothing(tool: Cli, runtime: Path) -> None:
    said = tool("up", "orpheus:tiny", "--dry-run", "--host", "127.0.0.1", "--port", "1", "-o", "json")
    item = said.items[0]
    assert (item["name"], item["weights"], item["ranks"][0]["device"]) == ("orpheus", "tiny", "cpu")
    assert "the sound is noise" in said.err
    assert list(runtime.iterdir()) == []


def test_a_key_removes_the_warning_of_an_open_address(tool: Cli) -> None:
    open_to_all = tool("up", "orpheus:tiny", "--dry-run", "--host", "0.0.0.0", *own_port())
    with_key = tool("up", "orpheus:tiny", "--dry-run", "--host", "0.0.0.0", "--api-key", "secret", *own_port())
    assert "--api-key" in open_to_all.err
    assert "--api-key" not in with_key.err and "secret" not in with_key.out + with_key.err


def test_every_option_without_effect_is_named(tool: Cli) -> None:
    inputs = ("--mooncake-port", "9000", "--tcp-transfer-device", "eth0", "--enable-nvtx")
    said = tool("up", "orpheus:tiny", "--dry-run", *inputs, *own_port())
    assert said.code == 0
    for flag in ("--mooncake-port 9000", "--tcp-transfer-device eth0", "--enable-nvtx"):
        assert f"{flag} has no effect" in said.err
    assert "no effect" not in tool("up", "orpheus:tiny", "--dry-run", *own_port()).err


def test_weights_that_were_not_made_for_a_robot_are_said_with_what_to_name(tool: Cli, tmp_path: Path) -> None:
    dry = ("--dry-run", "--device", "cpu", "--port", str(free_port()))
    said = tool("up", "pi05_droid", *dry)
    assert said.code == 0, said.err
    assert "not trained for robot droid" in said.err and "--weights DIR" in said.err and "pi05_droid, conv" in said.err
    for words in (("pi05:tiny", "--set", "model_kwargs.robot=droid"), ("pi05",), ("orpheus",)):
        assert "not trained" not in tool("up", *words, *dry).err
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "not trained" not in tool("up", "pi05_droid", *dry, "--weights", str(tmp_path)).err


def test_marks_have_an_effect_where_a_rank_is_on_a_gpu() -> None:
    plugins = Plugins.discover()
    target = find("orpheus_disaggregated", plugins)
    config = resolve_target(target)

    def unused(*devices: str) -> tuple[str, ...]:
        return unused_options(UpOptions(nvtx=True), config, plugins.plan(target.spec, config, devices))

    assert unused("cpu", "cuda:0") == ()
    assert "every rank computes on the CPU" in unused("cpu")[0]


def test_a_run_directory_that_cannot_be_made_is_named(
    tool: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", "/proc/nowhere")
    said = tool("up", "orpheus:tiny", "-d", "--host", "127.0.0.1", "--port", "1")
    assert (said.code, "the run directory cannot be written" in said.err) == (ExitCode.INVALID, True), said.err


def test_a_path_too_long_for_sockets_says_how_long_it_is(tool: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", "/tmp/" + "x" * 120)
    said = tool("up", "orpheus:tiny", "-d", "--host", "127.0.0.1", *own_port())
    assert (said.code, "at most 107" in said.err, "MSTAR_RUNTIME_DIR" in said.err) == (ExitCode.INVALID, True, True)


@pytest.mark.parametrize(
    ("kind", "gpus", "count", "torch", "names"),
    [
        (None, None, 0, "2.13.0", ("cpu",)),
        (None, None, 2, "2.13.0+cpu", ("cpu",)),
        (None, None, 2, "2.13.0", ("cuda:0", "cuda:1")),
        ("cuda", "1,0", 2, "2.13.0", ("cuda:1", "cuda:0")),
        ("cuda", "0,0", 1, "2.13.0", ("cuda:0", "cuda:0")),
        (None, "auto:2", 3, "2.13.0", ("cuda:0", "cuda:1")),
        ("cpu", None, 2, "2.13.0", ("cpu",)),
    ],
)
def test_devices_are_chosen_in_the_order_given(
    kind: str | None, gpus: str | None, count: int, torch: str, names: tuple[str, ...]
) -> None:
    assert choose_devices(kind, gpus, count, torch).names == names


@pytest.mark.parametrize(
    ("kind", "gpus", "torch", "error"),
    [
        ("cuda", "0,5", "2.13.0", ConfigError),
        ("cuda", "x", "2.13.0", UsageError),
        ("cuda", "auto:9", "2.13.0", ConfigError),
        ("cpu", "0", "2.13.0", UsageError),
        ("cuda", None, "2.13.0+cpu", ConfigError),
        (None, None, None, PluginError),
    ],
)
def test_devices_that_are_not_there_are_refused(
    kind: str | None, gpus: str | None, torch: str | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        choose_devices(kind, gpus, 2, torch)


def test_a_failed_start_names_the_nearest_one_that_would_run(tool: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tool("up", "orpheus", "--device", "cuda", "--dry-run")
    assert said.code != 0 and "mstarctl up orpheus:tiny runs on the CPU" in said.err
    said = tool("up", "orpheus:tiny", "--device", "cuda", "--dry-run")
    assert "mstarctl up orpheus:tiny --device cpu runs on the CPU" in said.err
    said = tool("up", "orpheus", "--weights", "/nowhere", "--dry-run")
    assert "mstarctl up orpheus:tiny runs on the CPU" in said.err
    said = tool("up", "orpheus", "--log-level", "loud", "--dry-run")
    assert said.code == 2 and "orpheus:tiny" not in said.err


def test_the_api_serves_this_host_only_by_default(tool: Cli) -> None:
    said = tool("up", "orpheus:tiny", "--dry-run", "-o", "json", *own_port())
    assert (said.items[0]["host"], "is open to every host" in said.err) == ("127.0.0.1", False)


@pytest.mark.parametrize("way", [["--dry-run"], ["-d"]], ids=["dry run", "start"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--tls-cert", "nope.pem", "--tls-key", "nope.key"], "the certificate"),
        (["--tls-key", "nope.key"], "must be set together"),
        (["--api-key-file", "nope.keys"], "nope.keys cannot be read"),
        (["--socket-path-prefix", "f/x"], "the run directory cannot be written"),
    ],
    ids=["certificate", "half a pair", "key file", "run directory"],
)
def test_files_of_a_start_are_checked_in_its_plan(
    tool: Cli, tmp_path: Path, given: list[str], words: str, way: list[str]
) -> None:
    (tmp_path / "f").write_text("")
    said = tool("up", "orpheus:tiny", *way, *given, *own_port())
    assert (said.code, words in said.err) == (ExitCode.INVALID, True), said.err
    assert list(deployments()) == []


def test_a_log_folder_that_cannot_be_written_is_found_by_a_dry_run(
    tool: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "in-the-way").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "in-the-way"))
    said = tool("up", "orpheus:tiny", "--dry-run", *own_port())
    assert (said.code, "the log folder cannot be written" in said.err) == (ExitCode.INVALID, True), said.err


def test_a_dry_run_names_the_walks_and_the_replicas_of_each_rank(tool: Cli) -> None:
    said = tool("up", "orpheus_pd_disaggregated:tiny", "--dry-run", *own_port())
    assert "LLM: rank 0 for prefill; rank 1 for decode" in said.out, said.err
    assert "LLM: rank 0 or 1" in tool("up", "orpheus_replicas:tiny", "--dry-run", *own_port()).out


@pytest.mark.parametrize(
    "words",
    [
        ["bagel_cfg_parallel:mini"],
        ["bagel:mini", "--config", "bagel_cfg_parallel"],
        ["bagel:mini", "--config", "bagel_cfg_parallel.yaml"],
        ["bagel_cfg_parallel.yaml", "--set", "model=bagel:mini"],
    ],
    ids=" ".join,
)
def test_parallel_guidance_is_a_layout_of_the_one_model(tool: Cli, words: list[str]) -> None:
    said = tool("up", *words, "--dry-run", "-o", "json", *own_port())
    assert said.code == ExitCode.DONE, said.err
    (item,) = said.items
    assert (item["model"], item["name"], item["weights"]) == ("bagel", "bagel_cfg_parallel", "mini")
    assert [rank["nodes"] for rank in item["ranks"]][1:] == [["LLM_cfg_text"], ["LLM_cfg_img"]]


def test_a_file_that_is_not_there_gets_the_nearest(tool: Cli) -> None:
    said = tool("up", "orpheus:mini", "--config", "orpheus_colocate.yaml", "--dry-run")
    assert (said.code, "did you mean 'orpheus_colocated'?" in said.err) == (ExitCode.INVALID, True), said.err


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["nosuch.yaml"], ExitCode.INVALID, "mstarctl models ls"),
        (["bad.yaml"], ExitCode.INVALID, "check indentation, colons and brackets"),
        (["binary.yaml"], ExitCode.INVALID, "a deployment file is YAML"),
        ([str(Path("/tmp"))], ExitCode.INVALID, "give a YAML file, or --weights /tmp"),
        (["orpheus", "--port", "eighty"], ExitCode.USAGE, "give a whole number"),
        (
            ["orpheus:mini", "--set", "max_seq_len=1"],
            ExitCode.INVALID,
            "its prompt with the tokens that the model adds",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_names_the_way_out(
    tool: Cli, tmp_path: Path, words: list[str], code: ExitCode, hint: str
) -> None:
    (tmp_path / "bad.yaml").write_text("model: orpheus\n  x: [1,\n")
    (tmp_path / "binary.yaml").write_bytes(bytes(range(128, 256)))
    said = tool("up", *words)
    assert (said.code, hint in said.err) == (code, True), said.err
