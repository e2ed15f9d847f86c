"""Commands that take a deployment's name, with the name or the address of a gateway."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from mstar_core.errors import ExitCode, MstarError
from mstar_core.gateway.parts import ModelState
from mstarctl.bench.target import target_of
from mstarctl.commands.call import served
from mstarctl.output import GlobalOptions, Printer
from tests.cli.conftest import Cli
from tests.fakes.chat_server import ChatServer, chat_server
from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import HostedGateway, hosted_gateway

CARD = {
    "id": "speaker-weights",
    "input_modalities": ["text"],
    "output_modalities": ["text"],
    "endpoints": ["/generate"],
    "capabilities": [],
}


async def speaker(request: web.BaseRequest) -> web.StreamResponse:
    """Answer as a deployment that repeats the size of what it gets."""
    if request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [CARD]})
    if request.path != "/generate":
        return web.json_response({"status": "ready"})
    size = len(await request.read())
    lines = [("text", b"I am the speaker"), ("done", b"")]
    parts = [
        {"modality": kind, "data": base64.b64encode(data).decode(), "metadata": {"size": size}} for kind, data in lines
    ]
    return web.Response(body=b"".join(json.dumps(part).encode() + b"\n" for part in parts))


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(chat: ChatServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedGateway]:
    """The gateway `gateway` with the models `chat` and `speaker`, which sleeps."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as short:
        patch.setenv("MSTAR_RUNTIME_DIR", short)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        fakes = (
            FakeDeployment("chat", url=chat.url, aliases=("talkative",)),
            FakeDeployment("speaker", handler=speaker, state=ModelState.SLEEPING),
        )
        with hosted_gateway("gateway", *fakes) as hosted:
            (hosted.log_dir / "gateway.log").write_text("the gateway serves\n")
            yield hosted


@pytest.fixture
def line(cli: Cli, gateway: HostedGateway, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run one command line next to the gateway."""
    monkeypatch.setenv("XDG_STATE_HOME", str(gateway.log_dir.parents[2]))
    return cli


@pytest.mark.parametrize(
    "words",
    [
        ["gateway", "--model", "speaker"],
        ["speaker"],
        ["speaker", "--url", "{url}"],
        ["--url", "{url}", "--model", "speaker"],
        ["--url", "{url}/m/speaker"],
        ["--model", "speaker"],
    ],
)
def test_a_model_of_a_gateway_is_called(words: list[str], line: Cli, gateway: HostedGateway) -> None:
    said = line("call", *(word.format(url=gateway.url) for word in words), "--text", "hello")
    assert said.code == 0, said.err
    assert said.out.startswith("I am the speaker")
    has_narration = "speaker is sleeping" in said.err
    assert has_narration == ("{url}/m/speaker" not in words)


@pytest.mark.parametrize(
    "words", [["gateway", "--model", "chat"], ["chat"], ["talkative"], ["--url", "{url}", "--model", "talkative"]]
)
def test_a_chat_goes_through_a_gateway(
    words: list[str], line: Cli, gateway: HostedGateway, chat: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    said = line("chat", *(word.format(url=gateway.url) for word in words))
    assert (said.code, "you said hello" in said.out) == (0, True), said.err
    assert chat.asked[-1]["model"] == "omni"


def test_an_adapter_behind_a_gateway_is_chosen(
    line: Cli, chat: ChatServer, monkeypatch: pytest.MonkeyPatch, gateway: HostedGateway
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert line("chat", "gateway", "--model", "pirate").code == 0
    assert chat.asked[-1]["model"] == "pirate"
    said = line("call", "gateway", "--model", "pirate", "--text", "x")
    assert said.code == ExitCode.USAGE and "pirate is an adapter of omni" in said.err


@pytest.mark.parametrize(
    "command", [["call", "--text", "x"], ["chat"], ["talk", "--no-mic"], ["bench", "conversation"]]
)
def test_a_gateway_of_several_models_asks_for_one(command: list[str], line: Cli, gateway: HostedGateway) -> None:
    said = line(*command, "gateway")
    assert said.code == ExitCode.USAGE
    assert (
        "gateway 'gateway' serves 2 models, and none is named" in said.err and "its models: chat, speaker" in said.err
    )
    assert f"--model chat, or --url {gateway.url}/m/chat" in said.err
    said = line(*command, "gateway", "--model", "chatt")
    assert said.code == ExitCode.NOT_FOUND and "did you mean 'chat'?" in said.err


def test_talk_reaches_the_realtime_route_of_the_model(line: Cli, gateway: HostedGateway) -> None:
    said = line("talk", "speaker", "--no-mic")
    assert said.code == ExitCode.USAGE and "speaker has no voice conversations" in said.err
    with served(GlobalOptions(), "gateway", None, Printer(GlobalOptions()), model="chat") as server:
        address = server.address.of_model(server.card.name)
    assert address == f"{gateway.url.replace('http', 'ws')}/m/chat/v1/realtime?model=omni"


@pytest.mark.parametrize(
    ("name", "url", "model"),
    [("gateway", False, "speaker"), ("speaker", False, None), ("speaker", True, None), (None, True, "speaker")],
)
def test_a_load_test_measures_one_model_of_a_gateway(
    name: str | None, url: bool, model: str | None, line: Cli, gateway: HostedGateway
) -> None:
    with target_of(GlobalOptions(), name, gateway.url if url else None, None, 5.0, model) as target:
        assert (target.name, target.card.name, target.server.prefix) == ("speaker", "speaker-weights", "/m/speaker")


def test_a_load_test_says_which_models_there_are(line: Cli, gateway: HostedGateway) -> None:
    with (
        pytest.raises(MstarError, match="serves 2 models") as failed,
        target_of(GlobalOptions(), "gateway", None, None, 5.0),
    ):
        pass
    assert f"--model chat, or --url {gateway.url}/m/chat" in failed.value.hint
    with target_of(GlobalOptions(), "gateway", None, None, 5.0, "pirate") as target:
        assert target.is_adapter and target.card.name == "pirate"


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["drain", "gateway"], "mstarctl serve down gateway"),
        (["set", "gateway", "max_queue=4"], "mstarctl serve reload gateway"),
        (["reload", "gateway"], "mstarctl serve reload gateway"),
        (["restart", "gateway"], "mstarctl serve restart gateway"),
        (["sleep", "gateway"], "mstarctl serve ls gateway"),
        (["events", "gateway"], "mstarctl logs gateway"),
    ],
)
def test_a_command_for_deployments_names_the_one_for_gateways(words: list[str], way: str, line: Cli) -> None:
    said = line(*words)
    assert said.code == ExitCode.USAGE and way in said.err, said.err


def test_a_gateway_is_described_with_its_models(line: Cli, gateway: HostedGateway) -> None:
    said = line("describe", "gateway")
    assert said.code == 0 and gateway.url in said.out
    assert "chat         ready" in said.out and "speaker      sleeping" in said.out
    found = line("-o", "json", "describe", "deployment/gateway").json
    assert (found["kind"], [model["name"] for model in found["items"][0]["models"]]) == ("gateway", ["chat", "speaker"])


def test_logs_and_metrics_of_a_gateway_are_read(line: Cli) -> None:
    assert "the gateway serves" in line("logs", "gateway").out
    said = line("metrics", "gateway", "--match", "^mstar_gateway")
    assert said.code == 0 and "mstar_gateway_" in said.out


def test_the_screen_models_opens_the_only_gateway(line: Cli, gateway: HostedGateway) -> None:
    said = line("top", "--view", "models", "--once")
    assert said.code == 0 and "gateway gateway" in said.out and "speaker" in said.out
    with hosted_gateway("second"):
        said = line("top", "--view", "models", "--once")
        assert said.code == ExitCode.NOT_FOUND and "name one of: gateway, second" in said.err
        assert line("top", "gateway", "--view", "models", "--once").code == 0
    said = line("top", "speech", "--view", "models", "--once")
    assert said.code == ExitCode.NOT_FOUND and "no gateway 'speech' is running" in said.err


def test_a_model_of_two_gateways_is_not_guessed(line: Cli, tmp_path: Path) -> None:
    with hosted_gateway("second", FakeDeployment("speaker", handler=speaker)):
        said = line("call", "speaker", "--text", "x")
        assert said.code == ExitCode.NOT_FOUND and "second --model speaker" in said.err
        assert line("call", "second", "--text", "x").out.startswith("I am the speaker")
