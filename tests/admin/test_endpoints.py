"""Endpoints of the admin socket: answers and errors."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar_core.admin.endpoints import ENDPOINTS
from mstar_core.api.api_metrics import Metrics
from mstar_core.engine.base import StepResult
from mstar_core.messages.life import Telemetry
from mstar_core.messages.telemetry import RequestNews, Span
from mstar_core.observe.frames import RequestStatus
from mstar_core.observe.metrics import FAMILIES
from mstar_core.observe.request_log import LINGER_S
from mstar_core.worker.steps import NodeStatistics
from tests.admin.conftest import Admin


async def test_every_endpoint_of_the_table_is_served_and_no_other(admin: Admin) -> None:
    document = await admin.get("/v1/openapi.json")
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == {(endpoint.path, endpoint.method.lower()) for endpoint in ENDPOINTS}
    admin.deployment.request(1)
    for endpoint in ENDPOINTS:
        if endpoint.method == "GET" and endpoint.name not in ("watch", "recording"):
            answer = await admin.client.get(endpoint.path.replace("{id}", "r-1"))
            assert answer.status_code == 200, (endpoint.path, answer.text)


async def test_the_head_has_versions_features_and_the_deployment(admin: Admin) -> None:
    head = await admin.get("/v1")
    assert (head["api"], head["min_api"], head["boot"]) == (1, 1, "boot-1")
    assert {"watch", "trace"} <= set(head["features"])
    assert (head["name"], head["state"], head["endpoint"]) == ("fake", "ready", "http://127.0.0.1:1")


async def test_a_snapshot_has_every_part_and_every_field(admin: Admin) -> None:
    admin.deployment.request(7)
    snapshot = await admin.get("/v1/snapshot")
    assert snapshot["requests"]["7"]["id"] == "r-7"
    assert set(snapshot["requests"]["7"]) == set(RequestStatus.__struct_fields__)
    assert set(snapshot["children"]) == {"conductor", "worker-0", "api", "supervisor"}
    assert snapshot["nodes"]["LLM@0"]["pages_used"] == 3
    assert snapshot["values"]["worker-0.LLM.pages_total"] == 64
    only = await admin.get("/v1/snapshot?parts=nodes&filter=state:queue")
    assert list(only["nodes"]) == ["LLM@0"]
    assert only["requests"] == only["children"] == {}


@pytest.mark.parametrize(
    ("path", "status", "code", "says"),
    [
        ("/v1/nothing", 404, "not_found", "/v1/"),
        ("/v1/snapshot?parts=node", 400, "usage", "'nodes'"),
        ("/v1/snapshot?filter=stat:x", 400, "invalid_filter", "'state'"),
        ("/v1/requests?filter=/a/", 400, "invalid_filter", "glob"),
        ("/v1/requests?sort=tfft", 400, "usage", "ttf"),
        ("/v1/requests?limit=5000", 400, "usage", "1000"),
        ("/v1/requests?since=soon", 400, "usage", "number"),
        ("/v1/requests/r-8", 404, "request_not_found", "r-7"),
        ("/v1/requests/r-7?handle=9", 404, "request_not_found", ""),
        ("/v1/watch?hz=100", 400, "usage", "0.1"),
        ("/v1/logs?from=wrker-0", 404, "not_found", "worker-0"),
        ("/v1/recordings/none", 404, "not_found", ""),
    ],
)
async def test_an_invalid_read_is_refused_with_a_hint(
    admin: Admin, path: str, status: int, code: str, says: str
) -> None:
    admin.deployment.request(7)
    problem = await admin.get(path, status)
    assert set(problem) == {"code", "title", "detail", "hint"}
    assert problem["code"] == code
    assert says in problem["hint"] + problem["detail"]


async def test_requests_are_filtered_sorted_and_limited_and_the_rest_is_counted(admin: Admin) -> None:
    now = admin.deployment.hub.now()
    for handle, ttft in ((1, 0.3), (2, 0.1), (3, None), (4, 0.2)):
        admin.deployment.request(handle, ttft_s=ttft, started=now - 1000 * handle)
    found = await admin.get("/v1/requests?sort=-ttft&limit=3")
    assert [item["handle"] for item in found["items"]] == [1, 4, 2]
    assert found["truncated"] == 1
    found = await admin.get("/v1/requests?filter=ttft>150&sort=age")
    assert [item["handle"] for item in found["items"]] == [1, 4]
    found = await admin.get("/v1/requests?since=2500")
    assert [item["handle"] for item in found["items"]] == [2, 1]


async def test_a_trace_merges_the_reports_of_all_processes(admin: Admin) -> None:
    deployment, began = admin.deployment, admin.deployment.hub.now()
    deployment.request(7, started=began, ttft_s=0.2)
    deployment.tell("api", spans=[Span(1, 7, "queue", "admission", "", began, began + 0.1)])
    deployment.tell(
        "conductor", [RequestNews(handle=7, node="LLM", walk="decode", rank=0, active=["decode"], walks={"prefill": 1})]
    )
    deployment.tell(
        "worker-0",
        [RequestNews(handle=7, tokens=40, pages=3)],
        [Span(1, 7, "compute", "LLM", "decode", began + 0.2, began + 1.0, 40, 2, is_open=True)],
    )
    deployment.tell("worker-0", spans=[Span(1, 7, "compute", "LLM", "decode", began + 0.2, began + 1.2, 50, 2)])
    trace = await admin.get("/v1/requests/r-7/trace")
    assert trace["request"]["tokens"] == 40
    assert (trace["request"]["node"], trace["request"]["rank"], trace["request"]["walks"]) == ("LLM", 0, {"prefill": 1})
    assert [(s["process"], s["kind"], s["node"]) for s in trace["spans"]] == [
        ("api", "queue", "admission"),
        ("worker-0", "compute", "LLM"),
    ]
    assert trace["spans"][1]["end_ms"] == pytest.approx(1200, abs=1)
    assert trace["sums"][1]["count"] == 50


async def test_an_id_selects_its_newest_request_unless_a_handle_is_given(admin: Admin) -> None:
    for handle in (1, 2):
        admin.deployment.request(handle, id="same")
    assert (await admin.get("/v1/requests/same"))["handle"] == 2
    assert (await admin.get("/v1/requests/same?handle=1"))["handle"] == 1


async def test_an_id_may_contain_any_character_of_a_url(admin: Admin) -> None:
    admin.deployment.request(1, id="ü/ r")
    assert (await admin.get("/v1/requests/%C3%BC%2F%20r"))["handle"] == 1


async def test_a_request_is_cancelled_once_and_not_after_its_end(admin: Admin) -> None:
    admin.deployment.request(7)
    told = await admin.post("/v1/requests/r-7/cancel")
    assert told["handle"] == 7
    assert admin.deployment.acts == [("cancel", 7)]
    await admin.post("/v1/requests/r-9/cancel", 404)
    admin.deployment.request(7, state="finished", ended=admin.deployment.hub.now())
    assert (await admin.post("/v1/requests/r-7/cancel", 409))["code"] == "already_ended"


async def test_an_idempotency_key_makes_a_retry_safe(admin: Admin) -> None:
    key = {"Idempotency-Key": "k1"}
    first = await admin.post("/v1/deployment/drain", headers=key)
    again = await admin.post("/v1/deployment/drain", headers=key)
    assert first == again == {"state": "draining", "event": 0}
    assert admin.deployment.acts == ["drain"]
    assert (await admin.post("/v1/deployment/stop", 409, headers=key))["code"] == "conflict"


async def test_stop_takes_its_arguments(admin: Admin) -> None:
    await admin.post("/v1/deployment/stop?grace=7")
    await admin.post("/v1/deployment/stop?now=1")
    assert admin.deployment.acts == [("stop", False, 7), ("stop", True, None)]


async def test_a_rank_is_cordoned_by_its_number(admin: Admin) -> None:
    assert (await admin.post("/v1/ranks/0/cordon"))["cordoned"] == [0]
    assert (await admin.get("/v1/"))["drained_ranks"] == [0]
    assert (await admin.post("/v1/ranks/0/uncordon"))["cordoned"] == []
    assert (await admin.post("/v1/ranks/7/cordon", 404))["code"] == "not_found"
    assert (await admin.post("/v1/ranks/one/cordon", 400))["code"] == "usage"


async def test_a_sleep_names_the_requests_that_refuse_it_and_shows_in_the_head(admin: Admin) -> None:
    admin.deployment.running = ["r-1", "r-2"]
    refused = await admin.post("/v1/deployment/sleep", 409)
    assert (refused["code"], refused["detail"]) == ("busy", "r-1, r-2")
    await admin.post("/v1/deployment/sleep", json={"level": 2, "nodes": ["LLM"], "wait": 1})
    head = await admin.get("/v1/")
    assert (head["asleep"], head["sleep_level"], head["given_back_bytes"]) == (["LLM"], 2, 300)
    assert head["sleep"]["kept"] == {"worker-0": 200} and not head["sleep"]["is_whole"]
    rank = (await admin.get("/v1/snapshot"))["ranks"]["0"]
    assert (rank["asleep"], rank["given_back_bytes"], rank["kept_bytes"]) == (["LLM"], 300, 200)
    assert (await admin.post("/v1/deployment/wake", 404, json={"nodes": ["LLN"]}))["hint"] == "did you mean 'LLM'?"
    assert (await admin.post("/v1/deployment/wake", 400, json={"nodes": [3]}))["code"] == "usage"
    await admin.post("/v1/deployment/wake")
    assert (await admin.get("/v1/"))["asleep"] == []


async def test_a_rolling_restart_is_shown_in_the_head_and_excludes_a_second_one(admin: Admin) -> None:
    assert (await admin.get("/v1/"))["operation"] is None
    begun = (await admin.post("/v1/deployment/restart?rolling=1"))["operation"]
    assert (begun["kind"], begun["state"], begun["total"]) == ("rolling restart", "running", 3)
    assert (await admin.get("/v1/"))["operation"] == begun
    assert (await admin.post("/v1/deployment/restart?rolling=1", 409))["code"] == "conflict"
    assert admin.deployment.acts == []


async def test_replicas_and_values_are_checked_before_they_are_handed_on(admin: Admin) -> None:
    gpu = {"name": "cuda:1", "key": "GPU-1", "free_bytes": 5}
    begun = await admin.post("/v1/deployment/scale", json={"replicas": 2, "free": [gpu]})
    assert begun["operation"]["step"] == "2 on ['cuda:1']"
    for bad in ({}, {"replicas": "2"}, {"replicas": 2, "free": [{"name": 1}]}, {"replica": 2}):
        assert (await admin.post("/v1/deployment/scale", 400, json=bad))["code"] == "usage"
    assert (await admin.post("/v1/config", json={"values": {"max_queue": 1}}))["values"]["max_queue"]["value"] == 1
    for bad in ({}, {"values": {}}, {"values": 3}, {"max_queue": 1}):
        assert (await admin.post("/v1/config", 400, json=bad))["code"] == "usage"


async def test_a_log_level_is_set_for_some_or_all(admin: Admin) -> None:
    await admin.post("/v1/log-level", json={"level": "debug", "children": ["worker-0"]})
    assert admin.deployment.acts == [("log_level", "DEBUG", ["worker-0"])]
    assert "DEBUG" in (await admin.post("/v1/log-level", 400, json={"level": "debgu"}))["hint"]
    assert (await admin.post("/v1/log-level", 404, json={"level": "INFO", "children": ["wrk"]}))["code"] == "not_found"
    assert (await admin.post("/v1/log-level", 400, content=b"{"))["code"] == "usage"


async def test_health_and_ready_answer_with_their_status(admin: Admin) -> None:
    await admin.get("/v1/health")
    await admin.get("/v1/ready")
    admin.deployment.state = "starting"
    await admin.get("/v1/health")
    await admin.get("/v1/ready", 503)
    admin.deployment.state = "unhealthy"
    await admin.get("/v1/health", 503)


async def test_the_configuration_names_the_source_of_values_and_hides_keys(admin: Admin) -> None:
    found = await admin.get("/v1/config")
    assert found["settings"]["max_queue"] == {"value": 128, "source": "file.yaml:3"}
    assert "secret-key" not in str(found) and "turn-secret" not in str(found)
    assert found["settings"]["api.realtime_ice_servers.0.secret_file"]["value"] == "/turn"


async def test_the_clock_is_the_one_of_frames(admin: Admin) -> None:
    before = admin.deployment.hub.now(), time.time()
    clock = await admin.get("/v1/clock")
    assert before[0] <= clock["monotonic"] <= admin.deployment.hub.now()
    assert before[1] - 1 <= clock["time"] <= time.time() + 1, "which may be set anew meanwhile"


async def test_metrics_are_those_of_the_table_and_equal_those_of_the_api(admin: Admin) -> None:
    """The socket shows the samples of the api unchanged, also after the end of the api."""
    api = Metrics()
    api.requests.labels("/generate", "ok").inc()
    api.cancelled.labels("disconnected").inc(2)
    api.ttft_s.labels("audio").observe(0.2)
    api.ended(RequestNews(handle=1, state="finished", started=5.0, ended=6.0, ttfa_s=0.3, audio_s=2.0))
    admin.deployment.publisher.take("api", Telemetry(name="api", incarnation=1, values={}, samples=api.news(0.0)))
    admin.deployment.publisher.part("api")
    families = await read_metrics(admin)
    assert set(families) == set(FAMILIES)
    for name, family in ((family.name, family) for family in text_string_to_metric_families(api.text().decode())):
        told = {(s.name, *sorted(s.labels.items())): s.value for s in families[name].samples}
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert told[sample.name, *sorted(sample.labels.items())] == sample.value, sample
    assert [s.value for s in families["mstar_real_time_factor"].samples if s.labels.get("le") == "0.5"] == [1]


async def test_shared_families_sum_nodes_over_ranks_and_socket_families_list_ranks(admin: Admin) -> None:
    steps = NodeStatistics()
    for rows, seconds in ((1, 0.001), (4, 0.04), (300, 9.0)):
        steps.add(StepResult(rows=rows, tokens=rows, duration_s=seconds))
    values = {**steps.values(), "preempted": 3.0, "graph_hits": 7.0, "batch": 4.0}
    admin.deployment.values |= {f"worker-0.LLM.{reading}": value for reading, value in values.items()}
    admin.deployment.values |= {"worker-0.sent_bytes": 4096.0, "api.sent_bytes": 512.0, "worker-0.leftovers": 2.0}
    families = await read_metrics(admin)

    def shown(name: str, found: dict[str, Any] = families) -> dict[tuple[str, ...], float]:
        """Return samples by labels; those of a histogram by node and bound, or by node and `sum` or `count`."""
        family, plain = FAMILIES[name], {f"{name}_total": "", name: ""}
        return {
            (
                *(sample.labels[label] for label in family.labels),
                *filter(None, [plain.get(sample.name, sample.labels.get("le") or sample.name.rpartition("_")[2])]),
            ): sample.value
            for sample in found[name].samples
        }

    took, batched = shown("mstar_step_seconds"), shown("mstar_step_rows")
    assert [took["LLM", bound] for bound in ("0.0005", "0.001", "0.02", "0.05", "5.0", "+Inf")] == [0, 1, 1, 2, 2, 3]
    assert [batched["LLM", bound] for bound in ("1.0", "2.0", "4.0", "256.0", "+Inf", "count")] == [1, 1, 2, 2, 3, 3]
    assert (took["LLM", "sum"], batched["LLM", "sum"]) == (9.041, 305)
    assert shown("mstar_preempted") == {("LLM",): 3} and shown("mstar_restarts") == {(): 0}
    assert shown("mstar_graph_steps") == {("LLM", "decode", "replayed"): 7}
    assert shown("mstar_transport_bytes") == {("worker-0",): 4096, ("api",): 512}
    assert shown("mstar_leftovers") == {("worker-0",): 2}
    assert shown("mstar_kv_pages")["LLM", "used"] == shown("mstar_node_pages")["LLM", "0", "used"] == 3
    other = Metrics()
    other.take_samples(admin.deployment.publisher.shared_samples())
    api = {family.name: family for family in text_string_to_metric_families(other.text().decode())}
    for name in (
        "mstar_step_rows",
        "mstar_step_seconds",
        "mstar_kv_pages",
        "mstar_graph_steps",
        "mstar_transport_bytes",
        "mstar_preempted",
        "mstar_restarts",
        "mstar_batch_size",
    ):
        assert shown(name, api) == shown(name), name


async def read_metrics(admin: Admin) -> dict[str, Any]:
    """Read the families of the socket by name."""
    text = (await admin.client.get("/v1/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


async def test_a_recording_holds_the_requests_that_end_while_it_runs(admin: Admin) -> None:
    made = await admin.post("/v1/recordings", 201, json={"name": "sweep", "max_bytes": 100_000})
    ended = admin.deployment.hub.now() - 2 * LINGER_S
    admin.deployment.request(7, state="finished", started=ended - 1, ended=ended)
    await admin.post(f"/v1/recordings/{made['id']}/progress", json={"step": 3})
    assert not [e for e in admin.deployment.events.ring if "bench" in e["type"]], "reports do not belong there"
    state = await admin.get(f"/v1/recordings/{made['id']}")
    assert (state["requests"], state["progress"], state["state"]) == (1, {"step": 3}, "recording")
    lines = (await admin.client.get(f"/v1/recordings/{made['id']}?lines=1")).text.splitlines()
    assert len(lines) == 1 and '"r-7"' in lines[0]
    assert (await admin.client.delete(f"/v1/recordings/{made['id']}")).status_code == 200
    await admin.get(f"/v1/recordings/{made['id']}", 404)


async def test_a_full_recording_counts_dropped_requests(admin: Admin) -> None:
    made = await admin.post("/v1/recordings", 201, json={"max_bytes": 10})
    ended = admin.deployment.hub.now() - 2 * LINGER_S
    admin.deployment.request(7, state="finished", started=ended - 1, ended=ended)
    state = await admin.get(f"/v1/recordings/{made['id']}")
    assert (state["state"], state["dropped"], state["size_bytes"]) == ("full", 1, 0)
    rest: list[Any] = [await admin.post("/v1/recordings", 201, json={"max_bytes": 10}) for _ in range(3)]
    assert rest and (await admin.post("/v1/recordings", 409))["code"] == "conflict"


async def test_adapters_are_loaded_listed_and_unloaded(admin: Admin) -> None:
    body = {"name": "pirate", "folder": "/adapters/pirate", "rank": 8}
    loaded = await admin.post("/v1/adapters", json=body)
    assert loaded["operation"]["kind"] == "load of adapter pirate"
    assert (await admin.get("/v1/adapters"))["items"] == [{"name": "pirate", "folder": "/adapters/pirate"}]
    for bad in ({}, {"name": "a"}, {"name": "a", "folder": 3}, {"name": "a", "folder": "/a", "alpha": 1}):
        await admin.post("/v1/adapters", 400, json=bad)
    statuses = [(await admin.client.delete("/v1/adapters/pirate")).status_code for _ in range(2)]
    assert statuses == [202, 404]
