"""The model of a request: by body, form, path, query, header, alias, or because there is only one."""

from __future__ import annotations

import json
from urllib.parse import urlencode

import aiohttp
import pytest

from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Opened


async def test_a_json_body_names_the_model_and_arrives_unchanged(opened: Opened) -> None:
    llm, omni = FakeDeployment("llm"), FakeDeployment("omni")
    gateway = await opened(llm, omni)
    body = b'{ "messages": [{"role": "user", "content": "{\\"model\\": \\"llm\\"}"}],  "model":"omni" }'
    headers = {"Content-Type": "application/json"}
    status, answer = await gateway.json("POST", "/v1/chat/completions", data=body, headers=headers)
    assert (status, answer["by"]) == (200, "omni")
    assert omni.received[0].body == body
    assert not llm.received


async def test_a_form_names_the_model_also_behind_a_large_file(opened: Opened) -> None:
    whisper, llm = FakeDeployment("whisper"), FakeDeployment("llm")
    gateway = await opened(whisper, llm)
    form = aiohttp.FormData()
    form.add_field("file", b"\r\n--x\r\n" * 40_000, filename="a.wav")
    form.add_field("model", "whisper")
    status, answer = await gateway.json("POST", "/v1/audio/transcriptions", data=form)
    assert (status, answer["by"]) == (200, "whisper")
    assert answer["size"] > 280_000


async def test_a_name_behind_the_first_bytes_of_a_large_body_is_found(opened: Opened) -> None:
    llm, omni = FakeDeployment("llm"), FakeDeployment("omni")
    gateway = await opened(llm, omni)
    body = json.dumps({"messages": [{"content": "a" * 300_000}], "x": {"model": "llm"}, "model": "omni"}).encode()
    status, answer = await gateway.json(
        "POST", "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    assert (status, answer) == (200, {"by": "omni", "size": len(body)})
    assert gateway.door.held.now == 0


@pytest.mark.parametrize(
    ("path", "headers", "seen"),
    [
        ("/m/omni/generate", {}, "/generate"),
        ("/m/omni/generate?a=1", {}, "/generate?a=1"),
        ("/generate?model=omni", {}, "/generate?model=omni"),
        ("/generate", {"X-Mstar-Model": "omni"}, "/generate"),
        ("/generate", {"Cookie": "mstar_model=omni"}, "/generate"),
        ("/m/qwen/generate", {}, "/generate"),
    ],
)
async def test_path_query_header_and_page_name_the_model(
    opened: Opened, path: str, headers: dict[str, str], seen: str
) -> None:
    llm, omni = FakeDeployment("llm"), FakeDeployment("omni", aliases=("qwen",))
    gateway = await opened(llm, omni)
    status, answer = await gateway.json("POST", path, data=urlencode({"text": "a"}), headers=headers)
    assert (status, answer["by"]) == (200, "omni")
    assert omni.received[0].path == seen
    assert "X-Mstar-Model" not in omni.received[0].headers


async def test_the_only_model_needs_no_name(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"))
    status, answer = await gateway.json("POST", "/generate", data={"text": "a"})
    assert (status, answer["by"]) == (200, "llm")


async def test_a_request_without_a_model_gets_the_names(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"), FakeDeployment("omni"))
    status, answer = await gateway.json("POST", "/generate", data={"text": "a"})
    assert status == 400
    assert answer["error"]["param"] == "model"
    assert "llm, omni" in answer["detail"]


async def test_a_list_of_videos_comes_from_the_only_model_that_makes_them(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"), FakeDeployment("wan", outputs=("video",)))
    status, answer = await gateway.json("GET", "/v1/videos?limit=2")
    assert (status, answer["by"]) == (200, "wan")
    several = await opened(*(FakeDeployment(name, outputs=("video",)) for name in ("wan", "wan-large")))
    status, answer = await several.json("GET", "/v1/videos")
    assert (status, answer["error"]["param"]) == (400, "model")


async def test_an_unknown_model_gets_the_nearest_names(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("qwen3-omni"), FakeDeployment("llm"))
    status, answer = await gateway.json("POST", "/v1/completions", json={"model": "qwen3-omin"})
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert "'qwen3-omni'" in answer["error"]["message"]


async def test_a_name_of_a_deployments_card_is_an_alias(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"), FakeDeployment("omni"))
    status, answer = await gateway.json("POST", "/v1/completions", json={"model": "omni-weights"})
    assert (status, answer["by"]) == (200, "omni")


async def test_a_model_of_any_name_takes_what_no_other_one_does(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm", aliases=("*",)), FakeDeployment("omni"))
    _, answer = await gateway.json("POST", "/v1/completions", json={"model": "gpt-5"})
    assert answer["by"] == "llm"


async def test_several_models_of_any_name_take_none(opened: Opened) -> None:
    gateway = await opened(*(FakeDeployment(name, aliases=("*",)) for name in ("llm", "omni")))
    status, _ = await gateway.json("POST", "/v1/completions", json={"model": "gpt-5"})
    assert status == 404


async def test_a_method_that_no_route_has_is_refused_before_the_model(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"))
    status, answer = await gateway.json("TRACE", "/generate?model=none")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


async def test_a_deployment_hears_the_beginning_of_the_path(opened: Opened) -> None:
    llm = FakeDeployment("llm")
    gateway = await opened(llm)
    await gateway.json("GET", "/m/llm/openapi.json", headers={"X-Forwarded-Prefix": "/outer"})
    assert (llm.received[0].path, llm.received[0].headers["X-Forwarded-Prefix"]) == ("/openapi.json", "/outer/m/llm")


async def test_a_preflight_of_a_browser_needs_no_model(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"), FakeDeployment("omni"))
    status, _ = await gateway.json("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://page.example"})
    assert status == 200
