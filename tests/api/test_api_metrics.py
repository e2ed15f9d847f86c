"""Every metric of /metrics changes, and none contains client text."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar_core.api.api_metrics import Metrics
from mstar_core.messages.life import Telemetry
from mstar_core.observe.frames import ChildStatus, NodeStatus
from mstar_core.observe.metrics import FAMILIES, SUFFIXES, made_by, samples
from mstar_core.supervisor.telemetry.metric_samples import shared_samples
from mstarctl.client.store import Store
from tests.api.conftest import Api, Started
from tests.fakes.conductor import say, speak

GOOD = {"text": "x", "output_modalities": "audio"}


async def values(api: Api) -> dict[str, float]:
    """Return sums by sample name over all labels."""
    answer = await api.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "client-words" not in answer.text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


async def test_every_metric_moves(started: Started) -> None:
    async with started(speak(3), max_concurrent_requests=1, max_queue=1) as api:
        before = await values(api)
        await api.client.post("/generate", data={**GOOD, "request_id": "client-words"})
        api.fake.script = None
        first = asyncio.create_task(api.client.post("/generate", data=GOOD))
        await api.fake.next_request(2)
        second = asyncio.create_task(api.client.post("/generate", data=GOOD))
        await api.until(lambda: [live.state for live in api.process.registry] == ["running", "queued"])
        assert (await api.client.post("/generate", data=GOOD)).status_code == 429
        found = [*samples("mstar_kv_pages", {("LLM", "used"): 5}), *samples("mstar_batch_size", {("LLM",): 2})]
        api.fake.tell(Telemetry(name="supervisor", incarnation=0, samples=found))
        await api.until(lambda: b"mstar_batch_size{" in api.process.metrics.text())
        during = await values(api)
        first.cancel()
        second.cancel()
        await api.until(lambda: api.service_is_clean)
        after = await values(api)
    for name in (
        "mstar_requests_total",
        "mstar_tokens_total",
        "mstar_audio_seconds_total",
        "mstar_queue_seconds_count",
        "mstar_ttft_seconds_count",
        "mstar_inter_chunk_seconds_count",
        "mstar_request_seconds_count",
        "mstar_stream_gap_seconds_count",
        "mstar_cancelled_total",
        "mstar_rejected_total",
        "mstar_ttfa_seconds_count",
        "mstar_real_time_factor_count",
    ):
        assert after.get(name, 0) > before.get(name, 0), name
    assert (during["mstar_inflight"], during["mstar_queue_depth"]) == (1, 1)
    assert (after["mstar_inflight"], after["mstar_queue_depth"]) == (0, 0)
    assert (during["mstar_kv_pages"], during["mstar_batch_size"]) == (5, 2)
    assert during["mstar_component_up"] == 2


def test_the_page_has_the_families_of_the_api_and_of_the_supervisor() -> None:
    metrics = Metrics()
    shown = {family.name for family in text_string_to_metric_families(metrics.text().decode())}
    assert shown == {family.name for family in made_by("api", "supervisor")}
    counted = {sample.name for sample in metrics.news(0.0)}
    for family in made_by("api"):
        is_made = any(f"{family.name}{suffix}" in counted for suffix in SUFFIXES[family.kind])
        assert is_made or family.labels, f"{family.name} is not counted"


def test_the_supervisor_shares_its_families_and_no_other() -> None:
    node = NodeStatus(name="LLM", rank=0, pages_total=8)
    readings = ("took_0", "batched_0", "preempted", "graph_bytes", "graphs_captured", "graph_hits")
    values = {f"worker-0.LLM.{reading}": 1.0 for reading in readings} | {"worker-0.sent_bytes": 1.0}
    values |= {"worker-0.kernels_late": 0.0, "worker-0.leftovers": 0.0}
    store = Store(nodes={"LLM@0": node}, children={"worker-0": ChildStatus(name="worker-0")})
    made = {sample.name for sample in shared_samples(store, values, restarts=1)}
    series = {f"{name}{suffix}": name for name, family in FAMILIES.items() for suffix in SUFFIXES[family.kind]}
    assert {series[name] for name in made} == {f.name for f in made_by("supervisor")} - {"mstar_component_up"}


def test_only_what_changed_is_told_and_once_a_second() -> None:
    metrics = Metrics()
    first = metrics.news(0.0)
    assert {sample.name for sample in first} >= {"mstar_late_messages_total", "mstar_queue_seconds_bucket"}
    metrics.late.inc()
    assert metrics.news(0.5) == []
    assert [(sample.name, sample.value) for sample in metrics.news(1.0)] == [("mstar_late_messages_total", 1.0)]


async def test_a_busy_pool_shows(started: Started) -> None:
    async with started(speak(1)) as api:
        task = asyncio.create_task(api.client.post("/generate", data={**GOOD, "text": "hang"}))
        await api.until(lambda: api.process.pool.busy == 1)
        assert (await values(api))["mstar_pool_busy"] == 1
        task.cancel()


async def test_a_message_for_a_request_that_ended_is_counted(started: Started) -> None:
    async with started(say(b"a")) as api:
        await api.client.post("/generate", data={"text": "x"})
        api.fake.finish(api.fake.requests[0].handle)
        await api.until(lambda: api.process.metrics.late._value.get() == 1)


@pytest.mark.parametrize(
    ("source", "folder", "name"),
    [
        ("folder", "/data/llama-3", "llama-3"),
        ("folder", "/hub/models--Qwen--Qwen3-4B/snapshots/0a1b", "Qwen/Qwen3-4B"),
        ("tiny", None, "fake_speech:tiny"),
    ],
)
async def test_the_model_has_the_name_of_its_weights(
    started: Started, source: str, folder: str | None, name: str
) -> None:
    async with started(speak(1), weights_source=source, folder=folder) as api:
        (card,) = (await api.client.get("/v1/models")).json()["data"]
        assert (card["root"], card["aliases"]) == (name, ["fake_speech", name])


async def test_models_and_version_tell_what_is_served(started: Started) -> None:
    async with started(speak(1), versions={"mstarctl": "1.2.3"}) as api:
        (card,) = (await api.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["root"], card["aliases"]) == ("fake", "fake/weights", ["fake_speech", "fake/weights"])
        assert card["endpoints"] == ["/generate", "/v1/audio/speech", "/v1/realtime"]
        assert card["parameters"]["properties"]["voice"]["enum"] == ["tara", "leo"]
        assert card["speech"] == "verbatim"
        for name in ("fake", "fake/weights"):
            assert (await api.client.get(f"/v1/models/{name}")).json() == card
        assert (await api.client.get("/version")).json()["version"] == "1.2.3"


async def test_replayed_steps_show(started: Started) -> None:
    """Check the path from worker reports, through the supervisor's sums over ranks, to the metric."""
    reported = {
        "worker-0.LLM.graph_hits": 7.0,
        "worker-1.LLM.graph_hits": 5.0,
        "worker-0.LLM.graph_misses": 1.0,
        "worker-0.LLM.prefill_hits": 3.0,
        "worker-0.LLM.graph_bytes": 1024.0,
        "worker-0.LLM.graphs_captured": 5.0,
        "worker-1.LLM.graphs_captured": 4.0,
        "worker-1.LLM.graphs_planned": 2.0,
        "worker-0.kernels_ahead": 73.0,
        "worker-1.kernels_late": 2.0,
    }
    nodes = {f"LLM@{rank}": NodeStatus(name="LLM", rank=rank) for rank in (0, 1)}
    found = list(shared_samples(Store(nodes=nodes), reported, restarts=0))
    async with started(speak(1)) as api:
        api.fake.tell(Telemetry(name="supervisor", incarnation=0, samples=found))
        await api.until(lambda: b"mstar_graph_bytes{" in api.process.metrics.text())
        text = api.process.metrics.text().decode()
        ready = (await api.client.get("/ready")).json()
    assert ready["captures"] == {"LLM": {"captured": 9, "planned": 2}}
    for line in (
        'mstar_graphs{node="LLM",state="planned"} 2.0',
        'mstar_graph_steps{how="replayed",kind="decode",node="LLM"} 12.0',
        'mstar_graph_steps{how="plain",kind="decode",node="LLM"} 1.0',
        'mstar_graph_steps{how="replayed",kind="prefill",node="LLM"} 3.0',
        'mstar_graph_bytes{node="LLM"} 1024.0',
        'mstar_kernels_compiled{component="worker-0",when="ahead"} 73.0',
        'mstar_kernels_compiled{component="worker-1",when="late"} 2.0',
    ):
        assert line in text
