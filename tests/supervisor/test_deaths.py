"""Death records of processes that wrote none: signal, memory, last log line, out-of-memory kills."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mstar_core.host.readings.processes import OOM_WINDOW_S, OomKills
from mstar_core.host.run_dir import RunDirectory
from mstar_core.process.failures import fatal_path, read_fatal
from mstar_core.supervisor.deaths import Circumstances, death_record, public_sentence


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "children").mkdir()
    return RunDirectory(tmp_path)


def child(*lines: str, age_s: float = 0.0) -> Any:
    written = time.monotonic() - age_s
    log = SimpleNamespace(tail=list(lines), path=Path("/logs/worker-0.log"), written=written)
    process = SimpleNamespace(fatal=lambda: None)
    return SimpleNamespace(
        name="worker-0", pid=os.getpid(), incarnation=2, phase="weights", hung="", log=log, process=process, host=""
    )


def test_the_record_of_a_child_that_hung_says_so_first(run: RunDirectory) -> None:
    hung = child('File "<frozen runpy>", line 88 in _run_code')
    hung.hung = "no sign of life for 10 s"
    record = death_record(hung, run, -signal.SIGKILL, Circumstances(memory_kills=0))
    assert record["message"] == "worker-0 hung and was killed by SIGKILL"
    assert record["detail"] == "no sign of life for 10 s" and record["hint"] == "its stacks are in its log"


def test_the_record_of_a_killed_process_has_signal_memory_and_last_line(run: RunDirectory) -> None:
    known = Circumstances(resident_bytes=3 << 30, memory_kills=0)
    record = death_record(child('{"message": "reading layer 7"}'), run, -signal.SIGKILL, known)
    assert (record["signal"], record["resident_bytes"], record["phase"]) == ("SIGKILL", 3 << 30, "weights")
    assert record["message"] == "worker-0 was killed by SIGKILL"
    assert record["detail"] == "resident memory 3,072 MiB; last log line: reading layer 7"
    assert "reports no kill" in record["hint"]
    written = json.loads((run.children / "worker-0.fatal.json").read_text())
    assert written == record


@pytest.mark.parametrize("line", ['{"message": "serving"}', "serving", "3"])
@pytest.mark.parametrize("age_s", [0.0, 20.0])
def test_a_log_line_from_long_before_the_death_is_left_out(run: RunDirectory, line: str, age_s: float) -> None:
    detail = death_record(child(line, age_s=age_s), run, -signal.SIGKILL, Circumstances())["detail"]
    assert detail == ("" if age_s else f"last log line: {'3' if line == '3' else 'serving'}")


@pytest.mark.parametrize(
    ("name", "hung", "words"),
    [
        ("worker-1", "", "a worker died"),
        ("follower-1", "", "a worker died"),
        ("worker-0", "no sign of life", "a worker stopped responding"),
        ("conductor", "", "the conductor died"),
        ("other", "", "a process died"),
    ],
)
def test_clients_read_of_a_death_without_its_log_its_memory_or_its_number(
    run: RunDirectory, name: str, hung: str, words: str
) -> None:
    dead = child("a line with /secret/path")
    dead.name, dead.hung = name, hung
    record = death_record(dead, run, -signal.SIGKILL, Circumstances(resident_bytes=3 << 30))
    assert public_sentence(record) == words


def test_an_out_of_memory_kill_is_named_with_a_hint(run: RunDirectory) -> None:
    record = death_record(child(), run, -signal.SIGKILL, Circumstances(memory_kills=1))
    assert "killed 1 process of this host for lack of memory" in record["hint"] and "kv_cache.pages" in record["hint"]


def test_the_record_of_the_process_itself_wins(run: RunDirectory) -> None:
    own = {"pid": os.getpid(), "message": "no such file", "phase": "kv", "class": "WeightsError"}
    path = fatal_path(run.path, "worker-0")
    path.write_text(json.dumps(own))
    dead = child()
    dead.process.fatal = lambda: read_fatal(path, os.getpid())
    assert read_fatal(path, 1) is None, "the record of an earlier process"
    record = death_record(dead, run, 3, Circumstances(memory_kills=1))
    assert (record["message"], record["phase"], record["status"]) == ("no such file", "kv", 3)


def test_kills_count_for_a_few_seconds(run: RunDirectory, tmp_path: Path) -> None:
    path = tmp_path / "vmstat"
    kills = OomKills(path)
    kills.sample(0.0)  # a kernel without the counter
    assert kills.recent() is None
    assert "may have run out of memory" in death_record(child(), run, -signal.SIGKILL, Circumstances())["hint"]
    for second, count in enumerate((4, 4, 5, 5, 5, 5, 5)):
        path.write_text(f"nr_free_pages 9\noom_kill {count}\n")
        wanted = None if second == 0 else 1 if 2 <= second <= 2 + OOM_WINDOW_S else 0
        assert kills.recent() == wanted, second
        kills.sample(float(second))
