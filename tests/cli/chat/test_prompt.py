"""`mstarctl chat` in a terminal: interrupts, the history of typed lines, results of functions."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.chat_server import ChatServer
from tests.top.terminal import LIMIT_S, Terminal

Start = Callable[..., Terminal]
CONTROLLED = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""Makes the terminal that of the process, so that Ctrl-C interrupts it, and runs a command."""
CTRL_C, CTRL_D, TAB = "\x03", "\x04", "\t"


@pytest.fixture
def start(server: ChatServer, tmp_path: Path) -> Iterator[Start]:
    """Start `mstarctl chat` in a terminal of its own."""
    terminals = []
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "NO_COLOR": "1", "INPUTRC": "/dev/null"}

    def begin(*argv: str) -> Terminal:
        chat = ["-m", "mstarctl", "chat", "--url", server.url, "--no-play", "--out", str(tmp_path), *argv]
        terminals.append(Terminal([sys.executable, "-c", CONTROLLED, sys.executable, *chat], env))
        terminals[-1].shows("/help lists the commands")
        terminals[-1].shows("> ")
        return terminals[-1]

    yield begin
    for terminal in terminals:
        terminal.close()


def enter(terminal: Terminal, text: str, shown: str) -> None:
    """Type a line and wait until the screen shows a text."""
    terminal.press(text, "enter")
    terminal.shows(shown)


def test_an_interrupt_cancels_the_answer_and_keeps_the_conversation(start: Start, server: ChatServer) -> None:
    terminal = start()
    enter(terminal, "slow", "word word word")
    terminal.press(CTRL_C)
    terminal.shows("[stopped]")
    assert server.is_cut.wait(LIMIT_S)
    enter(terminal, "fail", "no pages left")
    enter(terminal, "and now", "you said and now")
    question, answer, last = server.asked[-1]["messages"]
    assert question["content"] == "slow" and answer["content"].startswith("word word word")
    assert last["content"] == "and now"
    terminal.press(CTRL_C)
    terminal.shows("Ctrl-C again, Ctrl-D or /quit leaves")
    terminal.press(CTRL_C)
    assert terminal.process.wait(LIMIT_S) == 130


def test_typed_lines_come_back_in_the_next_session(start: Start, server: ChatServer, tmp_path: Path) -> None:
    first = start()
    enter(first, "remember me", "you said remember me")
    first.press(CTRL_D)
    assert first.process.wait(LIMIT_S) == 0
    history = tmp_path / "state" / "mstar" / ".chat" / "history"
    assert history.read_text() == "remember me\n"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    second = start()
    second.press("up")
    second.shows("> remember me")
    second.press("enter")
    second.shows("you said remember me")
    assert history.read_text() == "remember me\n"


def test_functions_are_answered_or_withdrawn(start: Start, server: ChatServer, tmp_path: Path) -> None:
    terminal = start("--no-history")
    enter(terminal, "call", "result of weather>")
    assert 'call weather {"city": "Ulm"}' in terminal.text
    enter(terminal, "rain", "result of clock>")
    enter(terminal, "noon", "it is rain and noon")
    enter(terminal, "/tools off", "no tools are offered")
    terminal.press("call", "enter")
    terminal.until(lambda: terminal.text.rstrip().endswith("result of weather>"), "no question for the result")
    terminal.press(CTRL_C)
    terminal.shows("the message and its calls are withdrawn")
    enter(terminal, "/us" + TAB, "since the start: 3 answers")
    enter(terminal, "hello", "you said hello")
    roles = [message["role"] for message in server.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]
    enter(terminal, "/outputs text audio", "answers are: text, audio")
    enter(terminal, "aloud", "saved 100 ms of speech")
    assert (tmp_path / "chat-1.wav").exists()
    terminal.press("/quit", "enter")
    assert terminal.process.wait(LIMIT_S) == 0
    assert not (tmp_path / "state").exists()
