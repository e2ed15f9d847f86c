"""Parts of a deployment in `describe`: a rank, a node, a GPU, a request, a session; as data and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mstar_core.errors import NotFound, did_you_mean
from mstar_core.host.gpu_locks import gpu_holders
from mstar_core.host.hardware.gpus import gpus
from mstarctl.client import Known
from mstarctl.output import duration_text, size_text
from mstarctl.output.moments import MOMENTS, time_of_day
from mstarctl.output.table import escape
from mstarctl.output.units import counted

PROCESS: Final = ("state", "pid", "incarnation", "restarts", "phase", "phases_s", "facts")
UNSAID: Final = ("id", "handle")
SECONDS: Final = ("age_s", "audio_s", "ahead_s", "lease_left_s")


def rank_item(known: Known, number: str) -> dict[str, Any]:
    """Return a rank: device, nodes, process, memory, readings. Raises NotFound."""
    ranks = known.snapshot["ranks"]
    if number not in ranks:
        raise missing("rank", number, ranks, known.name)
    process = "worker" if ranks[number].get("nodes") else "follower"
    child = next((child for child in known.children if child["name"] == f"{process}-{number}"), {})
    return {
        "name": number,
        "deployment": known.name,
        **ranks[number],
        **{key: child.get(key) for key in PROCESS},
        "node_states": {node["name"]: node for node in known.snapshot["nodes"].values() if str(node["rank"]) == number},
        "values": _values(known, f"{process}-{number}."),
    }


def node_item(known: Known, name: str) -> dict[str, Any]:
    """Return a node on every rank that runs it, with its edges. Raises NotFound with the nearest name."""
    placed = [rank for rank in known.ranks if name in rank["nodes"]]
    if not placed:
        raise missing("node", name, {node for rank in known.ranks for node in rank["nodes"]}, known.name)
    nodes = [node for node in known.snapshot["nodes"].values() if node["name"] == name]
    edges = [edge for edge in known.snapshot["edges"].values() if name in (edge["source"], edge["into"])]
    return {
        "name": name,
        "deployment": known.name,
        "ranks": [rank["rank"] for rank in placed],
        "devices": [rank["device"] for rank in placed],
        "replicas": {f"rank {node['rank']}": node for node in nodes},
        "edges": {f"{edge['name']} {edge['source'] or 'in'} > {edge['into'] or 'out'}": edge for edge in edges},
        "values": {f"rank {rank['rank']}": _values(known, f"worker-{rank['rank']}.{name}.") for rank in placed},
    }


def session_item(known: Known, session_id: str) -> dict[str, Any]:
    """Return a session: its speaker, counts and lease. Raises NotFound."""
    sessions = {session["id"]: session for session in known.snapshot["sessions"].values()}
    if session_id not in sessions:
        raise missing("session", session_id, sessions, known.name)
    session, now = sessions[session_id], known.snapshot["t"]
    ends = session["lease_ends"]
    moments = {
        "age_s": round(now - session["began"], 3),
        "lease_left_s": None if ends is None else round(ends - now, 3),
    }
    facts = {key: value for key, value in session.items() if key not in ("id", "began", "lease_ends")}
    return {"name": session_id, "deployment": known.name, **facts, **moments}


def gpu_item(known: Known | None, index: str) -> dict[str, Any]:
    """Return a GPU of the host: readings, and the deployment that has locked it. Raises NotFound."""
    items: dict[str, dict[str, Any]] = dict(known.snapshot["gpus"]) if known is not None else {}
    is_here = known is None or known.run is not None
    for number, gpu in enumerate([] if items or not is_here else gpus()):
        used = gpu.total - gpu.free
        items[str(number)] = {
            "index": number,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "memory_used": used,
            "memory_total": gpu.total,
        }
    if not items:
        raise _no_gpus(known, index, is_here=is_here)
    if index not in items:
        raise missing("gpu", index, items, "this host" if known is None else known.name)
    gpu_facts = items[index]
    is_remote = bool(gpu_facts.get("host"))  # locks are files of that host
    holders = [] if is_remote else gpu_holders(str(gpu_facts.get("uuid") or f"nvidia{index}"))
    holder = next(iter(holders), None)
    return {
        **gpu_facts,
        "name": index,
        "product": gpu_facts.get("name"),
        "shares": {each.name: each.held_bytes for each in holders if each.held_bytes is not None},
        "held_by": None if holder is None else {"pid": holder.pid, "deployment": holder.name, "user": holder.user},
    }


def _no_gpus(known: Known | None, index: str, *, is_here: bool) -> NotFound:
    """Return the error for a host without GPUs, with the devices of the ranks."""
    causes = ["the driver of this host reports no GPU"] if is_here else []
    hints = ["mstarctl doctor checks for GPUs"] if is_here else []
    if known is not None and known.ranks:
        causes.insert(0, "it runs " + ", ".join(f"rank {rank['rank']} on {rank['device']}" for rank in known.ranks))
        hints.insert(0, f"mstarctl describe rank/{known.ranks[0]['rank']}")
    where = "this host" if known is None else known.name
    return NotFound(f"no gpu {index!r} in {where}", "; ".join(causes), "; ".join(hints), kind="gpu", name=index)


def missing(kind: str, name: str, known: Any, where: str) -> NotFound:
    """Return the error for an unknown part; the hint gives the nearest as KIND/NAME."""
    hint = did_you_mean(name, known) if known else ""
    if hint.startswith("did you mean"):
        hint = hint.replace("did you mean '", f"did you mean '{kind}/", 1)
    return NotFound(f"no {kind} {name!r} in {where}", hint=hint, kind=kind, name=name)


def _values(known: Known, prefix: str) -> dict[str, float]:
    values: dict[str, float] = known.snapshot.get("values", {})
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def request_lines(item: dict[str, Any]) -> Iterator[str]:
    """Return a request as lines of text: its own name, times of day, no number that only programs need."""
    times = {key: time_of_day(item.get(key)) for key in MOMENTS}
    facts = {key: value for key, value in item.items() if key not in UNSAID and value not in (0, 0.0)}
    if "action" in item.get("outputs", ()) and not item.get("period_ms"):
        facts["period"] = "unknown, the client does not name it"
    yield from part_lines(f"request {item['name']} of {item['deployment']}", {**facts, **times})


def part_lines(title: str, item: dict[str, Any], *, is_wide: bool = True) -> Iterator[str]:
    """Return a part as lines of text, with units; empty values are omitted. is_wide: raw counters too."""
    yield title
    for key, value in item.items():
        if key in ("name", "deployment", "rank") or value in (None, "", {}, []):
            continue
        if key == "values" and not is_wide:
            many = sum(len(part) if isinstance(part, dict) else 1 for part in value.values())
            yield f"  {key:<16} {counted(many, 'counter')}, shown with -o wide"
            continue
        if not isinstance(value, dict):
            yield f"  {label(key, value):<16} {shown(key, value)}"
            continue
        yield f"  {key}"
        for name, part in sorted(value.items()):
            if key == "phases_s":
                yield f"    {name:<26} {duration_text(part)}"
            elif isinstance(part, dict):
                facts = [labelled(word, fact) for word, fact in part.items() if _says(word, fact, name)]
                yield f"    {name:<26} {'  '.join(facts)}".rstrip()
            else:
                yield f"    {label(name, part):<26} {shown(name, part)}"


def _says(word: str, fact: Any, title: str) -> bool:
    return fact not in (None, "", {}, [], 0, 0.0, False) and word not in ("name", "rank") and str(fact) != title


def labelled(key: str, value: Any) -> str:
    """Format a field as its label and its value."""
    return f"{label(key, value)} {shown(key, value)}"


def label(key: str, value: Any) -> str:
    """Return the name of a field without the unit that its value is printed with: `ttft` for `ttft_ms`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return key
    if key in SECONDS or key.endswith("bytes_s"):
        return key.removesuffix("_s")
    return key.removesuffix("_ms").removesuffix("_bytes")


def shown(key: str, value: Any) -> str:
    """Format a value with its unit, which the name of its field implies."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(key, value)
    if isinstance(value, list):
        return " ".join(escape(str(part)) for part in value)
    if isinstance(value, dict):
        return "  ".join(labelled(name, part) for name, part in value.items())
    return escape(str(value))


def _number(key: str, value: float) -> str:
    if key.endswith("_bytes") or key in ("memory_used", "memory_total", "bytes"):
        return size_text(value)
    if key.endswith("_ms"):
        return f"{value:g} ms"
    if key.endswith("bytes_s"):
        return f"{size_text(value)}/s"
    if key in SECONDS:
        return duration_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
