"""Commands of `mstarctl chat`: settings, files, conversations."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from mstar_core.errors import MstarError
from mstarctl.chat.commands import COMMANDS, completions, is_command
from mstarctl.chat.state import ChatState
from tests.cli.chat.conftest import Talk
from tests.fakes.chat_server import ChatServer

Capture = pytest.CaptureFixture[str]
TOOLS = [{"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture
def state(talk: Talk) -> ChatState:
    return talk("hello", "you")


def test_settings_are_fields_of_the_next_request(talk: Talk, server: ChatServer, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "my schema.json").write_text('{"type": "object"}')
    talk(
        '/params temperature=0.5 tool_choice=required stop=["a b"]',
        "/params top_p=0.9",
        "/tools tools.json",
        "/schema my schema.json",
        "/thinking low",
        "/system talk like a poet",
        "first",
        "/params temperature=",
        "/tools off",
        "/json on",
        "/thinking off",
        "/model pirate",
        "/system off",
        "second",
        "/json off",
        "/thinking on",
        "third",
    )
    first, second, third = server.asked
    assert (first["temperature"], first["top_p"], first["tool_choice"]) == (0.5, 0.9, "required")
    assert first["tools"] == [{"type": "function", "function": TOOLS[0]}]
    assert first["response_format"]["json_schema"] == {
        "name": "my_schema",
        "schema": {"type": "object"},
        "strict": True,
    }
    assert first["reasoning_effort"] == "low" and first["messages"][0]["content"] == "talk like a poet"
    assert "temperature" not in second and "tools" not in second and second["model"] == "pirate"
    assert second["response_format"] == {"type": "json_object"} and second["reasoning_effort"] == "none"
    assert second["messages"][0]["role"] == "user"
    assert not {"response_format", "reasoning_effort"} & set(third)


def test_a_strange_parameter_is_named_with_the_nearest(talk: Talk, capsys: Capture) -> None:
    talk("/params temprature=1")
    assert "did you mean 'temperature'?" in capsys.readouterr().err


def test_files_go_before_the_text_of_the_next_message(talk: Talk, server: ChatServer, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(b"png")
    (tmp_path / "s.wav").write_bytes(b"wav")
    (tmp_path / "notes.txt").write_text("buy bread")
    talk("/image a b.png", "/audio 's.wav'", "what of @notes.txt, and @ana or me@b.c?", "next", '@"a b.png" this')
    image, audio, notes, text = server.asked[0]["messages"][-1]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"png").decode()
    assert audio["input_audio"]["format"] == "wav" and "buy bread" in notes["text"]
    assert text == {"type": "text", "text": "what of @notes.txt, and @ana or me@b.c?"}
    assert server.asked[1]["messages"][-1]["content"] == "next"
    assert server.asked[2]["messages"][-1]["content"][0]["type"] == "image_url"


@pytest.mark.parametrize(
    "line, words",
    [
        ("/video x.mp4", "does not accept video"),
        ("/image", "needs a file"),
        ("/image /nowhere.png", "cannot be read"),
        ("/nonsense", "unknown command '/nonsense'"),
        ("/retr", "unknown command '/retr'"),
        ("/params 3", "needs KEY=VALUE, not '3'"),
        ("/json maybe", "/json maybe"),
        ("/thinking hard", "/thinking hard"),
        ("/outputs smell", "no output 'smell'"),
        ("/model none", "no model 'none'"),
        ("/tools broken.json", "is not JSON"),
        ("/tools nameless.json", "tool 1 of nameless.json has no name"),
        ("/schema list.json", "is not a JSON schema"),
        ("/load list.json", "message 1 of list.json has no role"),
        ("/load old.md", ".md files cannot be loaded"),
        ("/save", "needs a file"),
        ("/save list.json", "list.json exists"),
        ("/retry", "no message was sent yet"),
        ("/undo", "no message was sent yet"),
        ("what is @no/such.txt", "@no/such.txt is not a file"),
        ("what is @broken.bin", "is neither a medium nor text"),
    ],
)
def test_a_wrong_line_is_named_and_sends_nothing(
    line: str, words: str, talk: Talk, server: ChatServer, tmp_path: Path
) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "nameless.json").write_text('[{"parameters": {}}]')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MstarError) as failed:
        talk(line)
    assert words in failed.value.title and server.asked == []


def test_undo_and_retry_change_the_conversation(talk: Talk, server: ChatServer) -> None:
    state = talk("one", "two", "/undo", "three", "/retry")
    asked = [[message["content"] for message in body["messages"][1:]] for body in server.asked]
    assert asked[2] == asked[3] == ["one", "you said one", "three"]
    assert len(state.talk.messages) == 4


def test_a_retry_that_fails_keeps_the_answer_before(talk: Talk, state: ChatState) -> None:
    state.talk.messages[-2]["content"] = "fail"
    with pytest.raises(MstarError):
        talk("/retry", state=state)
    assert [message["role"] for message in state.talk.messages] == ["user", "assistant"] * 2


def test_a_saved_conversation_goes_on(talk: Talk, server: ChatServer, tmp_path: Path) -> None:
    talk("hello", "/save talk.json", "more", "/save", "/save talk.md")
    assert "**user**\n\nhello\n" in (tmp_path / "talk.md").read_text()
    server.asked.clear()
    state = talk("/new", "/load talk.json", "on")
    assert [message["content"] for message in server.asked[0]["messages"]] == [
        *("be brief", "hello", "you said hello", "more", "you said more"),
        "on",
    ]
    assert state.saved == Path("talk.json")


def test_the_account_counts_the_session(talk: Talk, capsys: Capture) -> None:
    talk("one", "two", "/usage")
    err = capsys.readouterr().err
    assert "7 tokens in, 5 out (3 of thinking)" in err and "since the start: 2 answers: 14 tokens in, 10 out" in err


def test_help_lists_every_command(talk: Talk, capsys: Capture) -> None:
    talk("/help")
    err = capsys.readouterr().err
    assert all(f"{each.name} {each.argument}".strip() in err and each.help in err for each in COMMANDS)


@pytest.mark.parametrize("line", ["/", "/usr/bin/env fails", "/new\nline", "a /new"])
def test_paths_and_texts_are_no_commands(line: str) -> None:
    assert not is_command(line)


def test_tab_completes_commands_files_and_parameters(state: ChatState, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "one.png").touch()

    def offers(line: str) -> list[str]:
        return list(completions(state, line, line.rpartition(" ")[2]))

    assert offers("/sa") == ["/save "] and offers("/image pic") == ["pictures/"]
    assert offers("look @pictures/o") == ["@pictures/one.png"]
    assert "temperature=" in offers("/params t") and offers("/model p") == ["pirate"]
    assert offers("plain wo") == []
