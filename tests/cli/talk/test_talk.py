"""`mstarctl talk` as a process: files, lines, a recorder and a player of the tests, interrupts, errors."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar_core.messages.requests import NewRequest
from mstar_core.plugin.chat.format import HERMES, ChatFormat
from mstarctl.main import run
from tests.api.conftest import LIMIT_S
from tests.api.live import LiveApi, live_api
from tests.fakes.conductor import FakeDeployment, Script, echo
from tests.fakes.omni_model import SPEC

WORD = Path(__file__).parents[3] / "plugins/mstar-qwen3omni/src/mstar_qwen3omni/checkpoint/mini/seven.wav"
COMMAND = (sys.executable, "-m", "mstarctl", "talk", "--url")
RATE = 24_000


@dataclass(slots=True)
class Stage:
    """An api whose script each test sets. prompts: of the requests since then."""

    live: LiveApi | None = None
    script: Script = echo

    def answer(self, fake: FakeDeployment, request: NewRequest) -> None:
        self.script(fake, request)

    @property
    def url(self) -> str:
        assert self.live is not None
        return self.live.url


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    stage = Stage()
    with live_api(lambda fake, request: stage.answer(fake, request), SPEC) as api:
        stage.live = api
        yield stage


@pytest.fixture
def stage(running: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The api, with an empty folder for programs of sound at the begin of PATH."""
    running.script = echo
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setenv("NO_COLOR", "1")
    return running


@dataclass(frozen=True, slots=True)
class Said:
    """Result of one command line."""

    code: int
    out: str
    err: str


Talk = Callable[..., Said]


@pytest.fixture
def talk(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Run one command line in this process, with lines in its stdin."""

    def call(*argv: str, lines: str = "", url: str = "") -> Said:
        typed = tmp_path / "stdin"
        typed.write_text(lines)
        with typed.open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            capsys.readouterr()
            code = run(["talk", "--url", url or stage.url, *argv])
        said = capsys.readouterr()
        return Said(int(code), said.out, said.err)

    return call


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run the command during the block."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o700)


def samples_of(path: Path) -> int:
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        return int(file.getnframes())


def test_an_empty_answer_is_shown_as_such(stage: Stage, talk: Talk) -> None:
    stage.script = lambda fake, request: fake.finish(request.handle)
    said = talk(lines="Hello\n")
    assert (said.code, said.out.strip()) == (0, "")
    assert "[the answer is empty]" in said.err


def test_a_lost_connection_goes_on_without_a_gap(stage: Stage, talk: Talk, tmp_path: Path) -> None:
    losses = 0

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        nonlocal losses
        fake.text(request.handle, b"one two")
        fake.audio(request.handle, RATE // 10)
        losses += 1
        assert stage.live is not None
        stage.live.drop_connections()
        fake.text(request.handle, b" three")
        fake.audio(request.handle, RATE // 10)
        fake.finish(request.handle)

    stage.script = script
    said = talk("--out", str(tmp_path), lines="Hello\nAgain\n")
    assert said.code == 0, said.err
    assert said.out.splitlines() == ["one two three"] * 2 and losses == 2
    assert said.err.count("[the connection was lost; connecting again]") == 2
    assert said.err.count("[the conversation goes on]") == 2
    assert [samples_of(tmp_path / f"answer-{number}.wav") for number in (1, 2)] == [RATE // 5] * 2


def test_a_session_that_is_gone_ends_with_the_reason(stage: Stage, talk: Talk) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        assert stage.live is not None
        stage.live.end_sessions()
        stage.live.drop_connections()

    stage.script = script
    said = talk(lines="Hello\n")
    assert said.code != 0 and "there is no session" in said.err


CALL = b'<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def calling() -> Iterator[str]:
    """The URL of a model that first calls `add`, and then repeats its prompt."""

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        if "3" in fake.prompt(request):  # the result
            return echo(fake, request)
        fake.text(request.handle, CALL)
        fake.finish(request.handle)
        return None

    with live_api(script, replace(SPEC, chat=ChatFormat(tools=HERMES))) as api:
        yield api.url


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    return path


def test_the_result_of_a_function_is_the_next_line(talk: Talk, calling: str, tools: Path) -> None:
    said = talk("--tools", str(tools), lines="add\nis 3\n", url=calling)
    assert said.code == 0, said.err
    assert 'call add {"a": 1}' in said.err and "[the next line is the result of add]" in said.err
    assert len(said.out.splitlines()) == 1 and "is 3" in said.out and said.out.count("<user>") == 1


def test_a_program_computes_results(talk: Talk, calling: str, tools: Path, tmp_path: Path) -> None:
    program(tmp_path, "sum", "import sys\nprint(sys.argv[1], 'gives 3 for', sys.stdin.read())")
    said = talk("--tools", str(tools), "--run", str(tmp_path / "bin/sum"), lines="add\n", url=calling)
    assert said.code == 0, said.err
    assert 'add gives 3 for {"a": 1}' in said.out


def test_a_program_that_fails_gives_the_model_its_error(talk: Talk, calling: str, tools: Path, tmp_path: Path) -> None:
    program(tmp_path, "sum", "raise SystemExit('no 3')")
    said = talk("--tools", str(tools), "--run", str(tmp_path / "bin/sum"), lines="add\n", url=calling)
    assert said.code == 0 and '{"error": "no 3"}' in said.out
    missing = talk("--tools", str(tools), "--run", "/nowhere/sum", lines="add\n", url=calling)
    assert missing.code == 3 and "/nowhere/sum cannot be started" in missing.err
    assert talk("--run", "x", lines="add\n", url=calling).code == 2


def test_files_are_turns_and_answers_are_files(talk: Talk, tmp_path: Path) -> None:
    said = talk("--in", str(WORD), "--in", str(WORD), "--fast", "--out", str(tmp_path), "--no-transcript")
    assert said.code == 0, said.err
    first, second = said.out.splitlines()
    with wave.open(str(WORD)) as file:
        heard = round(file.getnframes() / file.getframerate() * 16_000)
    assert first == f"<user>[audio {heard}]<assistant>", "the whole file is one turn"
    assert second == f"{first}{first}{first.removeprefix('<user>')}" or second.startswith(first)
    assert [samples_of(tmp_path / f"answer-{number}.wav") for number in (1, 2)] == [200, 200]
    assert said.err.count("saved") == 2


def test_turns_that_were_spoken_get_transcripts(talk: Talk) -> None:
    said = talk("--in", str(WORD), "--fast")
    assert said.code == 0, said.err
    assert "you: [audio" in said.err and "Write down the speech" in said.err
    assert len(said.out.splitlines()) == 1, "stdout has the answers alone"


def test_lines_are_turns_with_instructions_and_parameters(stage: Stage, talk: Talk) -> None:
    seen: list[dict[str, object]] = []

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        seen.append(dict(request.params))
        echo(fake, request)

    stage.script = script
    options = ("--system", "be brief", "--voice", "chelsie", "--param", "temperature=0.25")
    said = talk(*options, lines="one\n\ntwo\n/quit\nthree\n")
    assert said.code == 0, said.err
    first = "<system>be brief<user>one<assistant>"
    assert said.out.splitlines()[0] == first and said.out.splitlines()[1].endswith("<user>two<assistant>")
    assert len(seen) == 2 and (seen[0]["voice"], seen[0]["temperature"]) == ("chelsie", 0.25)


def test_programs_read_events_as_lines(talk: Talk, tmp_path: Path) -> None:
    said = talk("-o", "json", "--out", str(tmp_path), lines="one\n")
    assert said.code == 0, said.err
    events = [json.loads(line) for line in said.out.splitlines()]
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "talk.saved" and "response.done" in kinds
    sounds = [event for event in events if event["type"] == "response.output_audio.delta"]
    assert sum(event["samples"] for event in sounds) == 200 and {event["delta"] for event in sounds} == {None}
    assert events[-1]["file"] == str(tmp_path / "answer-1.wav") and events[-1]["seconds"] == 0.008


def endless(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: 30 s of sound with 60 words, and no end; transcripts and later turns are echoed."""
    if "[audio" in fake.prompt(request) and "<assistant>" not in fake.prompt(request):
        return echo(fake, request)
    if fake.prompt(request).count("<user>") > 1:
        return echo(fake, request)
    fake.text(request.handle, " ".join(f"word{number}" for number in range(60)).encode())
    fake.audio(request.handle, 30 * RATE)
    return None


RECORDER = """
import os, sys
word = open({word!r}, "rb").read()
sound = sys.stdout.buffer
sound.write(word + bytes(48000)); sound.flush()
open({begun!r}).read()      # the player has got sound
sound.write(word); sound.flush()
open({cut!r}).read()        # the answer has been interrupted
sound.write(bytes(48000)); sound.flush()
open({never!r}).read()
"""

PLAYER = """
import os, sys
sys.stdin.buffer.read(4096)
try:
    os.close(os.open({begun!r}, os.O_WRONLY | os.O_NONBLOCK))
except OSError:
    pass                    # the recorder waits no more
while sys.stdin.buffer.read(4096):
    pass
"""


def test_speech_ends_the_answer_which_keeps_what_was_heard(stage: Stage, tmp_path: Path) -> None:
    stage.script = endless
    places = {name: str(tmp_path / name) for name in ("begun", "cut", "never", "word")}
    for name in ("begun", "cut", "never"):
        os.mkfifo(places[name])
    with wave.open(str(WORD)) as file:
        samples, rate = np.frombuffer(file.readframes(file.getnframes()), "<i2"), file.getframerate()
    at = np.arange(round(len(samples) * RATE / rate)) * rate / RATE
    spoken = np.interp(at, np.arange(len(samples)), samples).astype("<i2").tobytes()
    Path(places["word"]).write_bytes(bytes(RATE) + spoken)
    program(tmp_path, "parec", RECORDER.format(**places))
    program(tmp_path, "ffplay", PLAYER.format(**places))
    command = [*COMMAND, stage.url, "--mic", "--play", "-o", "json", "--out", str(tmp_path)]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["type"] == "talk.interrupted":
                Path(places["cut"]).write_text("")
            if events[-1]["type"] == "response.done" and events[-1]["response"]["status"] == "completed":
                process.send_signal(signal.SIGINT)
                break
        process.stdout.read()
        assert process.wait(LIMIT_S) == 130, process.stderr.read() if process.stderr else ""
    cut = next(event for event in events if event["type"] == "talk.interrupted")
    truncated = next(event for event in events if event["type"] == "conversation.item.truncated")
    assert truncated["audio_end_ms"] == cut["heard_ms"] < 30_000 and truncated["item_id"] == cut["item_id"]
    assert samples_of(tmp_path / "answer-1.wav") == cut["heard_ms"] * RATE // 1000
    answer = events[-1]["response"]["output"][0]["content"][0]["transcript"]
    assert "<assistant>" in answer and "word59" not in answer, "the model reads what was heard"


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(stage: Stage) -> None:
    stage.script = endless
    control, terminal = pty.openpty()
    screen = Screen(control)
    command = [*COMMAND, stage.url, "--no-mic"]
    with started(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        screen.until("type a line")
        os.write(control, b"tell\n")
        screen.until("word59")
        process.send_signal(signal.SIGINT)
        screen.until("[interrupted")
        os.write(control, b"more\n")
        screen.until("<user>more<assistant>")
        screen.until("\n")
        process.send_signal(signal.SIGINT)
        screen.until("Ctrl-C again")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    os.close(control)


class Screen:
    """The other side of a terminal."""

    def __init__(self, control: int) -> None:
        self._control, self._rest = control, b""

    def until(self, words: str) -> None:
        """Read up to these words."""
        while words.encode() not in self._rest:
            ready, _, _ = select.select([self._control], [], [], LIMIT_S)
            assert ready, f"{words!r} is not in {self._rest!r}"
            self._rest += os.read(self._control, 4096)
        self._rest = self._rest.partition(words.encode())[2]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--mic",), 2, "no program that records sound was found"),
        (("--play",), 2, "no program that plays sound was found"),
        (("--in", "missing.wav"), 3, "missing.wav cannot be read"),
        (("--in", __file__), 3, "is not a WAV file of 16 bits"),
        (("--out", "nowhere"), 3, "nowhere is not a folder"),
        (("--model", "other"), 2, "has no model 'other'"),
        (("--voice", "nobody"), 2, "nobody"),
        (("--turns", "serve"), 2, "did you mean 'server'"),
    ],
)
def test_what_cannot_work_is_refused_before_a_turn(argv: tuple[str, ...], code: int, words: str, talk: Talk) -> None:
    said = talk(*argv, lines="hello\n")
    assert (said.code, said.out) == (code, "") and words in said.err, said.err


def test_a_failed_answer_ends_a_pipe_with_its_error(stage: Stage, talk: Talk) -> None:
    stage.script = lambda fake, request: fake.fail(request.handle)
    said = talk(lines="one\ntwo\n")
    assert said.code == 1 and said.err.count("error:") == 1, said.err


def test_a_server_that_does_not_answer_is_named(talk: Talk) -> None:
    said = talk(url="http://127.0.0.1:9", lines="x\n")
    assert said.code == 5 and "127.0.0.1:9" in said.err
