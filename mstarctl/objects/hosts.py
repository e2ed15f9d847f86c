"""Hosts of a deployment: data and lines of text for `hosts` and `describe`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mstar_core.observe.frames import LOCAL
from mstarctl.client import Known
from mstarctl.objects.parts import missing
from mstarctl.output import Column, duration_text, size_text
from mstarctl.output.units import counted

COLUMNS: Final[tuple[Column, ...]] = (
    Column("NAME", "shown_name"),
    Column("ADDRESS", "address"),
    Column("STATE", "state"),
    Column("RANKS", "ranks"),
    Column("DEVICES", "devices"),
    Column("CORES", "cores_text", is_right=True),
    Column("MEMORY", "memory", is_right=True),
    Column("NET IN", "net_in", is_right=True),
    Column("NET OUT", "net_out", is_right=True),
    Column("ROUND TRIP", "round_trip", is_right=True),
    Column("VERSION", "version"),
    Column("VERSIONS", "versions_text", is_wide=True),
    Column("AGENT PID", "pid", is_wide=True, is_right=True),
    Column("RAY NODE", "node", is_wide=True),
    Column("NOTE", "reason"),
)
OLD_S: Final = 3.0
"""Age from which the readings of a host are called old."""


def host_of(part: Mapping[str, Any]) -> str:
    """Return the key of the host of a rank, process or GPU."""
    return str(part.get("host") or LOCAL)


def has_several(known: Known) -> bool:
    """Return whether a deployment has hosts besides the supervisor's."""
    return len(known.snapshot.get("hosts", {})) > 1


def host_items(known: Known) -> list[dict[str, Any]]:
    """Return the hosts of a running deployment as data, the supervisor's first."""
    hosts: dict[str, Any] = known.snapshot.get("hosts", {})
    return [_item(known, key, hosts[key]) for key in sorted(hosts, key=lambda key: (key != LOCAL, key))]


def host_item(known: Known, name: str) -> dict[str, Any]:
    """Return a host by its name, host name or address, with its processes. Raises NotFound with the nearest name."""
    items = host_items(known)
    item = next((item for item in items if name in (item["name"], item["title"], item["address"])), None)
    if item is None:
        raise missing("host", name, [item["name"] for item in items], known.name)
    processes = [child for child in known.children if host_of(child) == item["name"]]
    return {**item, "processes": {child["name"]: child for child in processes}}


def _item(known: Known, key: str, host: Mapping[str, Any]) -> dict[str, Any]:
    ranks = [rank for rank in known.ranks if host_of(rank) == key]
    gpus = {name: gpu for name, gpu in known.snapshot.get("gpus", {}).items() if host_of(gpu) == key}
    heard, now = host.get("heard"), known.snapshot.get("t")
    return {
        **host,
        "name": key,
        "title": host.get("title", ""),
        "address": host.get("address", ""),
        "deployment": known.name,
        "state": host.get("state") or "ready",
        "ranks": [rank["rank"] for rank in ranks],
        "devices": list(dict.fromkeys(rank["device"] for rank in ranks)),
        "gpus": gpus,
        "age_s": None if heard is None or now is None else round(max(0.0, now - heard), 3),
    }


def cells(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a host with its cells as text."""
    cores, versions = item.get("cores") or [], item.get("versions") or {}
    is_known = bool(item.get("memory_total"))
    round_trip = item.get("round_trip_ms")
    return {
        **item,
        "shown_name": shown_name(item),
        "cores_text": f"{sum(cores):.1f}/{len(cores)}" if cores else None,
        "memory": memory_text(item) if is_known else None,
        "net_in": f"{size_text(item['net_in_s'])}/s" if is_known else None,
        "net_out": f"{size_text(item['net_out_s'])}/s" if is_known else None,
        "round_trip": None if round_trip is None else f"{round_trip:.2f} ms",
        "version": versions.get("mstarctl"),
        "versions_text": versions_text(versions),
    }


def shown_name(item: Mapping[str, Any]) -> str:
    """Return `node-b`, or `local (node-a)` for the supervisor's host."""
    title = item.get("title")
    return f"{item['name']} ({title})" if title and title != item["name"] else str(item["name"])


def memory_text(item: Mapping[str, Any]) -> str:
    """Return `12.1 GiB of 23.5 GiB`, used and total."""
    return f"{size_text(item['memory_used'])} of {size_text(item['memory_total'])}"


def versions_text(versions: Mapping[str, str]) -> str:
    """Return `mstarctl 0.1.0, ray 2.60.0`."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def host_lines(item: Mapping[str, Any]) -> Iterator[str]:
    """Return a host of a deployment as lines of text."""
    yield f"host {shown_name(item)} of {item['deployment']}  {item['state']}"
    yield from (f"  {name:<11}{text}" for name, text in _facts(item).items() if text)
    if item["gpus"]:
        yield "gpus"
        yield from (_gpu_line(gpu) for gpu in item["gpus"].values())
    if item["processes"]:
        yield "processes"
        yield from (_process_line(child) for child in item["processes"].values())


def _facts(item: Mapping[str, Any]) -> dict[str, str]:
    text, age = cells(item), item.get("age_s")
    is_old = age is not None and age > OLD_S
    incarnation = item.get("incarnation") or 0
    return {
        "reason": str(item.get("reason") or ""),
        "address": str(item.get("address") or ""),
        "agent": f"pid {item['pid']}, life {incarnation}" if item.get("pid") else "",
        "ray node": str(item.get("node") or ""),
        "ranks": " ".join(map(str, item["ranks"])),
        "devices": " ".join(item["devices"]),
        "cores": f"{text['cores_text']} busy" if text["cores_text"] else "",
        "memory": str(text["memory"] or ""),
        "network": f"in {text['net_in']}, out {text['net_out']}" if text["net_in"] else "",
        "round trip": str(text["round_trip"] or ""),
        "readings": f"{duration_text(age)} old" if is_old and age is not None else "",
        "versions": str(text["versions_text"]),
    }


def _gpu_line(gpu: Mapping[str, Any]) -> str:
    used, total = gpu.get("memory_used"), gpu.get("memory_total")
    memory = f"{size_text(used)} of {size_text(total)}" if used is not None and total else ""
    util = f"{100 * gpu['util']:.0f} %" if gpu.get("util") is not None else ""
    ranks = gpu.get("ranks") or []
    held = f"{'rank' if len(ranks) == 1 else 'ranks'} {' '.join(map(str, ranks))}" if ranks else ""
    return f"  {gpu['index']:<3} {'  '.join(part for part in (gpu.get('name'), memory, util, held) if part)}"


def _process_line(child: Mapping[str, Any]) -> str:
    memory = size_text(child["resident_bytes"]) if child.get("resident_bytes") else ""
    restarts = counted(child["restarts"], "restart") if child.get("restarts") else ""
    pid = f"pid {child['pid']}" if child.get("pid") else ""
    return f"  {child['name']:<12} {'  '.join(part for part in (pid, child['state'], memory, restarts) if part)}"
