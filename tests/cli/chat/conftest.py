"""A chat server of the tests, and chats with it in this process."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mstarctl.call.ask import Card
from mstarctl.chat.conversation import ChatMessages
from mstarctl.chat.session import ChatOptions, ChatSession
from mstarctl.chat.settings import ChatSettings
from mstarctl.chat.state import ChatState
from mstarctl.client.api import ApiClient
from mstarctl.output import GlobalOptions, Printer
from tests.fakes.chat_server import MODELS, ChatServer, chat_server

CARDS = tuple(Card.of(facts) for facts in MODELS)
Talk = Callable[..., ChatState]


@pytest.fixture(scope="session")
def running() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture
def server(running: ChatServer) -> ChatServer:
    running.asked.clear()
    running.is_cut.clear()
    return running


@pytest.fixture
def talk(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Send lines as a pipe does, in an empty folder, and return the state of the chat at the end of the input."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def send(*lines: str, state: ChatState | None = None, output: str = "table", is_literal: bool = False) -> ChatState:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat = state or ChatState(talk=ChatMessages("be brief"), settings=ChatSettings(card=CARDS[0]), models=CARDS)
        printer = Printer(GlobalOptions(output=output))
        with ApiClient(server.url) as client:
            ChatSession(client, chat, printer, ChatOptions(is_terminal=False, is_literal=is_literal)).run()
        return chat

    return send
