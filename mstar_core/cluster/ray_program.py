"""The only module that imports Ray: `python -m mstar_core.cluster.ray_program`, one call per process.

It reads a call (calls.py) as a line of JSON from standard input and prints a CallAnswer. Ray's own lines go to standard
error.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

# Before Ray is imported, which reads them then.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_gcs_rpc_server_connect_timeout_s", "5")
os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "5")

import msgspec
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined, unused-ignore]  # compiled; Ray may not be installed
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from mstar_core.cluster import on_host
from mstar_core.cluster.calls import (
    Call,
    CallAnswer,
    ErrorRecord,
    NextAgent,
    ReleaseCall,
    ReplaceCall,
    StartCall,
    SurveyCall,
)
from mstar_core.cluster.connection import AUTO, check_listener, is_own, split_address
from mstar_core.cluster.facts import ClusterView, HostFacts
from mstar_core.cluster.owner import Reservation, reservation
from mstar_core.cluster.placer import AgentOrder, Bundle, StartedAgent
from mstar_core.errors import ConfigError, MstarError, StartError, Unreachable

NAMESPACE: Final = "mstar"
"""Ray namespace of all our placement groups. Names are unique in it."""

RESERVE_S: Final = 15.0
HOST_S: Final = 15.0
"""Time until a host of Ray answers a task beyond the time of the task itself: its worker has to start."""

HEAD_S: Final = 5.0
ALIVE: Final = 0
"""State of a node in Ray's records (GcsNodeInfo)."""

ANOTHER_S: Final = 2.0
"""Wait of a replacement for another host than those that failed in the same call."""

NODE_LABEL: Final = "ray.io/node-id"


def main() -> None:
    """Answer the call on standard input."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of Ray goes to standard error
    ray.cloudpickle.register_pickle_by_value(on_host)
    call: Call = msgspec.json.decode(sys.stdin.buffer.readline(), type=Call)
    output.write(msgspec.json.encode(_answer(call)))
    output.close()


def _answer(call: Call) -> CallAnswer:
    try:
        with connected(call.address) as address:
            return CallAnswer(result=msgspec.Raw(msgspec.json.encode(_result(call, address))))
    except MstarError as error:
        kind, title, detail, hint = type(error).__name__, error.title, error.detail, error.hint
    except Exception as error:  # noqa: BLE001  # Ray raises many kinds, and its caller has to show a sentence
        kind, title, detail = "StartError", "Ray failed", f"{type(error).__name__}: {_message(error)}"
        hint = f"ray status --address {call.address}"
    return CallAnswer(error=ErrorRecord(kind=kind, title=title, detail=detail, hint=hint))


def _result(call: Call, address: str) -> object:
    match call:
        case SurveyCall():
            return survey(call, address)
        case StartCall():
            return start(call)
        case ReplaceCall():
            return replace(call)
        case ReleaseCall():
            release(call)
            return None


def _message(error: BaseException) -> str:
    """Return the first line of an error that says something."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line and not line.endswith("error:")), "no message")


def say(text: str) -> None:
    """Tell on standard error what happens."""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------- connection
@contextmanager
def connected(address: str) -> Iterator[str]:
    """Connect to a cluster and return the address of its head. Raises ConfigError and Unreachable within seconds."""
    found = _bootstrap_address(address)
    host, port = split_address(found)
    check_listener(host, port)
    _check_head(f"{host}:{port}")
    try:
        ray.init(
            address=f"{host}:{port}",
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_a_member(f"{host}:{port}", _message(error)) from error
    try:
        yield f"{host}:{port}"
    finally:
        ray.shutdown()


def _bootstrap_address(address: str) -> str:
    if address != AUTO:
        return address
    try:
        found = ray._private.services.canonicalize_bootstrap_address(AUTO)
    except ConnectionError:
        found = None
    if found is None:
        raise Unreachable(
            "no Ray cluster runs on this host",
            "",
            "ray start --head here, or ray start --address=HOST:PORT to join one",
        )
    return str(found)


def _check_head(address: str) -> None:
    """Raise Unreachable if no head answers or this host is not in its cluster, ConfigError as `_check_versions`."""
    try:
        head = GcsClient(address=address)
        record = head.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=HEAD_S)
        nodes = head.get_all_node_info(timeout=HEAD_S).values()
    except (ray.exceptions.RpcError, ray.exceptions.RaySystemError) as error:
        raise Unreachable(
            f"no Ray head answers at {address}", _message(error), "give the address that `ray start --head` printed"
        ) from error
    _check_versions(address, record)
    living = (node for node in nodes if node.state == ALIVE)
    name = socket.gethostname()
    if not any(node.node_manager_hostname == name or is_own(node.node_manager_address) for node in living):
        raise _not_a_member(address, "none of its hosts has a name or an address of this one")


def _not_a_member(address: str, why: str) -> Unreachable:
    return Unreachable(
        f"this host is not in the Ray cluster at {address}", why, f"run here: ray start --address={address}"
    )


def _check_versions(address: str, record: bytes | None) -> None:
    """Raise ConfigError if the cluster runs another version of Ray, or another minor version of Python."""
    facts = msgspec.json.decode(record or b"{}", type=dict[str, Any])
    theirs, python = str(facts.get("ray_version", "")), str(facts.get("python_version", ""))
    ours = ".".join(map(str, sys.version_info[:3]))
    if theirs != ray.__version__:
        raise ConfigError(
            f"the cluster at {address} runs Ray {theirs}, and this host has {ray.__version__}",
            "all hosts of a cluster need the same version",
            f"pip install ray=={theirs}" if theirs else "",
        )
    if python.split(".")[:2] != ours.split(".")[:2]:
        raise ConfigError(
            f"the cluster at {address} runs Python {python}, and this host {ours}",
            "all hosts of a cluster need the same minor version",
            f"install mstarctl with Python {python}",
        )


def living_nodes() -> dict[str, dict[str, Any]]:
    """Return Ray's records of all living hosts, by node id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def head_address() -> str:
    """Return the address of the head that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


def this_node() -> str:
    """Return the node id of the host of this process."""
    return str(ray.get_runtime_context().get_node_id())


# -------------------------------------------------------------------------------------------------------------- survey
def survey(call: SurveyCall, address: str) -> ClusterView:
    """Return facts of all living hosts, the local one first. A host that does not answer has a fault."""
    nodes, here = living_nodes(), this_node()
    tasks = {node: _on_node(on_host.read_facts, node, msgspec.to_builtins(call.query)) for node in nodes}
    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=on_host.FACTS_S + HOST_S)
    free = ray._private.state.available_resources_per_node()
    names = _unique_names(nodes, here)
    hosts = [
        _host_facts(node, record, names[node], node == here, _facts_of(tasks[node]), free.get(node, {}))
        for node, record in nodes.items()
    ]
    hosts.sort(key=lambda host: (not host.is_local, host.name))
    return ClusterView(address=address, version=ray.__version__, hosts=tuple(hosts))


def _on_node(function: Any, node: str, *arguments: object) -> Any:
    """Run a function on a host; it takes no room there."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote(*arguments)


def _facts_of(task: Any) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = ray.get(task, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return {"fault": "Ray started no worker process on it in time"}
    except ray.exceptions.TaskUnschedulableError:
        return {"fault": "Ray on it has ended"}
    except ray.exceptions.RayError as error:
        return {"fault": _cause(error)}
    return facts


def _host_facts(
    node: str, record: dict[str, Any], name: str, is_local: bool, facts: dict[str, Any], free: dict[str, float]
) -> HostFacts:
    offered = record["Resources"]
    versions = {"ray": ray.__version__, **facts.pop("versions", {})}  # hosts with another one cannot join the cluster
    return msgspec.convert(
        {
            **facts,
            "name": name,
            "node": node,
            "address": record["NodeManagerAddress"],
            "is_local": is_local,
            "cpus": offered.get("CPU", 0.0),
            "free_cpus": free.get("CPU", 0.0),
            "gpu_count": offered.get("GPU", 0.0),
            "free_gpus": free.get("GPU", 0.0),
            "versions": versions,
        },
        HostFacts,
    )


def _unique_names(nodes: dict[str, dict[str, Any]], here: str) -> dict[str, str]:
    """Return a name of each host: its host name, with a number from the second of that name on."""
    names, seen = {}, Counter[str]()
    for node in sorted(nodes, key=lambda node: (node != here, nodes[node]["NodeManagerAddress"], node)):
        name = nodes[node]["NodeManagerHostname"]
        seen[name] += 1
        names[node] = name if seen[name] == 1 else f"{name}-{seen[name]}"
    return names


def _cause(error: BaseException) -> str:
    """Return the message of an error on a host, without the traceback that Ray adds."""
    cause = getattr(error, "cause", None) or error
    return _message(cause) if isinstance(cause, RuntimeError) else f"{type(cause).__name__}: {_message(cause)}"


# ---------------------------------------------------------------------------------------------------------------- room
class HostRoom:
    """A placement group: room for a bundle on one host. Owned by one call; the group outlives it."""

    def __init__(self, bundle: Bundle, group: PlacementGroup) -> None:
        self.bundle = bundle
        self.group = group

    @property
    def node(self) -> str:
        """Ray's id of the living host where the room is, empty if it has no place."""
        entry = placement_group_table(self.group)
        node = str(entry.get("bundles_to_node_id", {}).get(0, ""))
        return node if entry.get("state") == "CREATED" and node in living_nodes() else ""

    def run(self, function: Any, *arguments: object) -> Any:
        """Run a function in this room, with its GPUs."""
        place = PlacementGroupSchedulingStrategy(self.group, 0)
        options = {"num_cpus": 0, "num_gpus": self.bundle.gpus, "max_retries": 0, "scheduling_strategy": place}
        return ray.remote(function).options(**options).remote(*arguments)

    def close(self) -> None:
        """Give the room back."""
        remove_placement_group(self.group)


def open_room(item: Reservation, bundle: Bundle, *, without: Iterable[str] = ()) -> HostRoom:
    """Ask Ray for room; it has a place later. without: hosts that a bundle without a node must not get."""
    amounts = {"GPU": float(bundle.gpus), "CPU": bundle.cpus}
    resources = {name: amount for name, amount in amounts.items() if amount} or {"memory": 1.0}
    avoided = ",".join(sorted(without))
    selector = {NODE_LABEL: bundle.node or f"!in({avoided})"} if bundle.node or avoided else {}
    group = placement_group(
        [resources],
        strategy="STRICT_PACK",
        name=str(item),
        lifetime="detached",
        bundle_label_selector=[selector] if selector else None,
    )
    return HostRoom(bundle, group)


def reservations(deployment: str) -> dict[Reservation, PlacementGroup]:
    """Return what is reserved for a deployment of this name in the cluster."""
    names = (entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED")
    items = (item for item in map(reservation, names) if item is not None and item.deployment == deployment)
    return {item: get_placement_group(str(item)) for item in items}


def needs(bundle: Bundle) -> str:
    """Return `2 GPUs and 4 cores`."""
    parts = [f"{bundle.gpus} {'GPU' if bundle.gpus == 1 else 'GPUs'}"] if bundle.gpus else []
    parts += [f"{bundle.cpus:g} cores"] if bundle.cpus else []
    return " and ".join(parts) or "room"


def free_room(nodes: Iterable[str]) -> str:
    """Return `node-a: 0 of 2 GPUs and 1 of 8 cores` for each of the hosts."""
    records, free = living_nodes(), ray._private.state.available_resources_per_node()
    return ", ".join(
        f"{record['NodeManagerHostname']} ({record['NodeManagerAddress']}): "
        + " and ".join(
            f"{free.get(node, {}).get(kind, 0):g} of {record['Resources'].get(kind, 0):g} {word}"
            for kind, word in (("GPU", "GPUs"), ("CPU", "cores"))
        )
        for node, record in records.items()
        if node in set(nodes)
    )


# --------------------------------------------------------------------------------------------------------------- start
def start(call: StartCall) -> list[StartedAgent]:
    """Reserve room in each bundle and start agents. Gives back all room after an error."""
    for item, group in reservations(call.order.deployment).items():
        if item.owner == call.owner or item.owner.has_ended():
            remove_placement_group(group)
    rooms: list[HostRoom] = []
    try:
        _reserve(call, rooms)
        return _start_agents(rooms, call.order)
    except BaseException:
        for room in rooms:
            room.close()
        raise


def _reserve(call: StartCall, rooms: list[HostRoom]) -> None:
    """Open a room for each bundle, in their order, and wait until all have a place. Raises StartError."""
    end, here = time.monotonic() + RESERVE_S, this_node()
    for bundle in call.bundles:
        node = bundle.node or ("" if bundle.host else here)
        planned = msgspec.structs.replace(bundle, node=node)
        if not node:
            _wait_for_places(rooms, end)
        item = Reservation(call.order.deployment, call.owner, bundle.host)
        rooms.append(open_room(item, planned, without={here, *(room.node for room in rooms)} - {""}))
    _wait_for_places(rooms, end)


def _wait_for_places(rooms: Sequence[HostRoom], end: float) -> None:
    for room in rooms:
        room.group.wait(max(0.1, end - time.monotonic()))
    missing = [room.bundle for room in rooms if not room.node]
    if not missing:
        return
    nodes = living_nodes()
    gone = [bundle for bundle in missing if bundle.node and bundle.node not in nodes]
    if gone:
        raise StartError(
            f"{_title(gone[0])} has left the Ray cluster", hint="start it again: mstarctl up reads the hosts anew"
        )
    wanted = ", ".join(f"{_title(bundle)} needs {needs(bundle)}" for bundle in missing)
    places = {bundle.node for bundle in missing} if all(bundle.node for bundle in missing) else nodes
    raise StartError(
        f"Ray has no room: {wanted}",
        f"free: {free_room(places)}",
        "end what uses them (ray status), or use fewer GPUs: --gpus N",
    )


def _title(bundle: Bundle) -> str:
    return f"host {bundle.host}" if bundle.host else "this host"


def _start_agents(rooms: Sequence[HostRoom], order: AgentOrder) -> list[StartedAgent]:
    """Start an agent in each room but the local one. Raises StartError that names the host."""
    gpus = _each(rooms, [room.run(on_host.reserved_gpus, room.bundle.gpus) for room in rooms], HOST_S)
    nodes, remote = living_nodes(), [room for room in rooms if room.bundle.host]
    orders = [_order_for(room, order, nodes[room.node]["NodeManagerAddress"]) for room in remote]
    tasks = [
        room.run(on_host.start_agent, msgspec.to_builtins(order)) for room, order in zip(remote, orders, strict=True)
    ]
    records = dict(
        zip([room.bundle.host for room in remote], _each(remote, tasks, on_host.AGENT_S + HOST_S), strict=True)
    )
    local = {"host": "", "address": "", "endpoint": "", "key": "", "pid": 0, "incarnation": order.incarnation}
    return [
        msgspec.convert({**records.get(room.bundle.host, local), "node": room.node, "gpus": found}, StartedAgent)
        for room, found in zip(rooms, gpus, strict=True)
    ]


def _order_for(room: HostRoom, order: AgentOrder, ray_address: str) -> AgentOrder:
    """Return the order for one host, with its address. Raises StartError if it has none in the network."""
    bundle = room.bundle
    address = bundle.address if bundle.address and bundle.node == room.node else ray_address
    if bundle.network and address == ray_address:
        task = _on_node(on_host.read_facts, room.node, {})
        facts = HostFacts(
            name="", node="", address=ray_address, interfaces=_each([room], [task], HOST_S)[0]["interfaces"]
        )
        address = facts.address_in(bundle.network)
        if not address:
            raise StartError(f"{_title(bundle)} has no address in {bundle.network}", hint="see ray.network")
    return msgspec.structs.replace(order, host=bundle.host, address=address)


def _each(rooms: Sequence[HostRoom], tasks: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return the results of tasks, one per room. Raises StartError that names the host of the first that failed."""
    ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout_s) if tasks else None
    results = []
    for room, task in zip(rooms, tasks, strict=True):
        try:
            results.append(ray.get(task, timeout=0))
        except ray.exceptions.GetTimeoutError:
            raise StartError(f"{_title(room.bundle)} did not answer within {timeout_s:.0f} s") from None
        except ray.exceptions.RayError as error:
            raise StartError(
                f"no agent on {_title(room.bundle)}", _cause(error), f"mstarctl hosts --ray {head_address()}"
            ) from error
    return results


# ------------------------------------------------------------------------------------------------------------- replace
def replace(call: ReplaceCall) -> NextAgent:
    """Start the next agent for a bundle: on its host if that lives, else on any that has room."""
    item = Reservation(call.order.deployment, call.owner, call.bundle.host)
    groups = reservations(call.order.deployment)
    others = [HostRoom(call.bundle, group).node for other, group in groups.items() if other != item]
    failed: dict[str, str] = {}
    room = HostRoom(call.bundle, groups[item]) if item in groups else None
    end = time.monotonic() + call.wait_s
    while True:
        if room is not None and not room.node:
            room.close()
            room = None
        if room is None:
            anywhere = msgspec.structs.replace(call.bundle, node="")
            room = open_room(item, anywhere, without={this_node(), *others, *failed} - {""})
            # A host that failed may answer the next call: while no other has room, this one ends soon.
            room.group.wait(ANOTHER_S if failed else max(1.0, end - time.monotonic()))
        if not room.node:
            room.close()
            return NextAgent(waits_for=_waits_for(call.bundle, failed))
        node = room.node
        try:
            return NextAgent(agent=_start_agents([room], call.order)[0])
        except StartError as error:
            say(str(error))
            failed[node] = str(error)
            room.close()
            room = None


def _waits_for(bundle: Bundle, failed: dict[str, str]) -> str:
    waiting = f"waits for a host with {needs(bundle)}"
    return "; ".join((waiting, f"free: {free_room(living_nodes())}", *failed.values()))


# ------------------------------------------------------------------------------------------------------------- release
def release(call: ReleaseCall) -> None:
    """Give back the room of these hosts of a deployment, of all without names, once the caller closes the input."""
    sys.stdin.buffer.read()
    for item, group in reservations(call.deployment).items():
        if item.owner == call.owner and (not call.hosts or item.host in call.hosts):
            remove_placement_group(group)


if __name__ == "__main__":
    main()
