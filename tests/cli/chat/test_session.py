"""`mstarctl chat` over a pipe: messages, answers on stdout, results of functions, failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mstar_core.errors import ExitCode, MstarError, UsageError
from mstarctl.main import run
from tests.cli.chat.conftest import Talk
from tests.fakes.chat_server import PCM, PNG, ChatServer

Capture = pytest.CaptureFixture[str]


def test_a_conversation_sends_its_history(talk: Talk, server: ChatServer, capsys: Capture) -> None:
    talk("hello", "", "and now", "/new", "again", "/quit", "never sent")
    assert capsys.readouterr().out.splitlines() == ["you said hello", "you said and now", "you said again"]
    roles = [[message["role"] for message in body["messages"]] for body in server.asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert server.asked[1]["messages"][2]["content"] == "you said hello"
    assert server.asked[0]["model"] == "omni"


def test_a_message_of_several_lines_is_one_message(talk: Talk, server: ChatServer) -> None:
    talk('"""', "one", "/new", 'two"""', "three \\", "four")
    assert [body["messages"][-1]["content"] for body in server.asked] == ["one\n/new\ntwo", "three \nfour"]


def test_thinking_is_narration_and_goes_back_to_a_model_that_thinks(
    talk: Talk, server: ChatServer, capsys: Capture
) -> None:
    talk("think", "/thinking hide", "think")
    said = capsys.readouterr()
    assert said.out == "4\n4\n"
    assert "thinking: two and two make four\n" in said.err
    assert said.err.count("two and two") == 1 and "[thought in 5 words]" in said.err
    assert server.asked[1]["messages"][2]["reasoning_content"] == "two and two make four"


def test_results_of_functions_are_the_next_lines(talk: Talk, server: ChatServer, capsys: Capture) -> None:
    state = talk("call", "rain", "noon", "thanks")
    said = capsys.readouterr()
    assert said.out.splitlines() == ["it is rain and noon", "you said thanks"]
    assert 'call weather {"city": "Ulm"}' in said.err and 'call clock {"city": "Ulm"}' in said.err
    calls = server.asked[1]["messages"][2]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "clock"]
    results = [message for message in server.asked[1]["messages"] if message["role"] == "tool"]
    assert [(each["tool_call_id"], each["content"]) for each in results] == [("c0", "rain"), ("c1", "noon")]
    assert [message["role"] for message in state.talk.messages] == [
        *("user", "assistant", "tool", "tool", "assistant"),
        *("user", "assistant"),
    ]


def test_an_input_without_the_results_is_an_error(talk: Talk) -> None:
    with pytest.raises(UsageError, match="before the results of weather, clock"):
        talk("call", "rain")


def test_a_failed_answer_ends_a_pipe_with_its_error(talk: Talk, server: ChatServer) -> None:
    with pytest.raises(MstarError, match="no pages left"):
        talk("hello", "fail", "never sent")
    assert len(server.asked) == 2


def test_speech_and_pictures_become_files(talk: Talk, tmp_path: Path, capsys: Capture) -> None:
    talk("/outputs text audio", "hello", "you", "/outputs text", "draw")
    assert (tmp_path / "chat-1.wav").read_bytes().endswith(PCM) and (tmp_path / "chat-2.wav").exists()
    assert (tmp_path / "chat-1.png").read_bytes() == PNG
    err = capsys.readouterr().err
    assert "saved 100 ms of speech: chat-1.wav" in err and "saved a picture: chat-1.png" in err


def test_pictures_of_an_answer_stay_in_the_conversation(talk: Talk, server: ChatServer) -> None:
    talk("draw", "again")
    assert server.asked[1]["messages"][2]["content"][0]["type"] == "image_url"


def test_text_of_the_model_cannot_control_the_terminal(talk: Talk, capsys: Capture) -> None:
    talk("control")
    assert capsys.readouterr().out == "a\\x1b[31mb\n"


def test_an_answer_that_is_cut_or_empty_is_said(talk: Talk, capsys: Capture) -> None:
    state = talk("long", "nothing")
    err = capsys.readouterr().err
    assert "length limit; /params max_output_tokens=N" in err and "[the answer is empty]" in err
    assert [message["content"] for message in state.talk.messages] == ["long", "you said long"]


def test_machines_get_one_object_for_each_answer(talk: Talk, capsys: Capture) -> None:
    talk("think", "call", "rain", "noon", output="json")
    first, call, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["content"], first["reasoning"], first["usage"]["prompt_tokens"]) == ("4", "two and two make four", 7)
    assert call["tool_calls"][0]["arguments"] == '{"city": "Ulm"}' and call["finish_reason"] == "tool_calls"
    assert last["content"] == "it is rain and noon"


def test_literal_lines_are_messages(talk: Talk, server: ChatServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    talk("/new", "@a.png", is_literal=True)
    assert [body["messages"][-1]["content"] for body in server.asked] == ["/new", "@a.png"]


@pytest.mark.parametrize(
    "argv, code, words",
    [
        (["--url", "http://127.0.0.1:9"], ExitCode.UNREACHABLE, "nothing answers at http://127.0.0.1:9"),
        (["--url", "ftp://x"], ExitCode.USAGE, "--url is 'ftp://x'"),
        (["piratte", "--url", "{url}"], ExitCode.USAGE, "did you mean 'pirate'?"),
        (["omni", "--url", "{url}", "--model", "pirate"], ExitCode.USAGE, "NAME and --model exclude each other"),
        (["--url", "{url}", "--model", "piratte"], ExitCode.USAGE, "did you mean 'pirate'?"),
        (["--url", "{url}", "--model", "pirate", "--schema", "s.json"], ExitCode.USAGE, "structured_outputs"),
        (["--url", "{url}", "--load", "none.json"], ExitCode.INVALID, "none.json cannot be read"),
        (["--url", "{url}", "--out", "nowhere"], ExitCode.INVALID, "nowhere is not a folder"),
    ],
)
def test_a_chat_that_cannot_begin_says_why(
    argv: list[str], code: ExitCode, words: str, server: ChatServer, talk: Talk, capsys: Capture
) -> None:
    assert run(["chat", *(word.format(url=server.url) for word in argv)]) == code
    assert words in capsys.readouterr().err
