"""The commands in whole: exit codes, results on disk, comparisons, sweeps, plots."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mstar_core.workloads import ServedModel, WorkloadRequest
from mstarctl.bench.client.protocols import encode
from mstarctl.bench.load.workloads import GENERIC, with_params, workload_of
from mstarctl.bench.null_server import ANSWER, NullBehaviour
from mstarctl.bench.result import ResultFolder
from mstarctl.bench.selftest import null_target
from mstarctl.main import run

TOKENIZER = Path(__file__).parents[3] / "plugins/mstar-orpheus/src/mstar_orpheus/checkpoint/mini/lm"
ANSWERED = base64.b64decode(ANSWER).decode()
LIMIT_S = 120.0
FAST = ("--workload", "chat", "--warmup", "2", "--no-check", "--grace", "2s", "--plain")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that answers after 20 ms with five lines."""
    with null_target(NullBehaviour(delay_s=0.02, lines=5, gap_s=0.002)) as target:
        yield target.url


@pytest.fixture(scope="module")
def results(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two results of the same load."""
    folder = tmp_path_factory.mktemp("results")
    for name in "ab":
        words = ["bench", "run", "--url", url, "--rate", "40", "--duration", "2s", *FAST]
        assert run([*words, "--slo", "ttft<500ms", "--out", str(folder / name)]) == 0
    return folder


def test_a_result_has_all_its_files(results: Path) -> None:
    files = {path.name for path in (results / "a").iterdir()}
    assert files >= {"result.json", "requests.jsonl", "timeline.jsonl", "env.json"}
    assert not (results / "a.partial").exists()
    facts = ResultFolder.opened(results / "a").facts
    assert facts["statuses"] == {"ok": facts["intended"]}
    assert facts["definitions"]["ttft"] and facts["definitions"]["version"] == 1
    assert facts["metrics"]["goodput"]["value"] == pytest.approx(facts["metrics"]["offered"]["value"])
    assert 20 <= facts["metrics"]["ttft"]["p50"] < 200


def test_tokens_are_counted_by_a_tokenizer_where_the_server_gives_no_count(url: str, tmp_path: Path) -> None:
    words = ["bench", "run", "--url", url, "--rate", "20", "--duration", "1s", *FAST]
    assert run([*words, "--out", str(tmp_path / "chunks")]) == 0
    assert run([*words, "--tokenizer", str(TOKENIZER), "--out", str(tmp_path / "counted")]) == 0
    chunks, counted = (ResultFolder.opened(tmp_path / name) for name in ("chunks", "counted"))
    assert any("approximate" in note for note in chunks.facts["notes"])
    assert not any("approximate" in note for note in counted.facts["notes"])
    of_line = len(Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).encode(ANSWERED, add_special_tokens=False).ids)
    assert of_line > 1
    for actual, amount in ((chunks, 1.0), (counted, of_line)):
        assert {chunk.amount for outcome in actual.outcomes() for chunk in outcome.chunks} == {amount}


def test_a_tokenizer_that_does_not_exist_is_refused_before_the_load(url: str, tmp_path: Path) -> None:
    words = ["bench", "run", "--url", url, "--rate", "20", "--duration", "1s", *FAST, "--out", str(tmp_path / "x")]
    assert run([*words, "--tokenizer", str(tmp_path)]) == 3
    assert not (tmp_path / "x.partial").exists()


def test_parameters_of_the_command_replace_those_of_every_request() -> None:
    card = ServedModel(name="m", endpoints=("/generate",))
    workload = with_params(workload_of("chat", GENERIC), {"max_output_tokens": 7, "top_p": 0.5})
    requests = workload.requests(card, 1, 3)
    assert [request.params["max_output_tokens"] for request in requests] == [7, 7, 7]
    assert all(request.params["top_p"] == 0.5 and request.params["ignore_eos"] for request in requests)
    assert run(["bench", "run", "--url", "http://127.0.0.1:1", "--rate", "1", "--param", "no"]) == 2


def test_a_chat_that_is_spoken_asks_for_a_voice_of_the_model() -> None:
    request = WorkloadRequest(outputs=("text", "audio"), text="hello")
    for parameters, voice in (({"voice": {"default": "ethan"}}, "ethan"), ({}, "alloy")):
        card = ServedModel(name="m", parameters=parameters, endpoints=("/generate",))
        assert json.loads(encode(request, "openai", card).body)["audio"]["voice"] == voice


def test_no_prompt_is_stored(results: Path) -> None:
    for path in (results / "a").iterdir():
        assert "lantern" not in path.read_text()


def test_show_computes_the_same_figures_from_raw_data(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "show", str(results / "a"), "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["metrics"] == ResultFolder.opened(results / "a").facts["metrics"]
    assert run(["bench", "show", str(results / "a"), "--by", "status", "--slowest", "2"]) == 0
    out = capsys.readouterr().out
    assert "goal ttft<500ms: met by 100.0 %" in out and "throughput" in out


def test_a_result_compared_with_itself_is_the_same(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(results / "a")
    assert run(["bench", "compare", a, a, "--threshold", "p50.ttft=5%", "-o", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {row["verdict"] for row in content["metrics"]} <= {"same", "too few"}
    assert run(["bench", "compare", a, a, "-o", "md"]) == 0
    assert "| p50.ttft |" in capsys.readouterr().out


def test_a_worse_result_beyond_its_threshold_is_exit_8(results: Path, tmp_path: Path) -> None:
    with null_target(NullBehaviour(delay_s=0.06, lines=5, gap_s=0.002)) as target:
        words = ["bench", "run", "--url", target.url, "--rate", "40", "--duration", "2s", *FAST]
        assert run([*words, "--out", str(tmp_path / "slow")]) == 0
    both = [str(results / "a"), str(tmp_path / "slow")]
    assert run(["bench", "compare", *both, "--threshold", "p50.ttft=5%", "--allow-env-diff"]) == 8
    assert run(["bench", "compare", *reversed(both), "--threshold", "p50.ttft=5%", "--allow-env-diff"]) == 0


def test_different_environments_are_exit_3(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in (results / "b").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    env = json.loads((other / "env.json").read_text())
    env["packages"]["numpy"] = "0.1"
    (other / "env.json").write_text(json.dumps(env))
    words = ["bench", "compare", str(results / "a"), str(other)]
    assert run(words) == 3
    assert "--expect packages" in capsys.readouterr().err
    assert run([*words, "--expect", "packages"]) == 0


@pytest.mark.parametrize("what", ["cdf", "ttft", "itl", "timeline"])
def test_plots_are_drawn_and_written(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    words = ["bench", "plot", str(results / "a"), "--what", what]
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "seed 0" in out and any(0x2800 < ord(char) < 0x2900 for char in out)
    assert run([*words, "--svg", str(tmp_path / "x.svg"), "--png", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_of_three_points_has_a_plot(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    words = ["bench", "sweep", "--url", url, "--rate", "5,10,20", "--duration", "1s", "--slo", "ttft<500ms", *FAST]
    assert run([*words, "--out", str(out)]) == 0
    assert "knee 20.0/s" in capsys.readouterr().out
    assert run(["bench", "plot", str(out)]) == 0
    assert "knee" in capsys.readouterr().out
    assert run(["bench", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "knee 20.0/s" in shown and "throughput" in shown
    assert run(["bench", "show", str(out), "-o", "md"]) == 0
    assert "| 20.0/s |" in capsys.readouterr().out
    facts = json.loads((out / "sweep.json").read_text())
    assert [point["load"] for point in facts["points"]] == [5.0, 10.0, 20.0]


@pytest.mark.slow
def test_an_automatic_sweep_measures_without_load_first(tmp_path: Path) -> None:
    """The unloaded point comes first, then doubled clients, then open loads."""
    with null_target(NullBehaviour(delay_s=0.02)) as target:
        words = ["bench", "sweep", "--url", target.url, "--rate", "auto", "--duration", "1s", "--first-clients", "512"]
        assert run([*words, "--slo", "ttft<200ms", *FAST, "--out", str(tmp_path / "auto")]) == 0
    facts = json.loads((tmp_path / "auto" / "sweep.json").read_text())
    assert [point["kind"] for point in facts["points"]][:2] == ["clients", "clients"]
    assert facts["points"][0]["load"] == 1


def wrong(*words: str) -> tuple[str, ...]:
    return ("bench", "run", "--url", "http://127.0.0.1:9", "--ready-timeout", "0.2s", *words)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("bench", "run", "--rate", "1"), 2),
        (wrong("--rate", "1", "--concurrency", "2"), 2),
        (wrong("--rate", "1", "--assert", "p99.tfft<1s"), 2),
        (wrong("--rate", "1", "--requests", "3", "--duration", "1s"), 2),
        (wrong("--rate", "1", "--period", "1s"), 2),
        (wrong("--rate", "1", "--cancel-rate", "much"), 2),
        (wrong("--rate", "1"), 5),
        (("bench", "show", "/nowhere"), 3),
        (("bench", "compare", "/nowhere", "/nowhere"), 3),
        (("bench", "sweep", "--rate", "4..1"), 2),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, tuple) else str(value),
)
def test_wrong_words_and_unreachable_servers_have_their_codes(words: tuple[str, ...], code: int) -> None:
    assert run(words) == code


def test_an_unknown_workload_is_exit_4(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "run", "--url", url, "--rate", "1", "--workload", "chatt"]) == 4
    assert "'chat'" in capsys.readouterr().err


def test_a_broken_file_of_requests_is_exit_3(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"text": "a"}\n{"txt": "b"}\n')
    assert run(["bench", "run", "--url", url, "--rate", "1", "--workload", str(file)]) == 3
    assert f"{file}:2" in capsys.readouterr().err


def test_a_trace_replays_its_times(url: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"t": 10 + at, "text": "a"}) + "\n" for at in (0.0, 0.2, 0.6)))
    out = tmp_path / "out"
    words = ["bench", "run", "--url", url, "--trace", str(file), "--speed", "2", *FAST[2:], "--out", str(out)]
    assert run(words) == 0
    assert [round(outcome.due_s, 2) for outcome in ResultFolder.opened(out).outcomes()] == [0.0, 0.1, 0.3]


def test_a_failed_assertion_is_exit_8(url: str, tmp_path: Path) -> None:
    words = ["bench", "run", "--url", url, "--concurrency", "1", "--requests", "20", *FAST]
    assert run([*words, "--assert", "p50.ttft<1ms", "--out", str(tmp_path / "x")]) == 8
    assert run([*words, "--assert", "p50.ttft<2s,error_rate<1%", "--out", str(tmp_path / "y")]) == 0


def test_a_run_without_success_is_exit_8(tmp_path: Path) -> None:
    with null_target(NullBehaviour(status=500)) as target:
        words = ["bench", "run", "--url", target.url, "--concurrency", "1", "--requests", "3", *FAST]
        assert run([*words, "--out", str(tmp_path / "x")]) == 8


def test_an_existing_result_is_not_overwritten(url: str, results: Path) -> None:
    words = ["bench", "run", "--url", url, "--concurrency", "1", "--requests", "1", *FAST]
    assert run([*words, "--out", str(results / "a")]) == 3


def test_ctrl_c_keeps_the_result_and_is_exit_130(url: str, tmp_path: Path) -> None:
    out = tmp_path / "x"
    words = ["bench", "run", "--url", url, "--rate", "20", "--duration", "600s", *FAST, "--out", str(out)]
    with subprocess.Popen([sys.executable, "-m", "mstarctl", *words], stderr=subprocess.PIPE) as process:
        end = time.monotonic() + LIMIT_S
        records = tmp_path / "x.partial" / "records.spool"
        while not (records.exists() and records.stat().st_size) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    facts = ResultFolder.opened(out).facts
    assert facts["is_interrupted"] and facts["statuses"]["ok"] > 0


def test_a_server_that_never_answers_is_exit_7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mstarctl.bench import options

    original: Callable[..., Any] = options.RunOptions
    monkeypatch.setattr(options, "RunOptions", lambda **given: original(**given, silent_s=1.0))
    with null_target(NullBehaviour(hangs=True)) as target:
        words = ["bench", "run", "--url", target.url, "--rate", "5", "--duration", "20s", *FAST]
        assert run([*words, "--warmup", "0", "--out", str(tmp_path / "x")]) == 7


def test_compare_runs_both_sides_in_turn(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--url {url} --rate 20 --duration 1s --workload chat --warmup 1 --no-check"
    out = tmp_path / "both"
    assert (
        run(["bench", "compare", "--run-a", words, "--run-b", words, "--repeat", "2", "--plain", "--out", str(out)])
        == 0
    )
    assert sorted(path.name for path in (out / "A").iterdir()) == ["00", "03"]
    assert "2 + 2 runs" in capsys.readouterr().out
