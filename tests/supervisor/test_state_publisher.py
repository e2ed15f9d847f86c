"""State publisher: reports of children become nodes, edges, ranks and a head."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mstar_core.config.deployment import GroupPlan, Plan, RankPlan
from mstar_core.conformance.clock import FakeClock
from mstar_core.host.readings.gpus import OLD_S, GpuReader, device_keys
from mstar_core.host.readings.processes import ProcessLoads, host_memory_bytes
from mstar_core.messages.life import Phase, Telemetry
from mstar_core.messages.telemetry import EdgeNews, MetricSample, SessionNews
from mstar_core.observe.frames import GRAPH_FACT, GpuStatus
from mstar_core.supervisor.telemetry.state_publisher import StatePublisher
from tests.admin.conftest import FakeDeployment


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def deployment(tmp_path: Path, clock: FakeClock) -> FakeDeployment:
    made = FakeDeployment(tmp_path)
    made.hub._clock = clock
    return made


def test_nodes_have_rates_and_the_busiest_is_the_bottleneck(deployment: FakeDeployment, clock: FakeClock) -> None:
    prefix = "worker-0.LLM."
    for step in range(9):
        deployment.values.update(
            {
                f"{prefix}steps": 10.0 * step,
                f"{prefix}busy_s": 0.2 * step,
                f"{prefix}rows": 80.0 * step,
                f"{prefix}batch": 8.0,
                f"{prefix}step_p50_s": 0.019,
                f"{prefix}ready": 3.0,
                f"{prefix}walk.decode": 8.0,
                f"{prefix}walk.prefill": 0.0,
                f"{prefix}graph_hits": 90.0,
                f"{prefix}graph_misses": 10.0,
                f"{prefix}graphs_captured": 5.0,
                f"{prefix}graphs_planned": 2.0,
            }
        )
        deployment.publisher.refresh()
        clock.now += 0.25
    node = deployment.hub.store.nodes["LLM@0"]
    assert (node.steps_s, node.rows_s, node.busy, node.step_ms) == (40.0, 320.0, 0.8, 20.0)
    assert (node.step_p50_ms, node.queue, node.walks, node.batch) == (19.0, 3, {"decode": 8}, 8)
    assert (node.graph_share, node.eager) == (0.9, {"decode": 10})
    assert (node.captured, node.planned) == (5, 2)
    graphs = [sample for sample in deployment.publisher.shared_samples() if sample.name == "mstar_graphs"]
    assert {sample.labels[1]: sample.value for sample in graphs} == {"captured": 5.0, "planned": 2.0}
    assert node.is_bottleneck
    assert deployment.hub.store.ranks["0"].busy == 0.8
    for _ in range(9):
        clock.now += 0.25
        deployment.publisher.refresh()
    node = deployment.hub.store.nodes["LLM@0"]
    assert (node.steps_s, node.batch, node.step_ms, node.is_bottleneck) == (0.0, 0, None, False)


def test_an_edge_is_merged_from_both_its_ends(deployment: FakeDeployment, clock: FakeClock) -> None:
    for step in range(6):
        sent = EdgeNews("latents", "flow", "", 0, 1, False, 10 * step, 1000 * step)
        came = EdgeNews("latents", "flow", "", 0, 1, False, 0, 0, 10 * step, 0.02 * step)
        for child, edge in (("worker-0", sent), ("worker-1", came)):
            deployment.publisher.take(child, Telemetry(name=child, incarnation=1, edges=[edge]))
        deployment.publisher.refresh()
        clock.now += 0.25
    found = deployment.hub.store.edges["latents@0>1"]
    assert (found.items, found.bytes, found.items_s, found.transfer_ms) == (50, 5000, 40.0, 2.0)


def kill(deployment: FakeDeployment, name: str) -> None:
    """Let a process be dead, as after SIGKILL, before the supervisor has handled its end."""
    deployment.children[name].is_running = False


def test_a_dead_rank_shows_no_load_in_the_next_frame(deployment: FakeDeployment, clock: FakeClock) -> None:
    for step in range(6):
        deployment.values.update(
            {
                "worker-0.LLM.steps": 10.0 * step,
                "worker-0.LLM.busy_s": 0.2 * step,
                "worker-0.LLM.ready": 3.0,
                "worker-0.steps": 10.0 * step,
                "worker-0.requests": 4.0,
            }
        )
        deployment.publisher.refresh()
        clock.now += 0.25
    store = deployment.hub.store
    before = store.ranks["0"]
    assert (before.busy, before.steps_s, before.requests, before.state) == (0.8, 40.0, 4, "ready")
    kill(deployment, "worker-0")
    clock.now += 0.01  # long before the next update of the parts
    deployment.publisher.refresh()
    rank, node, child = store.ranks["0"], store.nodes["LLM@0"], store.children["worker-0"]
    assert (rank.state, rank.pid, rank.busy, rank.steps_s, rank.requests, rank.core) == ("ended", None, 0, 0, 0, None)
    assert rank.memory_used is None and rank.resident_bytes is None
    assert (node.busy, node.steps_s, node.queue, node.is_bottleneck) == (0.0, 0.0, 0, False)
    assert (child.state, child.core, child.resident_bytes) == ("ended", None, None)


@pytest.mark.parametrize("dead", ["worker-0", "worker-1"])
@pytest.mark.parametrize("is_handled", [False, True])
def test_nothing_moves_over_an_edge_of_a_dead_rank(
    deployment: FakeDeployment, clock: FakeClock, dead: str, is_handled: bool
) -> None:
    deployment.children["worker-1"] = copy.copy(deployment.children["worker-0"])
    for step in range(6):
        for child, edge in (
            ("worker-0", EdgeNews("ids", "LLM", "codec", 0, 1, True, 10 * step, 1000 * step)),
            ("worker-1", EdgeNews("ids", "LLM", "codec", 0, 1, True, 0, 0, 10 * step, 0.02 * step)),
        ):
            deployment.publisher.take(child, Telemetry(name=child, incarnation=1, edges=[edge]))
        deployment.publisher.refresh()
        clock.now += 0.25
    assert deployment.hub.store.edges["ids@0>1"].items_s == 40.0
    kill(deployment, dead)
    for child in ("worker-0", "worker-1") if is_handled else ():
        deployment.publisher.part(child)
    deployment.publisher.refresh()
    edge = deployment.hub.store.edges["ids@0>1"]
    assert (edge.items_s, edge.bytes_s, edge.transfer_ms) == (0.0, 0.0, None)
    assert edge.items == 50, "what was sent stays counted"


def test_a_follower_is_as_busy_as_its_leader_and_the_node_names_the_ranks(
    deployment: FakeDeployment, clock: FakeClock
) -> None:
    ranks = (RankPlan(rank=0, device="cpu", nodes=("LLM",)), RankPlan(rank=1, device="cpu", nodes=(), follows=("LLM",)))
    plan = Plan(ranks=ranks, placements=(), groups=(GroupPlan(ranks=(0, 1), nodes=("LLM",)),))
    deployment.spec = msgspec.structs.replace(deployment.spec, plan=plan)
    deployment.children["follower-1"] = copy.copy(deployment.children["worker-0"])
    for step in range(6):
        deployment.values.update(
            {"worker-0.LLM.steps": 10.0 * step, "worker-0.LLM.busy_s": 0.2 * step, "worker-0.steps": 10.0 * step}
        )
        deployment.publisher.refresh()
        clock.now += 0.25
    leader, follower = (deployment.hub.store.ranks[key] for key in "01")
    assert (follower.busy, follower.steps_s) == (leader.busy, leader.steps_s) == (0.8, 40.0)
    assert deployment.hub.store.nodes["LLM@0"].ranks == [0, 1]
    kill(deployment, "follower-1")
    deployment.publisher.refresh()
    follower = deployment.hub.store.ranks["1"]
    assert (follower.state, follower.busy, follower.steps_s) == ("ended", 0.0, 0.0)


def test_a_cache_branch_that_runs_in_its_nodes_steps_has_its_own_figures(
    deployment: FakeDeployment, clock: FakeClock
) -> None:
    graph = {"model": "m", "nodes": [{"name": "LLM"}, {"name": "LLM_cfg"}, {"name": "LLM_idle"}]}
    deployment.publisher.phase(
        "conductor", Phase(name="conductor", incarnation=1, phase="ready", facts={GRAPH_FACT: graph})
    )
    for step in range(6):
        for node, busy in (("LLM", 0.1), ("LLM_cfg", 0.05)):
            deployment.values.update(
                {
                    f"worker-0.{node}.steps": 10.0 * step,
                    f"worker-0.{node}.busy_s": busy * step,
                    f"worker-0.{node}.took_3": 10.0 * step,
                }
            )
        deployment.publisher.refresh()
        clock.now += 0.25
    store = deployment.hub.store
    assert {key: node.busy for key, node in store.nodes.items()} == {"LLM@0": 0.4, "LLM_cfg@0": 0.2}
    assert store.ranks["0"].busy == 0.6
    samples = {(s.name, *s.labels): s.value for s in deployment.publisher.shared_samples()}
    assert samples["mstar_step_seconds_sum", "LLM_cfg"] == 0.25
    assert samples["mstar_step_seconds_count", "LLM_cfg"] == 50


def test_the_graph_comes_from_the_conductors_facts(deployment: FakeDeployment) -> None:
    graph = {"model": "m", "nodes": [{"name": "LLM", "partition": "text"}]}
    phase = Phase(name="conductor", incarnation=1, phase="ready", facts={GRAPH_FACT: graph, "port": 1})
    assert deployment.publisher.phase("conductor", phase) == {"port": 1}
    assert deployment.hub.store.graph.nodes[0].name == "LLM"
    deployment.publisher.refresh(now_all=True)
    assert deployment.hub.store.nodes["LLM@0"].partition == "text"


def test_the_declared_graph_is_shown_before_any_process_starts(tmp_path: Path) -> None:
    deployment = FakeDeployment(tmp_path)
    declared = {"model": "m", "nodes": [{"name": "LLM", "partition": "text"}], "walks": [{"name": "decode"}]}
    deployment.spec = msgspec.structs.replace(deployment.spec, graph=declared)
    picture = StatePublisher(deployment, deployment.hub, GpuReader(None))
    picture.refresh(now_all=True)
    assert [walk.name for walk in deployment.hub.store.graph.walks] == ["decode"]
    assert deployment.hub.store.nodes["LLM@0"].partition == "text"


def test_the_memory_of_a_rank_on_the_cpu_is_that_of_its_process_on_the_host(deployment: FakeDeployment) -> None:
    deployment.children["worker-0"].pid = os.getpid()
    deployment.publisher.refresh(now_all=True)
    rank = deployment.hub.store.ranks["0"]
    assert rank.memory_used == rank.resident_bytes and rank.memory_total == host_memory_bytes()
    assert 0 < (rank.memory_used or 0) < (rank.memory_total or 0)


def test_the_memory_of_a_process_is_known_after_its_death(deployment: FakeDeployment, clock: FakeClock) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        deployment.children["worker-0"].pid = process.pid
        until = time.monotonic() + 60
        while (
            deployment.publisher.circumstances("worker-0").resident_bytes or 0
        ) < 1 << 20 and time.monotonic() < until:
            clock.now += 2
            deployment.publisher.refresh()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet reaped
        clock.now += 2
        deployment.publisher.refresh()
        assert (deployment.publisher.circumstances("worker-0").resident_bytes or 0) >= 1 << 20


def test_a_limit_of_the_container_counts_as_the_hosts_memory(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert host_memory_bytes(limit) == 1 << 20
    limit.write_text("max\n")
    assert host_memory_bytes(limit) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_head_counts_requests_by_state(deployment: FakeDeployment) -> None:
    for handle, state in enumerate(("run", "run", "queue", "prepare")):
        deployment.request(handle, state=state)
    head = deployment.hub.store.deployment
    assert (head.running, head.waiting, head.preparing) == (2, 1, 1)
    assert (head.pages_used, head.pages_total) == (3, 64)


def test_a_process_has_its_share_of_a_core_and_its_memory() -> None:
    processes = ProcessLoads()
    first = processes.read(os.getpid(), 0.0)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    second = processes.read(os.getpid(), 0.2)
    assert first.core is None
    assert second.core is not None and second.core >= 0.25
    assert second.resident_bytes is not None and second.resident_bytes > 1 << 20
    assert processes.read(2**22 + 1, 0.0) == (None, None)
    assert processes.read(None, 0.0) == (None, None)


class FakeNvml:
    """A fake NVML with two GPUs, one of which has no power reading."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    slow_s = 0.0

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def nvmlDeviceGetCount(self) -> int:
        self._clock.now += self.slow_s
        return 2

    def __getattr__(self, name: str) -> Any:
        answers = {"nvmlDeviceGetName": b"H100", "nvmlDeviceGetTemperature": 55, "nvmlDeviceGetClockInfo": 1980}
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda index: index
        if name == "nvmlDeviceGetUUID":
            return lambda handle: f"GPU-{handle}abc"
        if name in answers:
            return lambda *of: answers[name]

        def refuse(*of: Any) -> Any:
            raise self.NVMLError("not supported")

        return refuse


def test_unsupported_readings_are_unknown_and_slow_or_old_ones_are_stale(clock: FakeClock) -> None:
    nvml = FakeNvml(clock)
    reader = GpuReader(nvml, clock)
    reader.read()
    first, second = reader.latest(clock.now)
    assert (first.name, first.uuid, first.power_w, first.util, first.clock_mhz) == (
        "H100",
        "GPU-0abc",
        None,
        None,
        1980,
    )
    assert not second.is_stale
    assert all(gpu.is_stale for gpu in reader.latest(clock.now + OLD_S + 1))
    nvml.slow_s = 0.6
    reader.read()
    assert all(gpu.is_stale for gpu in reader.latest(clock.now))


class FullNvml(FakeNvml):
    """A fake NVML whose GPUs have every reading, and one process of this host."""

    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = 1, 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0

    def nvmlDeviceGetPcieThroughput(self, handle: int, which: int) -> int:
        return 1000 * which

    def nvmlDeviceGetFanSpeed(self, handle: int) -> int:
        return 40

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x1 | 0x4 | 0x40

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return 2

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        own, unseen = (os.getpid(), 2**30), (2**22 + 1, None)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in (own, unseen)]


def test_a_gpu_shows_its_bus_its_fan_lowered_clocks_errors_and_processes(clock: FakeClock) -> None:
    """An idle clock is not lowered. A process of another namespace has no name."""
    reader = GpuReader(FullNvml(clock), clock)
    reader.read()
    gpu, _ = reader.latest(clock.now)
    assert (gpu.pcie_in_s, gpu.pcie_out_s) == (1000 * 1024, 2000 * 1024)
    assert (gpu.fan, gpu.ecc_errors, gpu.is_mig) == (0.4, 2, True)
    assert gpu.throttle == ["power limit", "temperature (hardware)"]
    own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    assert gpu.processes == {str(os.getpid()): (own, 2**30), str(2**22 + 1): ("", 0)}


def test_a_reading_measures_the_bus_of_few_gpus_in_turn(clock: FakeClock) -> None:
    """Each measurement takes the driver 20 ms, and a reading of eight GPUs must not count as slow for it."""
    measured: list[int] = []

    class Many(FullNvml):
        def nvmlDeviceGetCount(self) -> int:
            return 5

        def nvmlDeviceGetPcieThroughput(self, handle: int, which: int) -> int:
            measured.append(handle)
            return 1000 * which

    reader = GpuReader(Many(clock), clock)
    reader.read()
    assert measured == [0, 0, 1, 1]
    assert [gpu.pcie_in_s is None for gpu in reader.latest(clock.now)] == [False, False, True, True, True]
    for _ in range(2):
        reader.read()
    assert measured[4:] == [2, 2, 3, 3, 4, 4, 0, 0]
    assert all(gpu.pcie_out_s == 2000 * 1024 for gpu in reader.latest(clock.now))


def test_a_host_without_the_library_has_no_gpus(clock: FakeClock) -> None:
    reader = GpuReader(None, clock)
    reader.start()
    assert reader.latest(clock.now) == []
    reader.stop()


@pytest.mark.parametrize(
    ("visible", "keys"),
    [
        (None, {"cuda:0": "0", "cuda:1": "1"}),
        ("1", {"cuda:0": "1"}),
        ("GPU-1, 0", {"cuda:0": "1", "cuda:1": "0"}),
        ("1,7,0", {"cuda:0": "1"}),
        ("", {}),
    ],
)
def test_a_device_is_the_gpu_that_its_process_sees(visible: str | None, keys: dict[str, str]) -> None:
    gpus = [GpuStatus(index=0, uuid="GPU-0abc"), GpuStatus(index=1, uuid="GPU-1abc")]
    assert device_keys(gpus, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == keys


def test_the_head_counts_realtime_sessions_interrupts_and_leased_pages(deployment: FakeDeployment) -> None:
    deployment.publisher.refresh(now_all=True)
    head = deployment.hub.store.deployment
    assert (head.realtime_sessions, head.realtime_interrupts, head.pages_leased) == (0, 0, 0)
    samples = [
        MetricSample("mstar_realtime_sessions", [], 3.0),
        MetricSample("mstar_realtime_interrupts_total", [], 2.0),
    ]
    deployment.publisher.take("api", Telemetry(name="api", incarnation=1, samples=samples))
    deployment.values["worker-0.LLM.pages_leased"] = 5.0
    deployment.publisher.refresh(now_all=True)
    head = deployment.hub.store.deployment
    assert (head.realtime_sessions, head.realtime_interrupts, head.pages_leased) == (3, 2, 5)


def test_sessions_are_those_of_the_last_report_and_end_with_the_api(deployment: FakeDeployment) -> None:
    def told(*sessions: SessionNews) -> dict[str, tuple[str, float | None, float | None]]:
        deployment.publisher.take("api", Telemetry(name="api", incarnation=1, sessions=list(sessions)))
        shown = deployment.hub.store.sessions
        return {key: (one.speaks, one.first_audio_ms, one.lease_ends) for key, one in shown.items()}

    first = SessionNews(id="a", kind="realtime", speaks="user", began=1.0, first_audio_s=0.08, used=5.0, lease_s=60.0)
    chat = SessionNews(id="a", kind="chat", speaks="silence", began=1.0)
    assert told(first, chat) == {"realtime/a": ("user", 80.0, 65.0), "chat/a": ("silence", None, None)}
    assert list(told(chat)) == ["chat/a"]
    deployment.publisher.take("api", Telemetry(name="api", incarnation=1))
    assert list(deployment.hub.store.sessions) == ["chat/a"], "a report without sessions changes none"
    deployment.publisher.part("worker-0")
    assert deployment.hub.store.sessions
    deployment.publisher.part("api")
    assert not deployment.hub.store.sessions
