"""Telemetry of a real deployment on two ranks: a request is seen where it is, its trace adds up, it can be ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar_core.observe.exposition import SUFFIXES
from mstar_core.observe.families import FAMILIES
from mstar_core.observe.frames import Frame, decode
from mstar_core.observe.store import Store
from tests.runtime.client import SURE, Streams, request
from tests.runtime.deployment import LLM, SNAC, Deployment, plan

LIMIT_S = 30.0
SERIES = {f"{name}{suffix}": family for name, family in FAMILIES.items() for suffix in SUFFIXES[family.kind]}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(where=plan({0: (LLM,), 1: (SNAC,)})) as made:
        yield made


async def ask(deployment: Deployment, path: str, method: str = "GET") -> Any:
    return await asyncio.to_thread(deployment.admin, path, method)


async def follow(deployment: Deployment, store: Store, until: str) -> None:
    """Apply frames until a request is in that state."""
    transport = httpx.AsyncHTTPTransport(uds=str(deployment.run.admin_socket))
    async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(transport=transport, timeout=LIMIT_S) as client:
        async with client.stream("GET", "http://admin/v1/watch?hz=10") as response:
            rest = b""
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    frame: Frame | None = decode(line)
                    assert frame is not None
                    store.apply(frame)
                    assert not store.has_gap
                if any(each.state == until for each in store.requests.values()):
                    return


async def test_a_request_is_followed_from_its_arrival_to_its_trace(deployment: Deployment) -> None:
    store = Store()
    watching = asyncio.create_task(follow(deployment, store, "finished"))
    async with Streams(deployment.url, [request(**SURE, max_output_tokens=90)]) as streams:
        heard = await streams.all_ended()
    await watching
    assert heard[0].is_whole and heard[0].done is not None
    usage = heard[0].done["usage"]
    (seen,) = store.requests.values()
    assert (seen.inputs, seen.outputs, seen.model) == (["text"], ["audio"], "orpheus")
    assert seen.tokens == usage["completion_tokens"]
    assert seen.audio_s == pytest.approx(usage["audio_seconds"], abs=1e-3)
    assert seen.ttfa_ms == pytest.approx(usage["ttft_ms"], abs=1)
    assert {node.name for node in store.graph.nodes} == {LLM, SNAC}
    assert store.children.keys() == {"supervisor", "conductor", "worker-0", "worker-1", "api"}

    trace = await ask(deployment, f"/v1/requests/{seen.id}/trace")
    sums = {(each["node"], each["walk"], each["kind"]): each for each in trace["sums"]}
    assert {("prepare", "", "compute"), (LLM, "prefill", "compute"), (LLM, "decode", "compute"),
            (SNAC, "snac_chunk", "compute"), ("audio_ids", "", "transfer")} <= sums.keys()  # fmt: skip
    assert sums[LLM, "decode", "compute"]["count"] == usage["completion_tokens"] - 1
    assert sums["audio_ids", "", "transfer"]["count"] == usage["completion_tokens"]
    assert trace["request"]["walks"] == {"prefill": 1, "decode": 1, "snac_chunk": 1}
    total_ms = usage["total_ms"]
    assert all(0 <= span["start_ms"] <= span["end_ms"] <= total_ms + 50 for span in trace["spans"])
    assert not any(span["is_open"] for span in trace["spans"])

    # Counters are told on a clock of their own, so the last of them may come after the end of the request.
    async with asyncio.timeout(LIMIT_S):
        while True:
            edge = (await ask(deployment, "/v1/snapshot"))["edges"]["audio_ids@0>1"]
            if edge["items"] >= usage["completion_tokens"]:
                break
            await asyncio.sleep(0.05)
    assert (edge["source"], edge["into"], edge["items"]) == (LLM, SNAC, usage["completion_tokens"])
    assert (await ask(deployment, "/v1/requests"))["items"][0]["id"] == seen.id


async def test_a_request_in_flight_is_shown_at_its_node_and_can_be_cancelled(deployment: Deployment) -> None:
    async with Streams(deployment.url, [request(**SURE, max_output_tokens=1500)]) as streams:
        await streams.all_begun()
        async with asyncio.timeout(LIMIT_S):
            while True:
                (item,) = (await ask(deployment, "/v1/requests?filter=state:run"))["items"]
                if item["walk"] == "decode" and item["tokens"] and item["pages"]:
                    break
        assert (item["node"], item["rank"], item["active"]) == (LLM, 0, ["decode", "snac_chunk"])
        snapshot = await ask(deployment, "/v1/snapshot")
        assert snapshot["nodes"][f"{LLM}@0"]["walks"] == {"decode": 1}
        assert snapshot["deployment"]["running"] == 1
        await ask(deployment, f"/v1/requests/{item['id']}/cancel", "POST")
        heard = await streams.all_ended()
    assert [error["code"] for error in heard[0].errors] == ["cancelled"]
    async with asyncio.timeout(LIMIT_S):
        while (found := await ask(deployment, f"/v1/requests/{item['id']}"))["ended"] is None:
            pass
    assert (found["state"], found["error"], found["pages"]) == ("cancelled", "cancelled", 0)
    await asyncio.to_thread(deployment.assert_clean)


async def test_a_log_level_reaches_the_processes(deployment: Deployment) -> None:
    def set_level() -> Any:
        transport = httpx.HTTPTransport(uds=str(deployment.run.admin_socket))
        with httpx.Client(transport=transport, base_url="http://admin", timeout=10) as client:
            return client.post("/v1/log-level", json={"level": "WARNING", "children": ["conductor"]}).json()

    assert (await asyncio.to_thread(set_level))["children"] == ["conductor"]
    event = [each for each in map(json.loads, (deployment.log_dir / "events.ndjson").read_text().splitlines())][-1]
    assert (event["type"], event["level"]) == ("log.level", "WARNING")


async def pages(deployment: Deployment) -> tuple[dict[str, float], dict[str, float]]:
    """Samples of the api's /metrics and of the admin socket's, by name and labels."""
    transport = httpx.AsyncHTTPTransport(uds=str(deployment.run.admin_socket))
    async with httpx.AsyncClient(timeout=LIMIT_S) as api, httpx.AsyncClient(transport=transport) as admin:
        texts = (await api.get(f"{deployment.url}/metrics")).text, (await admin.get("http://admin/v1/metrics")).text
    return samples(texts[0]), samples(texts[1])


def samples(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {f"{s.name}{sorted(s.labels.items())}": s.value for family in families for s in family.samples}


def is_told(name: str) -> bool:
    """Whether both pages show a series, of what does not change while nothing runs."""
    series = name.partition("[")[0]
    return SERIES[series].maker != "socket" and series not in ("mstar_component_up", "mstar_batch_size")


async def test_the_api_and_the_admin_socket_tell_the_same_metrics(deployment: Deployment) -> None:
    async with Streams(deployment.url, [request(**SURE, max_output_tokens=60)]) as streams:
        await streams.all_ended()
    async with asyncio.timeout(LIMIT_S):
        while True:
            api, admin = await pages(deployment)
            ours = {name: value for name, value in api.items() if is_told(name)}
            differ = {name for name, value in ours.items() if admin.get(name) != pytest.approx(value, rel=1e-3)}
            if not {name for name in differ if "'metrics'" not in name}:  # each look at it is a request of that route
                break
            await asyncio.sleep(0.2)  # each tells the other once a second
    for family in ("mstar_ttfa_seconds_count", "mstar_real_time_factor_count", "mstar_step_seconds_bucket",
                   "mstar_transport_bytes_total", "mstar_tokens_total", "mstar_restarts_total"):  # fmt: skip
        assert any(name.startswith(family) for name in ours), family
    assert ours[f"mstar_step_seconds_count{[('node', LLM)]}"] >= 60
    assert ours[f"mstar_step_rows_sum{[('node', LLM)]}"] >= 60
    assert ours[f"mstar_transport_bytes_total{[('component', 'worker-1')]}"] > 0
