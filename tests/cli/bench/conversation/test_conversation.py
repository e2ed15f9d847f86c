"""`mstarctl bench conversation` against an api of fakes, and its figures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mstar_core.codec import wav_header
from mstar_core.messages.requests import NewRequest
from mstarctl.bench.conversation.figures import DEFINITIONS, figures
from mstarctl.bench.conversation.memory import MemoryReadings
from mstarctl.bench.conversation.outcome import ConversationOutcome, TurnOutcome
from mstarctl.bench.conversation.stored import places_of
from mstarctl.main import run
from mstarctl.talk.turns import read_turn
from tests.api.live import live_api
from tests.fakes.conductor import FakeDeployment, Script
from tests.fakes.omni_model import SPEC

ROOT = Path(__file__).parents[4]
WORD = ROOT / "plugins/mstar-qwen3omni/src/mstar_qwen3omni/checkpoint/mini/seven.wav"
RATE = 24_000


def answered(start: float, *, stopped: float, spoken: float, interrupted: float | None = None) -> TurnOutcome:
    """Return a turn whose answer has five pieces of 0.1 s, 0.1 s apart."""
    marks = [start + 0.1 * number for number in range(5)]
    turn = TurnOutcome(spoken=spoken, stopped=stopped, marks=marks, lengths=[0.1] * 5, interrupted=interrupted)
    turn.status = "completed" if interrupted is None else "cancelled"
    return turn


def test_figures_follow_their_definitions() -> None:
    first = answered(1.2, stopped=1.0, spoken=0.5)
    cut = answered(2.3, stopped=2.0, spoken=1.5, interrupted=2.65)
    late = answered(3.0, stopped=2.9, spoken=2.5)
    late.marks[3:] = [3.55, 3.65]
    late.count_tokens({"input_tokens": 100, "input_token_details": {"cached_tokens": 75}})
    cut.count_tokens({"input_tokens": 900})  # a cancelled answer does not report what was cached
    outcome = ConversationOutcome(
        turns=[first, cut, late, TurnOutcome()], false_starts=2, errors=["x"], lags_s=[0.0, 0.002]
    )
    found = figures([outcome])
    assert (found["sessions"], found["turns"], found["unanswered"]) == (1, 4, 1)
    assert found["first_audio"]["n"] == 3 and found["first_audio"]["p50"] == pytest.approx(200)
    assert found["gap"]["p50"] == pytest.approx(700)
    assert found["lag"]["max"] == pytest.approx(2)
    assert found["interrupt"]["n"] == 1 and found["interrupt"]["p50"] == pytest.approx(50)
    assert (found["underruns"], found["false_starts"], found["errors"], found["cached"]) == (1, 2, 1, 0.75)
    assert (found["completed"], found["interrupted"]) == (2, 1)
    assert found["causes"] == {"not spoken: the conversation had ended": 1}


def test_an_answer_at_the_limit_of_tokens_is_completed_and_others_have_a_cause() -> None:
    limited = answered(1.2, stopped=1.0, spoken=0.5)
    limited.status, limited.reason = "incomplete", "max_output_tokens"
    failed = TurnOutcome(spoken=1.0, stopped=1.5, status="failed", reason="queue_full")
    silent = TurnOutcome(spoken=1.0, stopped=1.5, status="completed")
    unheard = TurnOutcome(spoken=1.0)
    waiting = TurnOutcome(spoken=1.0, stopped=1.5)
    found = figures([ConversationOutcome(turns=[limited, failed, silent, unheard, waiting])])
    assert (found["completed"], found["unanswered"]) == (2, 4)
    causes = ("failed: queue_full", "an answer without sound", "no end of speech was found", "no answer in time")
    assert found["causes"] == dict.fromkeys(causes, 1)


def test_playback_of_a_turn_waits_for_late_pieces() -> None:
    turn = TurnOutcome(marks=[1.0, 2.0], lengths=[0.5, 0.5])
    assert [turn.heard_s(now) for now in (2.0, 2.25, 9.0)] == pytest.approx([0.5, 0.75, 1.0])


def conversations(script: Script, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, object]]:
    with live_api(script, SPEC) as api:
        capsys.readouterr()
        code = run(["bench", "conversation", "--url", api.url, "--in", str(WORD), "-o", "json", *argv])
    said = capsys.readouterr()
    figures_found: dict[str, object] = json.loads(said.out)["figures"] if said.out else {}
    return int(code), figures_found


def short(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: 0.2 s of sound."""
    fake.text(request.handle, b"one")
    fake.audio(request.handle, RATE // 5)
    fake.finish(request.handle)


def long(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: 20 s of sound for the first turn, which is interrupted, and 0.2 s for the second."""
    is_first = fake.prompt(request).count("<user>") == 1
    fake.text(request.handle, b"one two three")
    fake.audio(request.handle, 20 * RATE if is_first else RATE // 5)
    fake.finish(request.handle)


def test_spoken_turns_are_answered_and_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = conversations(long, capsys, "--sessions", "2", "--turns", "2", "--interrupts", "1")
    assert code == 0
    spreads = {name: found[name]["n"] for name in ("first_audio", "gap", "interrupt")}  # type: ignore[index]
    assert spreads == {"first_audio": 4, "gap": 4, "interrupt": 2}, found
    counts = {name: found[name] for name in ("turns", "underruns", "false_starts", "unanswered", "errors")}
    assert counts == {"turns": 4, "underruns": 0, "false_starts": 0, "unanswered": 0, "errors": 0}


def test_a_pause_that_ends_a_turn_early_is_a_split_and_the_turn_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word = read_turn(WORD).pcm
    pause = bytes(2 * RATE)  # 1 s, longer than the silence that ends a turn
    path = tmp_path / "two.wav"
    path.write_bytes(wav_header(RATE, 1, 2 * len(word) + len(pause)) + word + pause + word)
    code, found = conversations(long, capsys, "--turns", "1", "--in", str(path))
    assert code == 0 and (found["splits"], found["completed"], found["unanswered"]) == (1, 1, 0), found


def test_assertions_and_the_result_are_those_of_other_load_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result"
    terms = "p50.first_audio<20s, unanswered<=0, completed>=3"
    code, found = conversations(
        short, capsys, "--turns", "2", "--interrupts", "0", "--assert", terms, "--out", str(out)
    )
    assert code == 8 and found["completed"] == 2
    facts = json.loads((out / "result.json").read_text())
    judged = {one["text"]: (one["holds"], one["why"][:9]) for one in facts["asserts"]}
    assert judged == {
        "p50.first_audio<20s": (False, "2 samples"),
        "unanswered<=0": (True, ""),
        "completed>=3": (False, ""),
    }
    turns = [json.loads(line) for line in (out / "turns.jsonl").read_text().splitlines()]
    assert [turn["session"] for turn in turns] == [0, 0] and all(turn["status"] == "completed" for turn in turns)
    assert json.loads((out / "env.json").read_text())["server"]["model"]
    assert run(["bench", "show", str(out)]) == 0
    assert "FAILS  completed>=3  is 2" in capsys.readouterr().out
    assert run(["bench", "compare", str(out), str(out)]) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--assert", "first_audio<1s"], "p50.first_audio"),
        (["--assert", "p50.ttft<1s"], "no metric 'ttft'"),
        (["--turns", "2", "--duration", "1s"], "exclude each other"),
    ],
)
def test_wrong_words_are_refused_before_the_load(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "conversation", "--url", "http://127.0.0.1:9", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_duration_ends_the_turns(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = conversations(short, capsys, "--duration", "1s", "--interrupts", "0")
    assert code == 0 and found["turns"] == found["completed"] == 1


def late(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: 3 s of sound, whose end follows when the second of the load is over."""
    fake.text(request.handle, b"one")
    fake.audio(request.handle, 3 * RATE)
    asyncio.get_running_loop().call_later(4, fake.finish, request.handle)


def test_an_answer_that_a_turn_behind_the_end_would_interrupt_is_heard_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = conversations(late, capsys, "--duration", "1s", "--interrupts", "1")
    assert (code, found["turns"], found["completed"], found["unanswered"]) == (0, 1, 1, 0)


def test_memory_grows_from_the_middle_to_the_end() -> None:
    readings = MemoryReadings()
    assert readings.growth is None
    for number, size in enumerate([50, *[100] * 10, *[110] * 9, 120]):
        readings.seconds.append(10.0 * number)
        readings.processes.append({"api": size, "worker-0": 2 * size})
    assert readings.growth == pytest.approx(0.15)
    assert places_of(readings.facts())[1]["t_s"] == 100.0


def test_a_run_without_answers_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = conversations(lambda fake, request: fake.fail(request.handle), capsys, "--turns", "1")
    assert code == 8 and found["unanswered"] == 1 and found["errors"] == 1


def test_the_page_has_the_definitions() -> None:
    page = (ROOT / "docs/bench.md").read_text()
    assert [name for name, text in DEFINITIONS.items() if f"| `{name}` | {text} |" not in page] == []
