"""`mstarctl chat`: history, files, speech, a stopped answer; players of sound."""

from __future__ import annotations

import base64
import io
import json
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer

from mstar_core.errors import ConfigError, MstarError, UsageError
from mstarctl.call.ask import Card
from mstarctl.call.conversation import Conversation, delta_of
from mstarctl.call.player import Player, find_player, required_player
from mstarctl.client.api import ApiClient
from mstarctl.commands.call import Server
from mstarctl.commands.chat import ROUTE, Chat, check_chat
from mstarctl.output import Printer

PCM = b"\x01\x00" * 2400
CARD = Card(
    name="omni", inputs=("text", "image", "audio"), outputs=("text", "audio"), parameters=frozenset(), routes=(ROUTE,)
)


class Handler(BaseHTTPRequestHandler):
    """A chat route that answers `you said WORDS`, speaks if asked, and fails for `fail`."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        content = body["messages"][-1]["content"]
        words = content if isinstance(content, str) else content[-1]["text"]
        self.send_response(200)
        self.end_headers()
        if words == "fail":
            self._send({"error": {"message": "no pages left", "code": "overloaded"}})
            return
        for word in ("you ", "said ", words):
            self._send({"choices": [{"delta": {"content": word}}]})
        if body.get("modalities"):
            self._send({"choices": [{"delta": {"audio": {"data": base64.b64encode(PCM).decode()}}}]})
        self._send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b": ping\n\ndata: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def served() -> Iterator[tuple[Server, list[dict[str, Any]]]]:
    handler = type("Recorder", (Handler,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        with ApiClient(f"http://127.0.0.1:{http.server_address[1]}") as client:
            yield Server(name="omni", client=client, card=CARD, facts={}), handler.asked
        http.shutdown()


def talk(server: Server, monkeypatch: pytest.MonkeyPatch, *lines: str, **body: Any) -> Chat:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    chat = Chat(server, Conversation(CARD.inputs, "be brief"), {"stream": True, **body}, Printer(), is_played=None)
    chat.run()
    return chat


Served = tuple[Server, list[dict[str, Any]]]


def test_a_conversation_sends_its_history(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, asked = served
    talk(server, monkeypatch, "hello", "", "and now", "/new", "again", "/quit", "never sent")
    assert capsys.readouterr().out.splitlines() == ["you said hello", "you said and now", "you said again"]
    roles = [[message["role"] for message in body["messages"]] for body in asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert asked[1]["messages"][2]["content"] == "you said hello"


def test_files_go_before_the_text_of_the_next_message(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, asked = served
    (tmp_path / "a b.png").write_bytes(b"png")
    (tmp_path / "s.wav").write_bytes(b"wav")
    talk(server, monkeypatch, f"/image {tmp_path / 'a b.png'}", f"/audio {tmp_path / 's.wav'}", "what", "next")
    image, audio, text = asked[0]["messages"][-1]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"png").decode()
    assert audio["input_audio"]["format"] == "wav" and text == {"type": "text", "text": "what"}
    assert asked[1]["messages"][-1]["content"] == "next"


@pytest.mark.parametrize("line", ["/video x.mp4", "/image", "/image /nowhere.png", "/nonsense"])
def test_a_wrong_command_is_named(line: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((UsageError, ConfigError)):
        talk(served[0], monkeypatch, line)


def test_speech_is_saved_without_a_player(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    talk(served[0], monkeypatch, "hello", "you", modalities=["text", "audio"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat-1.wav", "chat-2.wav"]
    assert (tmp_path / "chat-1.wav").read_bytes().endswith(PCM)
    assert "saved 100 ms of speech: chat-1.wav" in capsys.readouterr().err


def test_a_failed_answer_withdraws_the_question(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(CARD.inputs)
    monkeypatch.setattr("sys.stdin", io.StringIO("fail\n"))
    with pytest.raises(MstarError, match="no pages left"):
        Chat(served[0], conversation, {"stream": True}, Printer(), is_played=None).run()
    assert conversation.messages == []


def test_an_interrupt_stops_the_answer_and_keeps_what_arrived(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, _ = served
    conversation = Conversation(CARD.inputs)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    chat = Chat(server, conversation, {"stream": True}, Printer(), is_played=None)
    chat._is_terminal = True
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_show", show)
    chat._take("hello")
    assert conversation.messages[-1] == {"role": "assistant", "content": "you said "}
    assert "[stopped]" in capsys.readouterr().err
    chat._is_terminal = False
    shown.clear()
    with pytest.raises(typer.Exit):
        chat._take("hello")


def test_a_model_without_a_chat_route_is_refused(served: Served) -> None:
    server = served[0]
    card = Card(name="o", inputs=(), outputs=("audio",), parameters=frozenset(), routes=("/generate",))
    with pytest.raises(UsageError, match="no chat"):
        check_chat(Server(name="o", client=server.client, card=card, facts={}))
    check_chat(server)


def test_events_without_choices_are_empty() -> None:
    assert delta_of({"choices": [], "usage": {}}) == ("", b"", "")
    assert delta_of({"choices": [{"delta": {"content": None}, "finish_reason": "stop"}]}) == ("", b"", "stop")


# -- players ------------------------------------------------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("name", ["ffplay", "aplay"])
def test_sound_is_piped_to_the_player_as_wav(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, name, f"/bin/cat > {tmp_path}/heard.wav")
    monkeypatch.setenv("PATH", str(tmp_path))
    player = Player(required_player())
    player.write(PCM, 24000, 1)
    player.write(PCM, 24000, 1)
    player.close()
    heard = (tmp_path / "heard.wav").read_bytes()
    assert heard.startswith(b"RIFF") and heard.endswith(PCM + PCM) and not player.is_broken


def test_afplay_gets_a_complete_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "afplay", f'/bin/cp "$1" {tmp_path}/heard.wav')
    monkeypatch.setenv("PATH", str(tmp_path))
    player = Player(required_player())
    player.write(PCM, 24000, 1)
    player.close()
    heard = (tmp_path / "heard.wav").read_bytes()
    assert heard.endswith(PCM) and int.from_bytes(heard[4:8], "little") == len(heard) - 8


def test_a_player_that_ends_early_does_not_end_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "ffplay", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    player = Player(required_player())
    for _ in range(200):
        player.write(PCM, 24000, 1)
    player.close()
    assert player.is_broken


def test_a_machine_without_a_player_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_player() is None
    with pytest.raises(UsageError, match="no program that plays sound") as failed:
        required_player()
    assert "ffplay, aplay and afplay" in failed.value.detail and "--out" in failed.value.hint
