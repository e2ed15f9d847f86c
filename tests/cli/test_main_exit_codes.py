"""A command line for every exit code, with the error on stderr and nothing on stdout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mstar_core.errors import ExitCode
from tests.cli.conftest import Cli, Said
from tests.fakes.admin import HEAD, canned

REFUSAL = {"code": "refused", "title": "this deployment belongs to another user", "detail": "peer uid 7", "hint": ""}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder for sockets and run directories."""
    folder = Path(tempfile.mkdtemp(prefix="mst-"))
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def done(cli: Cli, short: Path) -> Said:
    return cli("version")


def internal(cli: Cli, short: Path) -> Said:
    with canned(short / "s", {"/v1/": (200, HEAD), "/v1/metrics": (500, {"code": "internal_error", "title": "broke"})}):
        return cli("--socket", str(short / "s"), "metrics")


def usage(cli: Cli, short: Path) -> Said:
    return cli("requests", "--sort", "colour")


def invalid(cli: Cli, short: Path) -> Said:
    (short / "bad.yaml").write_text("model: toy\nmax_quee: 3\n")
    return cli("config", "show", str(short / "bad.yaml"), "--resolved")


def not_found(cli: Cli, short: Path) -> Said:
    return cli("models", "show", "toyy")


def unreachable(cli: Cli, short: Path) -> Said:
    return cli("--socket", str(short / "nobody"), "drain")


def timed_out(cli: Cli, short: Path) -> Said:
    late = {"code": "timeout", "title": "the request did not end within 1 s", "detail": "", "hint": ""}
    with canned(short / "s", {"/v1/": (200, HEAD), "/v1/requests/r/trace": (504, late)}):
        return cli("--socket", str(short / "s"), "trace", "r")


def refused(cli: Cli, short: Path) -> Said:
    with canned(short / "s", {"/v1/": (200, HEAD), "/v1/deployment/drain": (403, REFUSAL)}):
        return cli("--socket", str(short / "s"), "drain")


WAYS: dict[ExitCode, Callable[[Cli, Path], Said]] = {
    ExitCode.DONE: done,
    ExitCode.INTERNAL: internal,
    ExitCode.USAGE: usage,
    ExitCode.INVALID: invalid,
    ExitCode.NOT_FOUND: not_found,
    ExitCode.UNREACHABLE: unreachable,
    ExitCode.TIMED_OUT: timed_out,
    ExitCode.REFUSED: refused,
}
ELSEWHERE = {
    ExitCode.START_FAILED: "tests/cli/life/test_up_plans.py::test_a_taken_port_is_an_error_that_names_a_free_one",
    ExitCode.ASSERTION: "tests/cli/life/test_whole.py::test_a_control_loop_counts_its_deadlines",
    ExitCode.CANCELLED: "tests/cli/life/test_whole.py::test_a_long_request_is_watched_and_cancelled",
    ExitCode.INTERRUPTED: "tests/cli/life/test_interrupted.py::test_ctrl_c_ends_a_start",
}
"""Codes that need a deployment; their tests are named here, so that no code is without one."""


@pytest.mark.parametrize("code", WAYS, ids=lambda code: code.name)
def test_a_command_ends_with_it(code: ExitCode, cli: Cli, short: Path) -> None:
    said = WAYS[code](cli, short)
    assert said.code == code, said.err
    if code is not ExitCode.DONE:
        assert said.out == "" and said.err.startswith("error: ") and f"exit {int(code)}]" in said.err


def test_no_code_is_without_a_test() -> None:
    assert set(WAYS) | set(ELSEWHERE) == set(ExitCode)
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (Path(__file__).resolve().parents[2] / file).read_text()


@pytest.mark.parametrize(
    ("api", "least", "words"),
    [(3, 2, "update mstarctl on this machine"), (0, 0, "use the mstarctl of its version")],
)
def test_the_side_to_update_is_named(api: int, least: int, words: str, cli: Cli, short: Path) -> None:
    with canned(short / "s", {"/v1/": (200, {**HEAD, "api": api, "min_api": least})}):
        said = cli("--socket", str(short / "s"), "ps")
    assert (said.code, words in said.err) == (ExitCode.USAGE, True), said.err


def test_a_newer_minor_is_understood(cli: Cli, short: Path) -> None:
    item = {
        "id": "r",
        "handle": 1,
        "brand_new": {"x": 1},
        "inputs": [],
        "outputs": [],
        "state": "run",
        "node": None,
        "rank": None,
        "age_s": 1.0,
        "rtf": None,
        "ttft_ms": None,
        "ttfa_ms": None,
        "tokens": 0,
        "audio_s": 0.0,
        "waited_ms": 0.0,
        "pages": 0,
        "walks": {},
        "active": [],
        "why": "",
        "error": "",
        "started": 1.0,
        "ended": None,
    }
    answers = {"/v1/": (200, {**HEAD, "api": 2, "features": ["more"]}), "/v1/requests": (200, {"items": [item]})}
    with canned(short / "s", answers) as asked:
        said = cli("--socket", str(short / "s"), "requests", "--filter", "state:run", "--since", "5m")
    assert said.code == 0 and "run" in said.out
    assert asked[-1] == "GET /v1/requests?limit=50&sort=&filter=state%3Arun&since=300.0"


def test_completion_waits_no_longer_than_its_limit(cli: Cli, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import time

    from mstarctl import complete

    run = short / "slow"
    run.mkdir()
    (run / "spec.json").write_text("{}")
    with (
        (run / "lock").open("w") as lock,
        canned(run / "admin.sock", {"/v1/requests": (200, {"items": []})}, wait_s=60),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("1")
        lock.flush()
        begun = time.monotonic()
        assert complete.request_ids("r") == [] and complete.described("node/") == []
        assert time.monotonic() - begun < 30, "each may wait 0.15 s; the socket answers after 60"
        assert complete.deployment_names("s") == ["slow"]


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (("deployment/orpheus", "request/r-7f3a"), "mstarctl describe request/r-7f3a orpheus"),
        (("rank/0", "node/LLM"), "mstarctl describe node/LLM"),
        (("model/toy", "orpheus"), "mstarctl describe model/toy"),
    ],
)
def test_describe_ignores_no_second_name(cli: Cli, short: Path, words: tuple[str, str], way_out: str) -> None:
    said = cli("describe", *words)
    assert (said.code, said.out) == (ExitCode.USAGE, "") and way_out in said.err


def test_a_full_disk_is_no_internal_error(short: Path) -> None:
    command = [sys.executable, "-m", "mstarctl", "version", "-o", "json"]
    with open("/dev/full", "wb") as full:
        said = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert said.returncode == ExitCode.INVALID
    assert "no space is left" in said.stderr and "internal" not in said.stderr
