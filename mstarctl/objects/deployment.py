"""A deployment in `describe`, running or ended: state, placement, processes, directories, last cause."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mstar_core.config.deployment import DeploymentSpec, Plan
from mstarctl.client import Known
from mstarctl.client.log_lines import place_of_last_error
from mstarctl.objects.hosts import has_several, host_items, host_of, shown_name
from mstarctl.output import age_text, duration_text, size_text
from mstarctl.output.units import counted


def deployment_item(known: Known) -> dict[str, Any]:
    """Return a deployment as data: its supervisor's snapshot, or its outcome."""
    if not known.is_running:
        log_dir = None if known.log_dir is None else str(known.log_dir)
        return {**known.outcome, "name": known.name, "state": known.state, "log_dir": log_dir}
    return {
        "name": known.name,
        "state": known.state,
        "pid": known.pid,
        **known.head,
        **_recorded(known),
        "placement": known.ranks,
        "hosts": host_items(known),
        "links": links(known),
        "children": known.children,
        "values": known.snapshot.get("values", {}),
    }


def _recorded(known: Known) -> dict[str, Any]:
    """Return the facts of its run directory; none on another host."""
    if known.run is None:
        return {}
    try:
        spec = DeploymentSpec.load(known.run.spec)
    except (OSError, ValueError):
        return {}
    return {
        "folder": spec.folder,
        "run_dir": spec.run_dir,
        "socket": str(known.run.admin_socket),
        "command": list(spec.argv),
        "gpus": spec.gpus,
        "nodes": places(spec.plan),
    }


def places(plan: Plan) -> dict[str, str]:
    """Return where each node runs: `rank 0 for prefill; rank 1 for decode`, `rank 0 or 1`, `ranks 0+1` for a group."""
    by_node: dict[str, list[str]] = {}
    for placement in plan.placements:
        replicas = " or ".join("+".join(map(str, ranks)) for ranks in placement.replicas)
        word = "ranks" if placement.tp_size > 1 else "rank"
        walks = f" for {', '.join(placement.walks)}" if placement.walks else ""
        by_node.setdefault(placement.node, []).append(f"{word} {replicas}{walks}")
    return {node: "; ".join(places) for node, places in by_node.items()}


def links(known: Known) -> list[dict[str, Any]]:
    """Return the edges between different ranks, moves of caches included: totals since the start, and current rates."""
    edges = known.snapshot.get("edges", {}).values()
    return [edge for edge in edges if edge.get("source_rank", 0) != edge.get("into_rank", 0)]


def deployment_lines(known: Known) -> Iterator[str]:
    """Return a deployment as lines of text."""
    item = deployment_item(known)
    yield f"{known.name}  {known.state}" + (f"  {age_text(item['age_s'])}" if item.get("age_s") is not None else "")
    if item.get("reason"):
        yield f"  reason    {item['reason']}"
    weights, folder = item.get("weights"), item.get("folder")
    yield (
        f"  model     {item.get('model')}"
        + (f"  weights: {weights}" if weights else "")
        + (f" ({folder})" if folder else "")
    )
    if known.is_running:
        yield from _running_lines(item)
    yield f"  logs      {item.get('log_dir')}"
    if known.is_running:
        if has_several(known):
            yield "hosts"
            width = max(len(shown_name(host)) for host in item["hosts"])
            yield from (_host_line(host, width) for host in item["hosts"])
        yield "ranks"
        yield from (_rank_line(known, rank) for rank in known.ranks)
        if item.get("nodes"):
            yield "nodes"
            yield from (f"  {node:<12} {where}" for node, where in item["nodes"].items())
        if item["links"]:
            yield "links"
            yield from (_link_line(known, edge) for edge in item["links"])
        yield "processes"
        yield f"  {'supervisor':<12} pid {known.pid}"
        yield from (_process_line(child) for child in known.children)
    yield from cause_lines(known)


def _host_line(host: Mapping[str, Any], width: int) -> str:
    """Return `node-b  10.0.0.2  lost  ranks 1 2  silent for 10 s`."""
    ranks = f"{'rank' if len(host['ranks']) == 1 else 'ranks'} {' '.join(map(str, host['ranks']))}"
    words = [host["address"], host["state"], ranks if host["ranks"] else "", host.get("reason") or ""]
    return f"  {shown_name(host):<{width}}  {'  '.join(word for word in words if word)}"


def _rank_line(known: Known, rank: Mapping[str, Any]) -> str:
    """Return `0   cuda:0   LLM`, with several hosts `0   node-b cuda:0   LLM`."""
    width = max(len(host_of(other)) for other in known.ranks)
    host = f"{host_of(rank):<{width}} " if has_several(known) else ""
    return f"  {rank['rank']:<3} {host}{rank['device']:<8} {held_text(rank)}{_group_text(rank)}"


def held_text(rank: Mapping[str, Any]) -> str:
    """Return the nodes of a rank, with a mark at those of which it computes a share: `LLM (share)`."""
    return " ".join([*rank["nodes"], *(f"{node} (share)" for node in rank.get("follows", ()))])


def _group_text(rank: Mapping[str, Any]) -> str:
    """Return the tensor-parallel group of a rank: `  group 0 1, epoch 2`; empty without one."""
    if not rank.get("group"):
        return ""
    return f"  group {' '.join(map(str, rank['group']))}, epoch {rank.get('epoch', 0)}"


def _link_line(known: Known, edge: Mapping[str, Any]) -> str:
    """Return `0 > 1  LLM cache  4 transfers, 73 KiB; now 0.9/s, 16 KiB/s, 1.1 ms each`, then hosts if they differ."""
    where = f"{edge.get('source_rank', 0)} > {edge.get('into_rank', 0)}"
    totals = f"{counted(edge.get('items', 0), 'transfer')}, {size_text(edge.get('bytes', 0))}"
    rates = [f"{edge.get('items_s', 0.0):.1f}/s", f"{size_text(int(edge.get('bytes_s', 0.0)))}/s"]
    if edge.get("transfer_ms") is not None:
        rates.append(f"{edge['transfer_ms']:.1f} ms each")
    hosts = {rank["rank"]: host_of(rank) for rank in known.ranks}
    source, into = (hosts.get(edge.get(f"{end}_rank", 0), "") for end in ("source", "into"))
    across = f"; from {source} to {into}" if source != into else ""
    return f"  {where:<12} {edge['name']}  {totals}; now {', '.join(rates)}{across}"


def _running_lines(item: dict[str, Any]) -> Iterator[str]:
    yield f"  endpoint  {item.get('endpoint')}"
    yield f"  config    {item.get('config')}"
    ready = "not yet" if item.get("ready_s") is None else f"after {duration_text(item['ready_s'])}"
    yield f"  ready     {ready}   restarts {item.get('restarts')}"
    yield (
        f"  requests  {item.get('running')} running, {item.get('waiting')} queued; {item.get('finished')} finished, "
        + (f"{item.get('failed')} failed, {item.get('cancelled')} cancelled, {item.get('refused')} refused")
    )
    if item.get("pages_total"):
        pages = f"{item['pages_used']} of {item['pages_total']} in use"
        yield f"  pages     {pages}; {counted(item['preempted'], 'preemption')}"
    if item.get("realtime_sessions") or item.get("sessions"):
        realtime, interrupts = counted(item["realtime_sessions"], "realtime session"), item["realtime_interrupts"]
        leased = counted(item["pages_leased"], "leased page")
        yield f"  sessions  {item['sessions']}; {realtime}, {counted(interrupts, 'interrupt')}, {leased}"
    if item.get("transport"):
        yield f"  tensors   {item['transport']}"
    for line in item.get("unused", []):
        yield f"  unused    {line}"
    if item.get("run_dir"):
        yield f"  run dir   {item['run_dir']}"


def _process_line(child: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in child["phases_s"].items())
    memory = size_text(child["resident_bytes"]) if child.get("resident_bytes") else ""
    host = f"on {child['host']}" if child.get("host") else ""
    name = f"{child['name']:<12} pid {child['pid']}"
    words = [name, child["state"], host, f"life {child['incarnation']}", memory, phases]
    return f"  {'  '.join(word for word in words if word)}"


def cause_lines(known: Known) -> Iterator[str]:
    """Return the lines of the cause of its state, or else of the last failure, if there is one."""
    cause = known.cause or known.last_failure
    if cause is None:
        return
    when = f", {age_text(time.time() - cause['time'])} ago" if cause.get("time") else ""
    yield f"{'cause' if known.cause else 'last failure'}{when}"
    yield f"  {cause.get('name')}: {cause.get('message')}"
    for key in ("detail", "hint"):
        if cause.get(key):
            yield f"  {cause[key]}"
    yield from (f"  followed by {line}" for line in known.outcome.get("followed_by", []))
    if cause.get("log"):
        yield f"  log: {place_of_last_error(Path(str(cause['log'])))}"
