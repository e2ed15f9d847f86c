"""Telemetry of a real deployment on two ranks: a request is seen where it is, its trace adds up, it can be ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar_core.observe.frames import Frame, RequestStatus
from mstar_core.observe.metrics import FAMILIES, SUFFIXES
from mstarctl.client.store import Store, decode
from tests.fakes.tls import NO_AUTHORITIES
from tests.runtime.client import SURE, Heard, Streams, request
from tests.runtime.deployment import LLM, SNAC, Deployment, plan, until

LIMIT_S = 120.0
LONG = request(**SURE, max_output_tokens=2000)
SERIES = {f"{name}{suffix}": family for name, family in FAMILIES.items() for suffix in SUFFIXES[family.kind]}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(where=plan({0: (LLM,), 1: (SNAC,)})) as made:
        yield made


async def ask(deployment: Deployment, path: str, method: str = "GET") -> Any:
    return await asyncio.to_thread(deployment.admin, path, method)


async def follow(deployment: Deployment, store: Store, is_watching: asyncio.Event) -> RequestStatus:
    """Apply frames until a request has finished, and give it as it was then: it leaves the view a moment later."""
    transport = httpx.AsyncHTTPTransport(uds=str(deployment.run.admin_socket), verify=NO_AUTHORITIES)
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
                    is_watching.set()
                    for each in store.requests.values():
                        if each.state == "finished":
                            return each
    raise AssertionError("the stream of frames ended")


def traced(deployment: Deployment, name: str, tokens: int) -> dict[str, Any] | None:
    """The trace of a request that ended, when every process has told its part: each does on a clock of its own."""
    trace: dict[str, Any] = deployment.admin(f"/v1/requests/{name}/trace")
    counts = {(each["node"], each["kind"], each["walk"]): each["count"] for each in trace["sums"]}
    is_decoded = counts.get((LLM, "compute", "decode"), 0) >= tokens - 1
    is_moved = counts.get(("audio_ids", "transfer", ""), 0) >= tokens and (SNAC, "compute", "snac_chunk") in counts
    is_over = len(trace["request"]["walks"]) == 3 and not any(span["is_open"] for span in trace["spans"])
    return trace if is_decoded and is_moved and is_over else None


async def test_a_request_is_followed_from_its_arrival_to_its_trace(deployment: Deployment) -> None:
    store, is_watching = Store(), asyncio.Event()
    watching = asyncio.create_task(follow(deployment, store, is_watching))
    async with asyncio.timeout(LIMIT_S):
        await is_watching.wait()
    async with Streams(deployment.url, [request(**SURE, max_output_tokens=90)]) as streams:
        heard = await streams.all_ended()
    seen = await watching
    assert heard[0].is_whole and heard[0].done is not None
    usage = heard[0].done["usage"]
    assert (seen.inputs, seen.outputs, seen.model) == (["text"], ["audio"], "orpheus")
    assert seen.tokens == usage["completion_tokens"]
    assert seen.audio_s == pytest.approx(usage["audio_seconds"], abs=1e-3)
    assert seen.ttfa_ms == pytest.approx(usage["ttft_ms"], abs=1)
    assert {node.name for node in store.graph.nodes} == {LLM, SNAC}
    assert store.children.keys() == {"supervisor", "conductor", "worker-0", "worker-1", "api"}

    tokens: int = usage["completion_tokens"]
    trace = await asyncio.to_thread(until, lambda: traced(deployment, seen.id, tokens), "the whole trace")
    lasted_ms = (time.monotonic() - heard[0].sent_s) * 1000
    sums = {(each["node"], each["walk"], each["kind"]): each for each in trace["sums"]}
    assert {
        ("prepare", "", "compute"),
        (LLM, "prefill", "compute"),
        (LLM, "decode", "compute"),
        (SNAC, "snac_chunk", "compute"),
        ("audio_ids", "", "transfer"),
    } <= sums.keys()
    assert sums[LLM, "decode", "compute"]["count"] == usage["completion_tokens"] - 1
    assert sums["audio_ids", "", "transfer"]["count"] == usage["completion_tokens"]
    assert trace["request"]["walks"] == {"prefill": 1, "decode": 1, "snac_chunk": 1}
    assert all(0 <= span["start_ms"] <= span["end_ms"] <= lasted_ms for span in trace["spans"])

    # The first request of the deployment ran alone, so that its compute is all that the metrics count.
    alone = {
        node: sum(s["busy_ms"] for s in trace["sums"] if (s["node"], s["kind"]) == (node, "compute"))
        for node in (LLM, SNAC)
    }

    def counted() -> dict[str, float] | None:
        found = samples(deployment.admin_text("/v1/metrics"))
        shown = {node: 1000 * found.get(f"mstar_step_seconds_sum{[('node', node)]}", 0.0) for node in alone}
        return shown if shown == pytest.approx(alone, abs=0.5) else None

    assert await asyncio.to_thread(until, counted, f"metrics that count {alone}")
    total_ms = 1000 * trace["request"]["age_s"]
    assert all(spent <= total_ms for spent in alone.values()), "each rank has one thread"
    assert sum(part["ms"] for part in trace["parts"]) == pytest.approx(total_ms, rel=0.02)
    parts = {part["node"]: part["ms"] for part in trace["parts"] if part["kind"] == "compute"}
    assert {node: parts[node] for node in alone} == pytest.approx(alone, abs=0.01)

    # Counters are reported on their own interval, so the last of them may arrive after the end of the request.
    async with asyncio.timeout(LIMIT_S):
        while True:
            edge = (await ask(deployment, "/v1/snapshot"))["edges"]["audio_ids@0>1"]
            if edge["items"] >= usage["completion_tokens"]:
                break
            await asyncio.sleep(0.05)
    assert (edge["source"], edge["into"], edge["items"]) == (LLM, SNAC, usage["completion_tokens"])
    assert (await ask(deployment, "/v1/requests"))["items"][0]["id"] == seen.id


def in_flight(deployment: Deployment) -> tuple[dict[str, Any], ...]:
    """Return the head, the node and the list for the one decoding request; empty while they disagree."""
    snapshot = deployment.admin("/v1/snapshot")
    items = deployment.admin("/v1/requests?filter=state:run")["items"]
    is_decoding = snapshot["nodes"][f"{LLM}@0"]["walks"] == {"decode": 1} and snapshot["deployment"]["running"] == 1
    if not is_decoding or len(items) != 1 or not (items[0]["tokens"] and items[0]["pages"]):
        return ()
    is_streaming = (items[0]["walk"], items[0]["active"]) == ("decode", ["decode", "snac_chunk"])
    return tuple(items) if is_streaming else ()


async def test_a_request_in_flight_is_shown_at_its_node_and_can_be_cancelled(deployment: Deployment) -> None:
    heard = [Heard(done={})]
    while heard[0].done is not None:  # a test that had to wait for the processor may look when all is over
        async with Streams(deployment.url, [LONG]) as streams:
            await streams.all_begun()
            items = await asyncio.to_thread(until, lambda: in_flight(deployment) or streams.have_ended, "its picture")
            if items is not True:
                with suppress(httpx.HTTPStatusError):  # it may just have ended
                    await ask(deployment, f"/v1/requests/{items[0]['id']}/cancel", "POST")
            heard = await streams.all_ended()
    (item,) = items
    assert (item["node"], item["rank"]) == (LLM, 0)
    assert [error["code"] for error in heard[0].errors] == ["cancelled"]
    path = f"/v1/requests/{item['id']}"
    await asyncio.to_thread(until, lambda: deployment.admin(path)["ended"] is not None, "its end")
    found = await ask(deployment, path)
    assert (found["state"], found["error"], found["pages"]) == ("cancelled", "cancelled", 0)
    await asyncio.to_thread(deployment.assert_clean)


async def test_a_log_level_reaches_the_processes(deployment: Deployment) -> None:
    def set_level() -> Any:
        transport = httpx.HTTPTransport(uds=str(deployment.run.admin_socket), verify=NO_AUTHORITIES)
        with httpx.Client(transport=transport, base_url="http://admin", timeout=LIMIT_S) as client:
            return client.post("/v1/log-level", json={"level": "WARNING", "children": ["conductor"]}).json()

    assert (await asyncio.to_thread(set_level))["children"] == ["conductor"]
    assert deployment.has_event("log.level", level="WARNING", children=["conductor"])


async def pages(deployment: Deployment) -> tuple[dict[str, float], dict[str, float]]:
    """Samples of the api's /metrics and of the admin socket's, by name and labels."""
    transport = httpx.AsyncHTTPTransport(uds=str(deployment.run.admin_socket), verify=NO_AUTHORITIES)
    async with (
        httpx.AsyncClient(timeout=LIMIT_S) as api,
        httpx.AsyncClient(transport=transport, timeout=LIMIT_S) as admin,
    ):
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
    for family in (
        "mstar_ttfa_seconds_count",
        "mstar_real_time_factor_count",
        "mstar_step_seconds_bucket",
        "mstar_transport_bytes_total",
        "mstar_tokens_total",
        "mstar_restarts_total",
    ):
        assert any(name.startswith(family) for name in ours), family
    assert ours[f"mstar_step_seconds_count{[('node', LLM)]}"] >= 60
    assert ours[f"mstar_step_rows_sum{[('node', LLM)]}"] >= 60
    assert ours[f"mstar_transport_bytes_total{[('component', 'worker-1')]}"] > 0
