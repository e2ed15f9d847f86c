"""`mstarctl bench conversation` against an api of fakes, and its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mstar_core.messages.requests import NewRequest
from mstarctl.bench.conversation.figures import DEFINITIONS, figures
from mstarctl.bench.conversation.outcome import ConversationOutcome, TurnOutcome
from mstarctl.main import run
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
    late.input_tokens, late.cached_tokens = 100, 75
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


def test_a_run_without_answers_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = conversations(lambda fake, request: fake.fail(request.handle), capsys, "--turns", "1")
    assert code == 8 and found["unanswered"] == 1 and found["errors"] == 1


def test_the_page_has_the_definitions() -> None:
    page = (ROOT / "docs/bench.md").read_text()
    assert [name for name, text in DEFINITIONS.items() if f"| `{name}` | {text} |" not in page] == []
