"""`mstarctl describe`: everything known of one deployment, rank or node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.run_dir import find
from mstar_core.errors import NotFound, Unreachable, UsageError, did_you_mean
from mstarctl.client import Known, find_known
from mstarctl.client.log_lines import place_of_last_error
from mstarctl.output import Printer, age_text, duration_text, size_text

KINDS = ("deployment", "rank", "node")


def describe(
    ctx: typer.Context,
    what: Annotated[str, typer.Argument(metavar="KIND/NAME", help="deployment/NAME, rank/N or node/NODE")],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[DEPLOYMENT]", help="whose rank or node; may be left out when only one runs"),
    ] = None,
) -> None:
    """Show everything known of one object."""
    printer = Printer.of(ctx)
    kind, slash, of = what.partition("/")
    if kind not in KINDS:
        raise UsageError(f"cannot describe {kind!r}", hint=did_you_mean(kind, KINDS))
    if not slash or not of:
        raise UsageError(f"{what!r} is no KIND/NAME", hint="such as deployment/orpheus, rank/0 or node/LLM")
    match kind:
        case "deployment":
            known = find_known(of)
            printer.item("deployment", deployment_item(known), list(deployment_lines(known)))
        case "rank":
            item = rank_item(_running(name), of)
            printer.item("rank", item, list(part_lines(f"rank {of}", item)))
        case _:
            item = node_item(_running(name), of)
            printer.item("node", item, list(part_lines(f"node {of}", item)))


def _running(name: str | None) -> Known:
    known = find_known(find(name).name)
    if not known.snapshot:
        raise Unreachable(
            f"deployment {known.name!r} does not answer",
            f"pid {known.pid}",
            f"mstarctl logs {known.name} --from supervisor",
        )
    return known


def deployment_item(known: Known) -> dict[str, Any]:
    """A deployment as data: what its supervisor says, or how it ended."""
    if known.is_running:
        return {
            "name": known.name,
            "state": known.state,
            "pid": known.pid,
            **known.head,
            **_transfer(known),
            "children": known.children,
            "values": known.snapshot.get("values", {}),
        }
    return {
        **known.outcome,
        "name": known.name,
        "state": known.state,
        "log_dir": None if known.log_dir is None else str(known.log_dir),
    }


def _transfer(known: Known) -> dict[str, Any]:
    try:
        spec = DeploymentSpec.load(known.run.spec)
    except (OSError, ValueError):
        return {}
    return {"transport": spec.transport, "folder": spec.folder, "run_dir": spec.run_dir, "command": list(spec.argv)}


def deployment_lines(known: Known) -> Iterator[str]:
    """A deployment for people."""
    item = deployment_item(known)
    yield f"{known.name}  {known.state}" + (f"  {age_text(item['age_s'])}" if item.get("age_s") is not None else "")
    if item.get("reason"):
        yield f"  reason    {item['reason']}"
    weights = item.get("weights")
    yield (
        f"  model     {item.get('model')}"
        + (f"  weights: {weights}" if weights else "")
        + (f" ({item['folder']})" if item.get("folder") else "")
    )
    if known.is_running:
        yield f"  endpoint  {item.get('endpoint')}"
        yield f"  config    {item.get('config')}"
        ready = "not yet" if item.get("ready_s") is None else f"after {duration_text(item['ready_s'])}"
        yield f"  ready     {ready}   restarts {item.get('restarts')}"
        yield f"  tensors   {item.get('transport')}"
        yield f"  run dir   {item.get('run_dir')}"
    yield f"  logs      {item.get('log_dir')}"
    if known.is_running:
        yield "processes"
        yield f"  {'supervisor':<12} pid {known.pid}"
        yield from (
            f"  {c['name']:<12} pid {c['pid']}  {c['state']}  life {c['incarnation']}  {_phases(c)}".rstrip()
            for c in known.children
        )
    yield from _cause_lines(known)


def _phases(child: dict[str, Any]) -> str:
    return ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in child["phases_s"].items())


def _cause_lines(known: Known) -> Iterator[str]:
    cause = known.cause
    if cause is None:
        return
    yield "last cause"
    yield f"  {cause.get('name')}: {cause.get('message')}"
    for key in ("detail", "hint"):
        if cause.get(key):
            yield f"  {cause[key]}"
    yield from (f"  followed by {line}" for line in known.outcome.get("followed_by", []))
    if cause.get("log"):
        from pathlib import Path

        yield f"  log: {place_of_last_error(Path(str(cause['log'])))}"


def rank_item(known: Known, number: str) -> dict[str, Any]:
    """One rank: device, nodes, process, memory, counters. Raises NotFound."""
    ranks = {str(rank["rank"]): rank for rank in known.snapshot["ranks"]}
    if number not in ranks:
        raise NotFound(
            f"no rank {number!r} in {known.name}", hint=did_you_mean(number, ranks), kind="rank", name=number
        )
    child = next((c for c in known.children if c["name"] == f"worker-{number}"), {})
    prefix = f"worker-{number}."
    process = {key: child.get(key) for key in ("state", "pid", "incarnation", "phase", "phases_s", "facts")}
    return {
        "name": number,
        "deployment": known.name,
        **ranks[number],
        **process,
        "resident_bytes": resident_bytes(child.get("pid")),
        "values": _values(known, prefix),
    }


def node_item(known: Known, node: str) -> dict[str, Any]:
    """One node on every rank that holds it. Raises NotFound with the nearest name."""
    ranks = [rank for rank in known.snapshot["ranks"] if node in rank["nodes"]]
    if not ranks:
        names = {name for rank in known.snapshot["ranks"] for name in rank["nodes"]}
        raise NotFound(f"no node {node!r} in {known.name}", hint=did_you_mean(node, names), kind="node", name=node)
    values = {f"rank {rank['rank']}": _values(known, f"worker-{rank['rank']}.{node}.") for rank in ranks}
    return {
        "name": node,
        "deployment": known.name,
        "ranks": [rank["rank"] for rank in ranks],
        "devices": [rank["device"] for rank in ranks],
        "values": values,
    }


def _values(known: Known, prefix: str) -> dict[str, float]:
    values: dict[str, float] = known.snapshot.get("values", {})
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def part_lines(title: str, item: dict[str, Any]) -> Iterator[str]:
    """A rank or a node for people."""
    yield f"{title} of {item['deployment']}"
    for key, value in item.items():
        if key in ("name", "deployment", "rank") or value in (None, "", {}, []):
            continue
        if not isinstance(value, dict):
            yield f"  {key:<14} {_plain(key, value)}"
            continue
        yield f"  {key}"
        yield from (f"    {name:<26} {_number(part)}" for name, part in sorted(value.items()))


def _plain(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return size_text(value)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_number(part)}" for name, part in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def resident_bytes(pid: int | None) -> int | None:
    """Resident memory of a process of this host; None when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            import resource

            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None
