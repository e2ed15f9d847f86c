"""Navigation keys: pure functions from a view and a state to the next state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mstarctl.top.data.spans import end_of
from mstarctl.top.data.view import View
from mstarctl.top.layout.events import matching_events
from mstarctl.top.layout.graph.geometry import graph_of
from mstarctl.top.layout.request_list import Sort, chosen, columns, columns_of, sorts_of
from mstarctl.top.layout.scroll import Window, moved
from mstarctl.top.layout.sessions import latest_request, session_keys
from mstarctl.top.layout.state import State


def request_keys(view: View, state: State) -> list[str]:
    """Return the keys of the table's rows in order."""
    return [key for key, _ in chosen(view, state.sort)]


def event_keys(view: View, state: State) -> list[str]:
    """Return the keys of events that match the filter, in order."""
    return [str(event.n) for event in matching_events(view, state.event_text)]


def node_names(view: View) -> list[str]:
    """Return node names in the graph's order."""
    return [node.name for node in graph_of(view).nodes]


def move(view: View, state: State, by: int) -> State:
    """Move down (or up, if negative) in the list of the page."""
    match state.page:
        case "overview" if state.panel == "ranks":
            return replace(state, rank=_next(view.rank_keys, state.rank, by))
        case "overview" | "requests":
            return replace(state, requests=moved(request_keys(view, state), state.requests, by))
        case "ranks":
            return replace(state, rank=_next(view.rank_keys, state.rank, by))
        case "graph":
            return replace(state, node=_next(node_names(view), state.node, by) or "")
        case "events":
            keys = event_keys(view, state)
            window = state.events if state.events.cursor in keys else Window(cursor=keys[-1] if keys else None)
            return replace(state, events=moved(keys, window, by if window is state.events else min(by + 1, 0)))
        case "logs":
            return replace(state, log_above=max(0, min(state.log_above - by, max(0, len(view.logs) - 1))))
        case "bench":
            keys = [str(item.get("id", "")) for item in view.recordings]
            return replace(state, bench=moved(keys, state.bench, by))
        case "sessions":
            return replace(state, sessions=moved(session_keys(view), state.sessions, by))
    return state


def edge(view: View, state: State, to: int) -> State:
    """Move to the first row (-1) or the last (1). Logs and events follow the last row."""
    if state.page == "logs":
        return replace(state, log_above=0 if to > 0 else len(view.logs))
    if state.page == "events" and to > 0:
        return replace(state, events=Window())
    return move(view, move(view, state, to), to * 1_000_000)


def next_host(view: View, state: State) -> State:
    """Select the first rank of the next host that has one, and after the last host of the first one."""
    keys = view.rank_keys
    now = view.host_of(state.rank) if state.rank in keys else ""
    firsts = {view.host_of(key): key for key in reversed(keys)}
    hosts = [host for host in view.hosts if host in firsts]
    if not hosts:
        return state
    host = hosts[(hosts.index(now) + 1) % len(hosts)] if now in hosts else hosts[0]
    return replace(state, rank=firsts[host], panel="ranks")


def across(view: View, state: State, by: int) -> State:
    """Move left or right: nodes of the graph, ranks, time in a waterfall."""
    if state.page == "request":
        lanes = state.trace.lanes if state.trace is not None else ()
        return replace(state, zoom=state.zoom.moved(end_of(lanes), by * 0.25))
    return move(view, state, by)


def _next(keys: Sequence[str], now: str | None, by: int) -> str | None:
    if not keys:
        return now
    if now not in keys:
        return keys[0] if by > 0 else keys[-1]
    return keys[min(max(keys.index(now) + by, 0), len(keys) - 1)]


def next_sort(view: View, state: State) -> State:
    """Sort by the next column."""
    sorts = sorts_of(view.kinds)
    at = sorts.index(state.sort.key) if state.sort.key in sorts else -1
    return replace(state, sort=Sort(key=sorts[(at + 1) % len(sorts)], is_rising=state.sort.is_rising))


def sort_by(view: View, state: State, name: str) -> State:
    """Sort by the column with that key name, if the model has it; a second time reverses the order."""
    key = next((column.key for column in columns_of(view.kinds) if column.key_name == name), None)
    if key is None:
        return state
    return reverse(state) if key == state.sort.key else replace(state, sort=Sort(key=key))


def reverse(state: State) -> State:
    """Reverse the order."""
    return replace(state, sort=replace(state.sort, is_rising=not state.sort.is_rising))


def sort_at(view: View, state: State, x: int, width: int) -> State:
    """Sort by the clicked column title; a second click reverses the order."""
    shown, _ = columns(view, width)
    at = 1
    for column in shown:
        if at <= x < at + column.width + 2:
            if column.key == state.sort.key:
                return reverse(state)
            return state if column.sort is None else replace(state, sort=Sort(key=column.key))
        at += column.width + 2
    return state


def next_walk(view: View, state: State, by: int) -> State:
    """Highlight the next walk of the graph, and all walks after the last one."""
    names = ["", *(walk.name for walk in graph_of(view).walks)]
    at = names.index(state.walk) if state.walk in names else 0
    return replace(state, walk=names[(at + by) % len(names)])


def next_source(state: State, sources: Sequence[str]) -> State:
    """Show the logs of the next process, and all logs after the last one."""
    names = ["", *sources]
    at = names.index(state.log_source) if state.log_source in names else 0
    return replace(state, log_source=names[(at + 1) % len(names)], log_above=0)


def selected_request(view: View, state: State) -> str | None:
    """Return the key of the selected request, None without one."""
    if state.page == "request":
        return state.request if state.request in view.store.requests else None
    if state.page in ("overview", "requests") and (state.page != "overview" or state.panel == "requests"):
        return state.requests.cursor if state.requests.cursor in view.store.requests else None
    return None


def opened(view: View, state: State) -> State:
    """Open the selected object: the waterfall of a request, the page of a rank or node."""
    match state.page:
        case "overview" if state.panel == "ranks":
            return replace(state, page="ranks", rank=state.rank or next(iter(view.rank_keys), None))
        case "overview" | "requests":
            keys = request_keys(view, state)
            key = selected_request(view, state) or (keys[0] if keys else None)
            if key is None:
                return state
            window = replace(state.requests, cursor=key)
            return replace(state, page="request", request=key, requests=window, trace=None, came_from=state.page)
        case "graph":
            node = next((n for n in view.store.nodes.values() if n.name == state.node), None)
            return state if node is None else replace(state, page="ranks", rank=str(node.rank))
        case "ranks":
            nodes = view.nodes_of(int(state.rank)) if state.rank and state.rank.isdigit() else []
            return replace(state, page="graph", node=nodes[0][1].name if nodes else state.node)
        case "events":
            event = next((e for e in view.store.events if str(e.n) == state.events.cursor), None)
            request_id = str(event.facts.get("request", "")) if event is not None else ""
            key = next((k for k, r in view.store.requests.items() if request_id and request_id in (r.id, k)), None)
            if key is None:
                return state
            return replace(state, page="request", request=key, trace=None, came_from="events")
        case "sessions":
            keys = session_keys(view)
            key = state.sessions.cursor if state.sessions.cursor in keys else next(iter(keys), None)
            newest = None if key is None else latest_request(view, view.store.sessions[key])
            if newest is None:
                return state
            return replace(state, page="request", request=newest, trace=None, came_from="sessions")
    return state


def at_node(view: View, state: State) -> State:
    """Open the graph with the node of the selected request."""
    key = selected_request(view, state)
    node = view.store.requests[key].node if key is not None else None
    return replace(state, page="graph", node=node or state.node)
