"""Every live command on one real deployment of the miniature: up, call, ps, trace, cancel, a killed worker, down."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pytest

from mstar_core.errors import ExitCode, MstarError
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client import AdminClient
from tests.fakes.ports import free_port
from tests.runtime.deployment import cache_dir

Cli = Callable[..., Any]
SOUND = ("--param", "max_output_tokens=160", "--param", "ignore_eos=true")
"""160 ids are 22 whole frames: enough for several windows of sound with any weights."""

LONG = ("--param", "max_output_tokens=8000", "--param", "ignore_eos=true")
WAIT_S = 100.0
STARTS = 4

pytestmark = pytest.mark.timeout(400)  # several waits of a test may be long on a busy machine


def mstarctl(runtime: Path, *words: str, **how: Any) -> subprocess.Popen[str]:
    """A command line in a process of its own, as an operator starts it."""
    environment = {
        **os.environ,
        "MSTAR_RUNTIME_DIR": str(runtime),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
        "NO_COLOR": "1",
    }
    environment.pop("XDG_STATE_HOME", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "mstarctl", *words]
    return subprocess.Popen(command, env=environment, text=True, cwd=runtime, **{**pipes, **how})


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directories' folder, with orpheus:tiny running in it."""
    folder = Path(tempfile.mkdtemp(prefix="mst-"))
    spool = tmp_path_factory.mktemp("spool")
    (spool / "of another").write_text("kept")
    words = (
        "--host",
        "127.0.0.1",
        "--port",
        str(free_port()),
        "--cache-dir",
        str(cache_dir()),
        "--log-stats",
        "--upload-dir",
        str(spool),
    )
    with mstarctl(folder, "up", "orpheus:tiny", "-d", *words) as up:
        out, err = up.communicate(timeout=WAIT_S)
    assert up.returncode == 0, err
    assert "ready in" in err and "mstarctl call orpheus" in err and out == ""
    (own,) = spool.glob("mstar-orpheus-*")
    assert own.stat().st_mode & 0o777 == 0o700
    yield folder
    with mstarctl(folder, "down", "--all", "--now") as down:
        down.communicate(timeout=WAIT_S)
    left = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder, ignore_errors=True)
    assert left == [".state"]
    assert [path.name for path in spool.iterdir()] == ["of another"]


@pytest.fixture
def here(deployed: Path, tool: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Command lines in this process, against that deployment."""
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(deployed))
    return tool


def admin() -> AdminClient:
    return AdminClient.of(RunDirectory.of("orpheus"))


def until(is_so: Callable[[], Any], what: str) -> Any:
    """Wait for something to come true."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        value = is_so()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"never: {what}")


def test_a_sentence_becomes_a_file(here: Cli) -> None:
    said = here("call", "orpheus", "--text", "Hello there", *SOUND, "--voice", "tara", "--out", "a.wav", "-o", "json")
    assert said.code == 0, said.err
    item = json.loads(said.out)["items"][0]
    assert "the sound is noise" in said.err and "time to first audio" in said.err
    with wave.open("a.wav") as sound:
        assert sound.getnframes() / sound.getframerate() == pytest.approx(item["audio_s"], abs=1e-4)
    assert Path("a.wav").stat().st_size == 44 + item["bytes"]

    refused = here("call", "--text", "Hello", "--voice", "nobody", "--out", "b.wav")
    assert (refused.code, "the voices are tara" in refused.err) == (ExitCode.USAGE, True)
    assert not Path("b.wav").exists()
    assert here("call", "--text", "x", "--image", "a.wav").code == ExitCode.USAGE
    assert here("call", "--text", "x", "--out", "no/such/folder.wav").code == ExitCode.INVALID
    assert here("call", "--text", "x", "--out", "a.png").code == ExitCode.USAGE
    assert here("call").code == ExitCode.USAGE
    second = here("up", "orpheus:tiny", "-d", "--port", str(free_port()))
    assert (second.code, "already running" in second.err) == (ExitCode.START_FAILED, True)


def test_a_control_loop_counts_its_deadlines(here: Cli) -> None:
    said = here("call", "--text", "Hi", "--param", "max_output_tokens=8", "--rate", "2", "--ticks", "3", "-o", "json")
    (item,) = said.items
    assert said.code == 0 and item["ticks"] == item["sent"] + item["skipped"] == 3
    assert item["missed"] == item["late"] + item["skipped"] and item["p50_ms"] <= item["max_ms"]
    hopeless = here("call", "--text", "Hi", *SOUND, "--rate", "1000", "--ticks", "50", "--max-misses", "1")
    assert (hopeless.code, "deadlines were missed" in hopeless.err) == (ExitCode.ASSERTION, True)
    assert here("call", "--text", "Hi", "--max-misses", "1").code == ExitCode.USAGE


def test_a_request_is_listed_traced_and_described(here: Cli, tmp_path: Path, deployed: Path) -> None:
    assert here("call", "--text", "Hello", *SOUND, "--request-id", "r-7f3a", "--out", "a.wav").code == 0
    # What processes tell is gathered for a tenth of a second.
    (item,) = until(lambda: here("requests", "--filter", "id:r-7f* ended", "-o", "json").items, "its end")
    assert (item["name"], item["state"], item["tokens"]) == ("r-7f3a", "finished", 160)
    assert item["ttft_ms"] > 0 and item["audio_s"] > 1
    started, ended = (datetime.fromisoformat(item[key]) for key in ("started", "ended"))
    assert (ended - started).total_seconds() == pytest.approx(item["age_s"], abs=0.1)
    assert abs((datetime.now(UTC) - ended).total_seconds()) < 60
    assert here("requests", "--filter", "/r-[0-9]f3a/", "-o", "name").out == "request/r-7f3a\n"
    assert here("requests", "--filter", "id:nothing", "-o", "json").items == []
    assert "finished" in here("requests", "--since", "1h", "--sort", "-ttft", "-o", "wide").out
    assert "did you mean 'ttft'?" in here("requests", "--filter", "ttftt>1").err
    assert here("requests", "--sort", "colour").code == ExitCode.USAGE
    assert len(here("requests", "--limit", "1", "-o", "json").items) == 1

    def traced() -> list[str]:
        text = here("trace", "r-7f3a").out
        return text.splitlines() if "159 steps" in text and "snac_decoder" in text else []

    lines = until(traced, "all spans of its trace")
    assert lines[0].startswith("r-7f3a   orpheus   text -> audio") and "TTFT" in lines[0]
    assert any("LLM decode" in line and "#" in line and "159 steps" in line for line in lines), lines
    assert any("snac_decoder" in line for line in lines)
    assert here("trace", "r-7f3a", "--perfetto", "t.json").code == 0
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"} and all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    wrong = here("trace", "r-7f3b")
    assert (wrong.code, "did you mean 'r-7f3a'?" in wrong.err) == (ExitCode.NOT_FOUND, True)
    assert here("trace", "request/r-7f3a").code == here("ps", "deployment/orpheus").code == 0
    assert "finished" in here("describe", "request/r-7f3a").out
    assert here("cancel", "r-7f3a").code == ExitCode.NOT_FOUND
    log_dir = Path(admin().head()["log_dir"])
    stats = log_dir / "stats.ndjson"
    until(lambda: stats.exists() and "r-7f3a" in stats.read_text(), "its line in the statistics")


def test_a_long_request_is_watched_and_cancelled(here: Cli, deployed: Path, tmp_path: Path) -> None:
    out = tmp_path / "long.wav"
    with (
        mstarctl(deployed, "requests", "-w", "-o", "json") as watching,
        mstarctl(deployed, "call", "--text", "Hello", *LONG, "--request-id", "long", "--out", str(out)) as calling,
    ):
        assert watching.stdout is not None
        for line in watching.stdout:
            item = json.loads(line)
            if item["name"] == "long" and item["state"] == "run":
                break
        assert item["kind"] == "request" and item["handle"] > 0
        done = here("cancel", "long")
        assert done.code == 0, done.err
        _, err = calling.communicate(timeout=WAIT_S)
        assert calling.returncode == ExitCode.CANCELLED and "cancelled" in err
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=WAIT_S)
    assert watching.returncode == ExitCode.INTERRUPTED


def test_everything_is_described_in_every_form(here: Cli) -> None:
    for what in ("deployment/orpheus", "rank/0", "node/LLM", "model/orpheus", "plugin/orpheus"):
        said = here("describe", what, "-o", "json")
        assert (said.code, json.loads(said.out)["kind"]) == (0, what.partition("/")[0]), what
        assert here("describe", what).out and here("describe", what, "-o", "yaml").out.startswith("kind:")
        assert here("describe", what, "-o", "name").out == f"{what}\n"
    for what, nearest in (("node/LLN", "node/LLM"), ("rank/7", ""), ("gpu/9", "")):
        said = here("describe", what)
        assert (said.code, nearest in said.err) == (ExitCode.NOT_FOUND, True)
    assert here("describe", "planet/earth").code == here("describe", "rank").code == ExitCode.USAGE


def test_the_socket_is_read_raw_and_as_metrics(here: Cli) -> None:
    assert json.loads(here("api", "GET", "/v1/").out)["name"] == "orpheus"
    assert json.loads(here("api", "get", "/v1/config").out)["settings"]["max_seq_len"]["value"]
    wrong = here("api", "GET", "/v1/snapshto")
    assert (wrong.code, "did you mean" in wrong.err) == (ExitCode.NOT_FOUND, True)
    assert here("api", "GET", "v1").code == here("api", "PUT", "/v1/").code == ExitCode.USAGE
    assert here("api", "POST", "/v1/log-level", "--body", '{"level": "loud"}').code == ExitCode.USAGE
    text = here("metrics").out
    assert "# TYPE mstar_" in text
    names = {item["name"] for item in here("metrics", "--match", "^mstar_", "-o", "json").items}
    assert names and all(name in text for name in names)
    assert here("metrics", "--match", "(").code == ExitCode.USAGE


def test_names_are_completed_from_the_socket(here: Cli, deployed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert here("call", "--text", "Hi", *SOUND, "--request-id", "r-9c11", "--out", "c.wav").code == 0
    monkeypatch.setenv("_MSTARCTL_COMPLETE", "complete_bash")
    for line, expected in (
        ("mstarctl describe node/L", "node/LLM"),
        ("mstarctl drain or", "orpheus"),
        ("mstarctl logs --from wo", "worker/0"),
        ("mstarctl config diff deployment/", "deployment/orpheus"),
        ("mstarctl trace r-9", "r-9c11"),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))

        def completed() -> list[str]:
            with mstarctl(deployed) as asked:
                out, err = asked.communicate(timeout=WAIT_S)
            assert err == ""
            return out.split()  # empty where the socket took longer than a completion waits

        assert until(completed, f"a completion of {line!r}") == [expected]


def test_logs_and_events_are_searched(here: Cli) -> None:
    assert here("call", "--text", "Hi", *SOUND, "--request-id", "r-5d20", "--out", "d.wav").code == 0
    until(lambda: "answered" in here("logs", "--request", "r-5d20", "--from", "api").out, "its line in the log")
    assert here("logs", "--since", "1h", "--level", "error").out == ""
    assert here("logs", "--grep", "deployment.ready", "-o", "json").out.count("\n") == 1
    kinds = [
        json.loads(line)["type"] for line in here("events", "--type", "deployment.*", "-o", "json").out.splitlines()
    ]
    assert kinds[:2] == ["deployment.starting", "deployment.ready"]
    assert here("events", "--since", "0.001s").out == ""


def put_lines(output: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Put each line of a process into a queue, until its output ends or is closed."""
    with contextlib.suppress(ValueError):
        for line in output:
            lines.put(line)


def test_a_killed_worker_is_named_everywhere_and_comes_back(here: Cli, deployed: Path) -> None:
    pid = int(admin().snapshot()["children"]["worker-0"]["pid"])
    with mstarctl(deployed, "ps", "-w", "-o", "json") as watching:
        assert watching.stdout is not None
        lines, seen = queue.SimpleQueue[str](), list[dict[str, Any]]()
        threading.Thread(target=put_lines, args=(watching.stdout, lines), daemon=True).start()
        try:
            assert json.loads(lines.get(timeout=WAIT_S))["state"] == "ready"
            os.kill(pid, signal.SIGKILL)
            while not (seen and seen[-1]["failures"]):  # other figures may change first
                seen.append(json.loads(lines.get(timeout=WAIT_S)))
        except queue.Empty:
            pytest.fail(f"no further line of the watch: {seen}; now {here('ps', '-o', 'json').out}")
        finally:
            watching.kill()
    worse = seen[-1]
    assert worse["kind"] == "deployment"
    # Between two looks it may have come back: then the cause is over, and its state is read from the events.
    until(lambda: "deployment.degraded" in here("events", "--type", "deployment.degraded").out, "its degraded state")
    [failure] = worse["failures"]
    assert failure["message"] == "worker-0 was killed by SIGKILL" and failure["message"] in worse["note"]
    until(lambda: "SIGKILL" in here("events", "--type", "child.died").out, "the event of its end")
    until(lambda: here("ps", "-o", "json").items[0]["state"] == "ready", "ready again")
    assert "SIGKILL" in here("ps", "-o", "wide").out, "the cause stays until the next start"
    assert "SIGKILL" in here("describe", "deployment/orpheus").out


def test_a_worker_killed_during_the_start_is_the_last_thing_that_up_says() -> None:
    for _ in range(STARTS):
        code, err = started_without_its_worker()
        if code:
            break  # else the start was over before the signal came
    last = err.splitlines()[-5:]
    assert code == ExitCode.START_FAILED, err
    assert any("error: worker-0 was killed by SIGKILL" in line and "exit 6" in line for line in last), err
    assert "log: " in last[-1] and "worker-0.log" in last[-1]


def started_without_its_worker() -> tuple[int, str]:
    """Return exit code and stderr of a start whose worker is killed as soon as it exists."""
    folder = Path(tempfile.mkdtemp(prefix="mst-"))
    words = ("up", "orpheus:tiny", "-d", "--name", "other", "--host", "127.0.0.1", "--port", str(free_port()))
    with mstarctl(folder, *words, "--cache-dir", str(cache_dir())) as up:
        client = AdminClient(folder / "other" / "admin.sock", "other")

        def worker() -> int:
            try:
                return int(client.snapshot()["children"].get("worker-0", {}).get("pid") or 0)
            except MstarError:
                return 0

        os.kill(until(worker, "a worker"), signal.SIGKILL)
        _, err = up.communicate(timeout=WAIT_S)
    with mstarctl(folder, "down", "--all", "--now") as down:
        down.communicate(timeout=WAIT_S)
    shutil.rmtree(folder, ignore_errors=True)
    return up.returncode, err
