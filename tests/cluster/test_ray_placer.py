"""Agents placed on a cluster of three nodes of Ray on this machine, which live on when parts of Ray end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import zmq

from mstar_core.cluster.facts import ClusterView, HostFacts
from mstar_core.cluster.placer import AgentOrder, Bundle, StartedAgent
from mstar_core.cluster.ray_placer import RayPlacer
from mstar_core.cluster.survey import survey
from mstar_core.errors import ConfigError, StartError
from tests.cluster.ray_nodes import RayNode, ray_node
from tests.fakes.commands import output_of
from tests.fakes.ports import free_port

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
DEPLOYMENT = "speech"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[RayNode]]]:
    """Yields the address of the head, and three nodes. The second has two GPUs, the third no mstarctl."""
    folder = tmp_path_factory.mktemp("ray")
    absent = folder / "absent" / "mstar_core"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'mstar_core'\")\n")
    port = free_port()
    head = f"127.0.0.1:{port}"
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        started = [stack.enter_context(ray_node(ADDRESSES[0], port=port, gpus=1))]
        others = [
            ray_node(ADDRESSES[1], head=head, gpus=2),
            ray_node(ADDRESSES[2], head=head, PYTHONPATH=str(absent.parent)),
        ]
        started += threads.map(stack.enter_context, others)
        yield head, started


@pytest.fixture(scope="module")
def head(nodes: tuple[str, list[RayNode]]) -> str:
    return nodes[0]


@pytest.fixture(scope="module")
def view(head: str) -> ClusterView:
    return survey(head, ("mstarctl",), ("/tmp", "/no/such/folder"))


@pytest.fixture
def placer(head: str) -> RayPlacer:
    """A placer of the deployment. Its next start gives back the room that a test leaves."""
    return RayPlacer(head, DEPLOYMENT)


@pytest.fixture
def order() -> AgentOrder:
    return AgentOrder(deployment=DEPLOYMENT, owner_key=zmq.curve_keypair()[0].decode())


def at(view: ClusterView, address: str) -> HostFacts:
    host = view.host(address)
    assert host is not None
    return host


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def end(*agents: StartedAgent) -> None:
    for agent in agents:
        with suppress(ProcessLookupError):
            if agent.pid:
                os.kill(agent.pid, signal.SIGKILL)


def test_a_survey_tells_what_each_host_has(view: ClusterView, head: str) -> None:
    assert view.address == head
    local, *others = view.hosts
    assert local.is_local and not any(host.is_local for host in others)
    assert len({host.name for host in view.hosts}) == 3, "nodes with one host name are distinguished"
    assert local.gpu_count == 1 and local.free_gpus == 1 and local.cpus == 1
    second = at(view, ADDRESSES[1])
    assert second.gpu_count == 2
    assert second.fault == "" and second.missing == ("/no/such/folder",)
    assert second.versions["mstarctl"] and second.versions["ray"] == view.version
    assert second.memory_total > 0 and second.interfaces["lo"] == "127.0.0.1"


def test_a_host_without_mstarctl_has_a_fault(view: ClusterView) -> None:
    third = at(view, ADDRESSES[2])
    assert third.fault.startswith(f"Ray's Python ({sys.prefix}/bin/")
    assert third.fault.endswith(f") has mstarctl {third.versions['mstarctl']}, which has no mstar_core")


async def test_agents_get_the_room_that_was_reserved(view: ClusterView, placer: RayPlacer, order: AgentOrder) -> None:
    second = at(view, ADDRESSES[1])
    bundles = (
        Bundle(host="", gpus=1, cpus=0.5),
        Bundle(host="b", gpus=2, cpus=1, node=second.node, address=ADDRESSES[1]),
    )
    local, agent = await placer.start(bundles, order)
    try:
        assert (local.host, local.pid, local.gpus, local.node) == ("", 0, (0,), view.hosts[0].node)
        assert (agent.host, agent.gpus, agent.node, agent.incarnation) == ("b", (0, 1), second.node, 1)
        assert agent.endpoint.startswith(f"tcp://{ADDRESSES[1]}:")
        assert is_alive(agent.pid), "it outlives the task and the driver that started it"

        with pytest.raises(StartError, match="host x needs 1 GPU") as caught:
            other = msgspec.structs.replace(order, deployment="other")
            await RayPlacer(placer.address, "other").start((Bundle(host="x", gpus=1, node=second.node),), other)
        assert "0 of 2 GPUs" in caught.value.detail
    finally:
        end(agent)
    await placer.release()
    (agent,) = await RayPlacer(placer.address, "other").start((bundles[1],), other)
    end(agent)
    await RayPlacer(placer.address, "other").release()


async def test_an_agent_that_died_is_started_again_on_its_host(
    view: ClusterView, placer: RayPlacer, order: AgentOrder
) -> None:
    second = at(view, ADDRESSES[1])
    bundle = Bundle(host="b", gpus=2, node=second.node, address=ADDRESSES[1])
    (agent,) = await placer.start((bundle,), order)
    end(agent)
    other = await placer.replace(bundle, order)
    end(other)
    assert (other.node, other.gpus, other.incarnation) == (second.node, (0, 1), 2)
    assert other.key != agent.key


async def test_the_room_of_a_dead_supervisor_is_given_to_the_next(
    head: str, view: ClusterView, placer: RayPlacer, order: AgentOrder
) -> None:
    second = at(view, ADDRESSES[1])
    bundle = Bundle(host="b", gpus=2, node=second.node)
    script = (
        "import asyncio, sys, msgspec\n"
        "from mstar_core.cluster.placer import AgentOrder, Bundle\n"
        "from mstar_core.cluster.ray_placer import RayPlacer\n"
        "bundle, order = msgspec.json.decode(sys.argv[2], type=tuple[Bundle, AgentOrder])\n"
        "print(asyncio.run(RayPlacer(sys.argv[1], order.deployment).start((bundle,), order))[0].pid)\n"
    )
    await placer.release()
    words = [sys.executable, "-c", script, head, msgspec.json.encode((bundle, order)).decode()]
    first = int(await asyncio.to_thread(output_of, words))
    (agent,) = await placer.start((bundle,), order)
    assert is_alive(first), "its end is left to the missing pings"
    end(agent)
    os.kill(first, signal.SIGKILL)


async def test_a_host_without_mstarctl_is_named(view: ClusterView, placer: RayPlacer, order: AgentOrder) -> None:
    bundle = Bundle(host="c", node=at(view, ADDRESSES[2]).node)
    with pytest.raises(StartError, match="no agent on host c") as caught:
        await placer.start((bundle,), order)
    assert "mstar" in caught.value.detail


def test_another_version_of_ray_is_refused(head: str) -> None:
    put = (
        "import sys\n"
        "from ray._raylet import GcsClient\n"
        "client = GcsClient(address=sys.argv[1])\n"
        "was = client.internal_kv_get(b'CLUSTER_METADATA', b'cluster')\n"
        "client.internal_kv_put(b'CLUSTER_METADATA', sys.argv[2].encode() or was, True, b'cluster')\n"
        "print(was.decode())\n"
    )

    def set_metadata(text: str) -> str:
        return output_of([sys.executable, "-c", put, head, text]).strip()

    was = set_metadata('{"ray_version": "2.9.3", "python_version": "3.11.7"}')
    try:
        with pytest.raises(ConfigError, match="runs Ray 2.9.3") as caught:
            survey(head, ())
    finally:
        set_metadata(was)
    assert caught.value.hint == "pip install ray==2.9.3"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed") as caught:
        survey(head, ())
    assert caught.value.hint == "pip install 'mstarctl[ray]'"


async def test_agents_outlive_ray_and_a_lost_host_is_replaced(
    nodes: tuple[str, list[RayNode]], view: ClusterView, placer: RayPlacer, order: AgentOrder
) -> None:
    """The last test: it ends the nodes one after the other."""
    head, (first, second, third) = nodes
    bundle = Bundle(host="b", gpus=2, node=at(view, ADDRESSES[1]).node, address=ADDRESSES[1])
    (agent,) = await placer.start((bundle,), order)
    for pid in second.workers():
        os.kill(pid, signal.SIGKILL)
    assert is_alive(agent.pid)
    os.kill(second.raylet(), signal.SIGKILL)
    second.kill()
    assert is_alive(agent.pid)
    third.kill()
    with ray_node("127.0.0.4", head=head, gpus=2):
        other = await placer.replace(bundle, order)
        assert other.node != agent.node and other.address == "127.0.0.4" and other.incarnation == 2
        first.kill("gcs_server")
        await asyncio.sleep(1)
        assert is_alive(agent.pid) and is_alive(other.pid)
        end(agent, other)
