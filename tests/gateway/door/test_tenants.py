"""Requests of tenants through the whole gateway: hidden models, quotas with their headers, and usage by key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mstar_core.gateway.serve_file import ServeFile, TenantSpec
from mstar_core.gateway.tenants.accounts.tenant_file import TenantFile
from mstar_core.gateway.tenants.gate import TenantGate
from mstar_core.gateway.tenants.usage import usage
from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Opened
from tests.fakes.usage_reports import UsageReports

CHAT = "/v1/chat/completions"
TENANTS = {
    "acme": TenantSpec(name="acme", models=("llm",), requests_per_minute=3),
    "lab": TenantSpec(name="lab", tokens_per_day=5000),
}


class Clock:
    """A clock that stands at the begin of a minute."""

    now = 1_000_020.0

    def __call__(self) -> float:
        return self.now


class Reporting:
    """A fake deployment that reports each request on its admin socket, with seven tokens."""

    def __init__(self, model: str, folder: Path) -> None:
        self.reports = UsageReports(boot=model)
        self.socket = folder / f"{model}.sock"
        self.fake = FakeDeployment(model, handler=self._answer)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.content.read()
        status = int(request.headers.get("X-Status", "200"))
        if status == 200:
            self.reports.report(request.headers["X-Request-ID"], prompt_tokens=5, tokens=7)
        return web.json_response({"by": self.fake.model}, status=status)


class Served:
    """Two models behind a gateway with two tenants. keys: of the tenants."""

    def __init__(self, gateway: Any, folder: Path, clock: Clock) -> None:
        self.gateway = gateway
        self.folder = folder
        self.clock = clock
        self.keys = {name: TenantFile(folder).new_key(name, 0.0, is_known=True) for name in TENANTS}

    async def ask(self, tenant: str, model: str, method: str = "POST", path: str = CHAT, **headers: str) -> Any:
        """Send a request; return status, headers and JSON."""
        body = {"json": {"model": model, "max_tokens": 100}} if method == "POST" else {}
        sent = {"Authorization": f"Bearer {self.keys.get(tenant, tenant)}", **headers}
        async with self.gateway.session.request(method, f"{self.gateway.url}{path}", headers=sent, **body) as answer:
            return answer.status, answer.headers, await answer.json(content_type=None)

    async def usage(self, requests: int, tokens: int) -> dict[str, dict[str, Any]]:
        """Return the usage by tenant once it has so many requests and generated tokens."""
        async with asyncio.timeout(60):
            while True:
                items = await asyncio.to_thread(usage, self.folder, by=("tenant",))
                if (sum(i["requests"] for i in items), sum(i["output_tokens"] for i in items)) == (requests, tokens):
                    return {item["tenant"]: item for item in items}
                await asyncio.sleep(0.02)


@pytest.fixture
async def served(opened: Opened, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder, clock = tmp_path_factory.mktemp("g"), Clock()
    both = [Reporting(model, folder) for model in ("llm", "voice")]
    gate = TenantGate(ServeFile(tenants=TENANTS), folder, clock=clock, socket_of=lambda name: folder / f"{name}.sock")
    await gate.start()
    async with both[0].reports.serve(both[0].socket), both[1].reports.serve(both[1].socket):
        yield Served(await opened(*(each.fake for each in both), gate=gate, tenants=TENANTS), folder, clock)
        await gate.close()


async def test_a_key_sees_its_models_only(served: Served) -> None:
    listed = {}
    for tenant in TENANTS:
        _, _, body = await served.ask(tenant, "", "GET", "/v1/models")
        listed[tenant] = [card["id"] for card in body["data"]]
    assert listed == {"acme": ["llm"], "lab": ["llm", "voice"]}
    for path in ("/v1/models", CHAT):
        status, headers, body = await served.ask("wrong", "llm", "GET" if path != CHAT else "POST", path)
        assert status == 401 and headers["WWW-Authenticate"] == "Bearer" and body["error"]["code"] == "invalid_api_key"


async def test_a_hidden_model_reads_like_an_absent_one(served: Served) -> None:
    hidden, absent = await served.ask("acme", "voice"), await served.ask("acme", "vojce")
    assert hidden[0] == absent[0] == 404
    assert str(hidden[2]).replace("voice", "X") == str(absent[2]).replace("vojce", "X")
    assert (await served.ask("lab", "voice"))[0] == 200


async def test_a_quota_that_is_used_up_says_when_it_is_renewed(served: Served) -> None:
    for left in (2, 1, 0):
        status, headers, _ = await served.ask("acme", "llm")
        assert status == 200 and headers["x-ratelimit-remaining-requests"] == str(left)
    status, headers, body = await served.ask("acme", "llm")
    assert status == 429 and headers["Retry-After"] == "60"
    assert "3 of its 3 requests per minute" in body["error"]["message"] and body["error"]["code"] == "quota_reached"
    assert (await served.ask("lab", "llm"))[0] == 200
    served.clock.now += 60
    assert (await served.ask("acme", "llm"))[0] == 200


async def test_usage_is_counted_for_the_tenant_of_the_key(served: Served) -> None:
    for tenant, model in (("acme", "llm"), ("lab", "llm"), ("lab", "voice")):
        assert (await served.ask(tenant, model))[0] == 200
    assert (await served.ask("lab", "llm", **{"X-Status": "400"}))[0] == 400
    used = await served.usage(requests=4, tokens=21)
    assert {name: (item["input_tokens"], item["output_tokens"]) for name, item in used.items()} == {
        "acme": (5, 7),
        "lab": (10, 14),
    }


async def test_requests_that_run_no_model_are_not_counted_as_usage(served: Served) -> None:
    assert (await served.ask("lab", "llm"))[0] == 200
    for path in ("/v1/responses/resp_1", "/v1/samples"):
        await served.ask("lab", "llm", "GET", f"{path}?model=llm", **{"X-Status": "404"})
    await served.ask("lab", "llm", path="/tokenize", **{"X-Status": "404"})
    assert (await served.usage(requests=1, tokens=7)).keys() == {"lab"}
