"""Merged lists, metrics, descriptions, health and pages of the gateway."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from mstar_core.gateway.parts import ModelState, RequestFacts
from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Opened
from tests.fakes.open_gate import OpenGate, OpenPermit

METRICS = """# HELP mstar_requests_total Answered requests.
# TYPE mstar_requests_total counter
mstar_requests_total{route="chat",code="ok"} 3.0
# HELP mstar_queue_seconds Time of waiting.
# TYPE mstar_queue_seconds histogram
mstar_queue_seconds_bucket{le="1.0"} 2.0
mstar_queue_seconds_bucket{le="+Inf"} 3.0
mstar_queue_seconds_count 3.0
mstar_queue_seconds_sum 2.5
"""


def describing(model: str, *, default: int) -> FakeDeployment:
    """Return a deployment with metrics, a card with an adapter, and a description whose parameters are its own."""
    document = {
        "openapi": "3.1.0",
        "paths": {
            "/generate": {"post": {"requestBody": {"$ref": "#/components/schemas/Body"}}},
            f"/v1/only/{model}": {"get": {}},
        },
        "components": {
            "schemas": {
                "Body": {"properties": {"params": {"$ref": "#/components/schemas/Params"}}},
                "Params": {"default": default},
                "Same": {"type": "object"},
            }
        },
    }

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/metrics":
                return web.Response(text=METRICS)
            case "/openapi.json":
                return web.json_response(document)
            case "/v1/models":
                card = {"id": f"{model}-deployment", "aliases": [f"{model}-weights"], "max_model_len": 64}
                return web.json_response({"data": [card, {"id": f"{model}-lora", "parent": card["id"]}]})
        return web.json_response({"by": model})

    return FakeDeployment(model, handler=answer)


class OneModelGate(OpenGate):
    """A gate with tenants, whose key sees the model `llm` alone."""

    takes_keys = True

    def models_of(self, key: str | None, models: Any) -> Any:
        return [name for name in models if name == "llm"]

    async def admit(self, facts: RequestFacts) -> OpenPermit:
        """Return a permit of the tenant whose name begins the key."""
        return OpenPermit((facts.key or "").partition("-")[0])


async def test_models_are_listed_under_their_names_with_states(opened: Opened) -> None:
    asleep = FakeDeployment("omni", state=ModelState.SLEEPING, aliases=("*", "qwen"))
    gateway = await opened(describing("llm", default=1), asleep)
    _, listed = await gateway.json("GET", "/v1/models")
    cards = {card["id"]: card for card in listed["data"]}
    assert list(cards) == ["llm", "llm-lora", "omni"]
    assert cards["llm"]["state"] == "ready" and cards["llm"]["max_model_len"] == 64
    assert cards["llm"]["aliases"] == ["llm-weights", "llm-deployment"]
    assert cards["llm-lora"]["parent"] == "llm"
    assert cards["omni"]["state"] == "sleeping" and cards["omni"]["aliases"] == ["qwen"]
    assert (await gateway.json("GET", "/v1/models/llm-weights"))[1]["id"] == "llm"
    status, missing = await gateway.json("GET", "/v1/models/omnj")
    assert status == 404 and "'omni'" in missing["error"]["message"]


async def test_a_request_for_an_adapter_reaches_its_model(opened: Opened) -> None:
    gateway = await opened(describing("llm", default=1), describing("omni", default=1))
    assert (await gateway.json("POST", "/v1/completions", json={"model": "omni-lora"}))[1]["by"] == "omni"


async def test_a_tenant_sees_its_models_alone(opened: Opened) -> None:
    gateway = await opened(describing("llm", default=1), describing("omni", default=1), gate=OneModelGate())
    _, listed = await gateway.json("GET", "/v1/models")
    assert {card["id"] for card in listed["data"]} == {"llm", "llm-lora"}
    assert (await gateway.json("GET", "/v1/models/omni"))[0] == 404
    assert "omni" not in (await gateway.text("GET", "/"))[1]
    assert "omni" not in (await gateway.text("GET", "/openapi.json"))[1]


async def test_metrics_are_valid_and_labelled(opened: Opened) -> None:
    gateway = await opened(describing("llm", default=1), describing("omni", default=1))
    await gateway.json("POST", "/v1/completions", json={"model": "llm"})
    _, text = await gateway.text("GET", "/metrics")
    assert text.count("# TYPE mstar_queue_seconds histogram") == 1
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    counted = {sample.labels["model"]: sample.value for sample in families["mstar_requests"]}
    assert counted == {"llm": 3.0, "omni": 3.0}
    assert {sample.labels["deployment"] for sample in families["mstar_queue_seconds"]} == {"llm", "omni"}
    own = families["mstar_gateway_requests"][0]
    assert own.labels == {"model": "llm", "route": "/v1/completions", "status": "200"} and own.value == 1.0
    states = {s.labels["model"]: s.labels["state"] for s in families["mstar_gateway_model_state"] if s.value}
    assert states == {"llm": "ready", "omni": "ready"}
    assert [families[f"mstar_gateway_{name}"][0].value for name in ("loads", "wakes")] == [0.0, 0.0]


async def test_metrics_of_tenants_are_not_served_to_others(opened: Opened) -> None:
    gateway = await opened(describing("llm", default=1), gate=OneModelGate())
    assert (await gateway.text("GET", "/metrics"))[0] == 200
    status, _ = await gateway.text("GET", "/metrics", headers={"X-Forwarded-For": "10.0.0.9"})
    assert status == 403


async def test_descriptions_are_merged(opened: Opened) -> None:
    gateway = await opened(describing("llm", default=1), describing("omni", default=2))
    _, whole = await gateway.json("GET", "/openapi.json")
    assert whole["paths"]["/generate"]["post"]["x-mstar-models"] == ["llm", "omni"]
    assert whole["paths"]["/v1/only/omni"]["get"]["x-mstar-models"] == ["omni"]
    schemas = whole["components"]["schemas"]
    assert set(schemas) == {"Body", "Params", "Same", "Body.omni", "Params.omni"}
    assert schemas["Body.omni"]["properties"]["params"]["$ref"] == "#/components/schemas/Params.omni"
    assert (await gateway.json("GET", "/m/omni/openapi.json"))[1]["components"]["schemas"]["Params"]["default"] == 2


async def test_ready_follows_the_models_and_the_drain(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm", state=ModelState.LOADING))
    assert (await gateway.json("GET", "/ready"))[0] == 503
    gateway.fleet.fakes[0].state = ModelState.SLEEPING
    assert (await gateway.json("GET", "/ready"))[0] == 200
    gateway.door.is_draining = True
    assert (await gateway.json("GET", "/ready"))[0] == 503
    assert (await gateway.json("GET", "/health"))[1]["status"] == "draining"


async def test_a_page_chooses_the_model_of_its_requests(opened: Opened) -> None:
    gateway = await opened(describing("llm", default=1), describing("omni", default=1))
    assert '<a href="/m/omni/">omni</a>' in (await gateway.text("GET", "/"))[1]
    async with gateway.session.get(f"{gateway.url}/m/omni/") as page:
        assert "SameSite=Strict" in page.headers["Set-Cookie"] and "HttpOnly" in page.headers["Set-Cookie"]
        assert "/assets/app.js" in await page.text()
    assert (await gateway.json("GET", "/v1/models"))[1]["data"][0]["id"] == "omni"
    assert (await gateway.json("GET", "/v1/samples"))[1]["by"] == "omni"
    _, others = await gateway.json("GET", "/console/deployments")
    assert [each["path"] for each in others["deployments"]] == ["/m/llm/", "/m/omni/"]


@pytest.mark.parametrize("name", ["../index.html", "core/../../app.js", "missing.js"])
async def test_assets_are_those_of_the_package_alone(opened: Opened, name: str) -> None:
    gateway = await opened(FakeDeployment("llm"))
    assert (await gateway.text("GET", "/assets/app.js"))[0] == 200
    assert (await gateway.text("GET", f"/assets/{name.replace('/', '%2F')}"))[0] == 404


def keyed(model: str) -> FakeDeployment:
    """Return a deployment that answers to the key `right` alone."""
    inner = describing(model, default=1)
    assert inner.handler is not None
    describe = inner.handler

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer right":
            return web.json_response({}, status=401)
        return await describe(request)

    return FakeDeployment(model, handler=answer, key="right")


@pytest.mark.parametrize(("key", "sees"), [("right", True), ("wrong", False), (None, False)])
async def test_a_deployment_with_a_key_shows_its_facts_to_that_key(opened: Opened, key: str | None, sees: bool) -> None:
    gateway = await opened(keyed("llm"))
    await gateway.door.cards.refresh(gateway.fleet.models())
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    _, listed = await gateway.json("GET", "/v1/models", headers=headers)
    assert listed["data"][0]["id"] == "llm"
    assert ("max_model_len" in listed["data"][0]) is sees
    assert ("mstar_queue_seconds" in (await gateway.text("GET", "/metrics", headers=headers))[1]) is sees
    assert ("/generate" in (await gateway.text("GET", "/openapi.json", headers=headers))[1]) is sees


async def test_a_tenant_lists_and_reads_only_what_it_has_made(opened: Opened) -> None:
    made = 0

    async def videos(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal made
        if request.method == "POST":
            await request.content.read()
            made += 1
            return web.json_response({"id": f"video_{made}", "object": "video"})
        if request.path == "/v1/videos":
            return web.json_response({"data": [{"id": f"video_{number + 1}"} for number in range(made)]})
        return web.json_response({"id": request.path.rpartition("/")[2]})

    gateway = await opened(FakeDeployment("llm", handler=videos), gate=OneModelGate())
    a, b, a2 = ({"Authorization": f"Bearer {key}"} for key in ("a-1", "b-1", "a-2"))
    for headers in (a, b, a):
        await gateway.json("POST", "/v1/videos", json={"model": "llm"}, headers=headers)
    assert [item["id"] for item in (await gateway.json("GET", "/v1/videos", headers=a))[1]["data"]] == [
        "video_1",
        "video_3",
    ]
    assert (await gateway.json("GET", "/v1/videos/video_3", headers=a2))[0] == 200
    assert (await gateway.json("GET", "/v1/videos/video_3", headers=b))[0] == 404


async def test_an_offer_of_http2_changes_nothing(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"), FakeDeployment("omni"))
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAA"}
    status, listed = await gateway.json("GET", "/v1/models", headers=headers)
    assert (status, len(listed["data"])) == (200, 2)
