"""Header of every screen: deployment, state, totals, connection, and the cause of a failure."""

from __future__ import annotations

from typing import Any, Final

from mstar_core.observe.frames import ChildStatus, DeploymentStatus
from mstarctl.output.line import EMPTY, Line, Part, clip, fit, line, over, pair, safe, spread, take
from mstarctl.output.units import age_text, counted, duration_text, size_text
from mstarctl.top.data.pace import answers_at_once, pace
from mstarctl.top.data.view import NORMAL, TINY, View
from mstarctl.top.drawing import numbers
from mstarctl.top.layout.events import role_of

GOOD: Final = frozenset({"ready"})
REALTIME: Final = "realtime"
"""Route of the requests that realtime sessions make."""

BUSY: Final = frozenset({"starting", "draining", "stopping", "sleeping"})
WORN: Final = frozenset({"degraded", "unhealthy", "waiting"})


def state_mark(state: str, view: View) -> Line:
    """Draw a state as glyph, word and colour: `● ready`, `◐ loading`, `▲ unhealthy`, `✕ failed`."""
    glyphs = view.glyphs
    if state == "stopped":
        return line((f"{glyphs.done} {state}", "dim"))
    if state in GOOD:
        return line((f"{glyphs.ready} {state}", "ok"))
    if state in BUSY:
        return line((f"{glyphs.loading} {state}", "accent"))
    if state in WORN:
        return line((f"{glyphs.unwell} {state}", "warn"))
    return line((f"{glyphs.failed} {state or 'unknown'}", "bad"))


def header(view: View, width: int, size: int, dismissed: float = 0.0) -> list[Line]:
    """Draw one to three lines: name and state, further totals, the failure that the deployment suffers from.

    dismissed: time of a failure that is not shown.
    """
    if size == TINY:
        rows = [_tiny(view, width)]
    else:
        rows = [_first(view, width, size), _second(view, width, size, dismissed)]
    cause = failure_line(view, width, dismissed)
    if cause is not None:
        rows.append(cause)
    return [over(fit(row, width), "bar") if index == 0 else fit(row, width) for index, row in enumerate(rows)]


def failure_line(view: View, width: int, dismissed: float = 0.0) -> Line | None:
    """Draw `✕ 22:31:00 worker-1: killed by SIGKILL   log PATH   X dismisses`; None once it is over or dismissed."""
    head = view.store.deployment
    cause = "" if view.link.is_over and view.link.why.startswith("stopped") else cause_of(head)
    time = failure_time(head.cause)
    if not cause or (time and time <= dismissed):
        return None
    mark = view.glyphs.failed if head.state != "ready" else view.glyphs.unwell
    told = line((f" {mark} ", "bad"), (f"{view.clock(time)} " if time else "", "dim"), (cause, "bad"))
    log = safe(str((head.cause or {}).get("log") or ""))
    rest = [line((f"log {log}", "dim")) if log else EMPTY, line(("X dismisses", "hint")) if time else EMPTY]
    room = width - told.width - 4
    return fit(
        told + line("   ") + take([part for part in rest if part.spans], room, "   ") if room > 0 else told, width
    )


def failure_time(record: dict[str, Any] | None) -> float:
    """Return the time of a failure in seconds since the epoch, 0 if it is unknown."""
    time = (record or {}).get("time")
    return float(time) if isinstance(time, int | float) else 0.0


def newest_failure(view: View) -> float:
    """Return the time of the newest failure on the screen: of the header, or of an event."""
    head = view.store.deployment
    told = [event.time for event in view.store.events if role_of(event.type) == "bad"]
    return max(failure_time(head.cause), failure_time(head.last_failure), *told, 0.0)


def cause_of(head: DeploymentStatus) -> str:
    """Return the cause of a bad state in one line; empty if all is well."""
    record: dict[str, Any] = head.cause or {}
    if not record:
        return safe(head.reason) if head.state not in GOOD | BUSY else ""
    kind, message = record.get("kind") or record.get("class") or "", record.get("message") or record.get("reason") or ""
    where = (
        record.get("child")
        or record.get("name")
        or (f"rank {record['rank']}" if record.get("rank") is not None else "")
    )
    return safe(": ".join(str(word) for word in (where, kind, str(message).split("\n")[0]) if word))


def link_mark(view: View) -> Line:
    """Draw the state of the connection, at the right of the first line."""
    link, glyphs = view.link, view.glyphs
    recording = line((f"{glyphs.record} rec ", "bad")) if link.is_recording else EMPTY
    match link.state:
        case "paused" if link.progress is not None:
            return line((f"{glyphs.pause} paused at {numbers.percent(link.progress)} of the recording", "warn"))
        case "paused":
            back = f" {numbers.age(link.back_s)} back" if link.back_s > 0.05 else ""
            return recording + line((f"{glyphs.pause} paused{back}, {counted(link.behind, 'update')} behind", "warn"))
        case "stale":
            return recording + line((f"{glyphs.stale} stale: {safe(link.why)}", "bad"))
        case "connecting":
            return line((f"{glyphs.loading} connecting", "accent"))
        case "ended":
            return recording + line((f"{glyphs.stale} {safe(link.why) or 'ended'}", "warn"))
        case "replay":
            done = "" if link.progress is None else f" {numbers.percent(link.progress)}"
            return line((f"{glyphs.live} replay{done} x{link.speed:g}", "accent"))
    return recording + line((f"{glyphs.live} live {link.hz:g} Hz", "dim"))


def _first(view: View, width: int, size: int) -> Line:
    head = view.store.deployment
    age = duration_text(view.t - head.started) if head.started and size >= NORMAL else ""
    state = view.link.why.partition(":")[0] if view.link.is_over else head.state
    name = line(" ", (safe(head.name) or "no deployment yet", "strong"), " ", state_mark(state, view))
    share = f" {100 * head.done // head.total} %" if head.total else ""
    phase = f" {safe(head.phase)}{share}" if head.phase and head.state in ("starting", "sleeping") else ""
    if head.asleep and not phase:
        what = "" if head.state == "sleeping" else f"{', '.join(map(safe, head.asleep))} asleep, "
        phase = f" {what}level {head.sleep_level}, {size_text(head.given_back_bytes)} free"
    name = name + line((phase, "accent"), (f" {age}" if age else "", "dim"))
    end = link_mark(view) + line(" ")
    gap = "   " if size >= NORMAL else "  "
    room = width - end.width - len(gap)
    return spread(take([name, *_sums(view, size)], room, gap), end, width)


def _sums(view: View, size: int) -> list[Line]:
    head = view.store.deployment
    wide = size >= NORMAL
    load = line(
        (str(head.running), "strong"),
        (" run  " if wide else " run ", "dim"),
        (str(head.waiting), "warn" if head.waiting else "value"),
        (" queued", "dim"),
    )
    p50, p99 = numbers.whole_ms(head.ttft_p50_ms), numbers.whole_ms(head.ttft_p99_ms)
    is_whole = answers_at_once(view.kinds)
    name = "latency" if is_whole else "TTFT"
    if wide:
        ttft = line((f"{name} p50 ", "dim"), (p50, "value"), (" p99 ", "dim"), (p99, "value"), (" ms", "dim"))
    else:
        ttft = line((f"{name} ", "dim"), (f"{p50}/{p99}", "value"), (" ms", "dim"))
    if wide and head.sessions:
        load = load + line((f"  {head.sessions}", "value"), (" sessions" if head.sessions > 1 else " session", "dim"))
    sums = [load, ttft, *(_loop(view) if is_whole else [])]
    if head.tokens_s:
        sums.append(line(("tokens " if wide else "", "dim"), (numbers.rate(head.tokens_s), "value"), (" tok/s", "dim")))
    if head.audio_x:
        sums.append(line(("audio " if wide else "", "dim"), (f"{head.audio_x:.1f}x", "value")))
    if not (head.tokens_s or head.audio_x or is_whole):  # idle, or a model of actions or latents
        sums.append(line(("answers " if wide else "", "dim"), (numbers.rate(head.requests_s), "value"), ("/s", "dim")))
    if wide:
        sums.append(pair("err", str(head.failed), "bad" if head.failed else "value"))
    return sums


def _loop(view: View) -> list[Line]:
    """Draw the rate of answers, and the ticks that the clients' control loops missed in the requests shown."""
    readings = [line((f"{view.store.deployment.requests_s:.1f}", "value"), (" Hz", "dim"))]
    requests = view.store.requests.values()
    if not requests:
        return readings
    loop = pace(requests, view.t)
    if not loop.ticks:
        return [*readings, line(("period unknown", "dim"))]
    role = "warn" if loop.missed else "value"
    return [*readings, line(("missed ", "dim"), (f"{loop.missed} of {loop.ticks}", role))]


def _speed(head: DeploymentStatus) -> str:
    """Format the throughput: tokens, seconds of audio or answers, the first that is not zero."""
    if head.tokens_s:
        return f"{numbers.rate(head.tokens_s)}t/s"
    return f"{head.audio_x:.1f}x" if head.audio_x else f"{numbers.rate(head.requests_s)}/s"


def _second(view: View, width: int, size: int, dismissed: float) -> Line:
    head = view.store.deployment
    pages = f"{head.pages_used}/{head.pages_total}" if head.pages_total else numbers.NONE
    common = [
        pair("preempted", str(head.preempted), "warn" if head.preempted else "value"),
        pair("restarts", str(head.restarts), "warn" if head.restarts else "value"),
    ]
    hosts = _hosts(view)
    is_short = not all(view.is_reached(host) for host in view.hosts)
    if size < NORMAL:
        parts = [
            pair("pages", pages),
            pair("err", str(head.failed), "bad" if head.failed else "value"),
            *_realtime(view),
            *common,
            *hosts,
        ]
        return line(" ") + take(parts, width - 2, "   ")
    parts = [
        *(hosts if is_short else []),
        _core(view, "api"),
        _core(view, "conductor"),
        pair("admission", f"{head.running}/{head.slots}" if head.slots else numbers.NONE),
        pair("pages", pages),
        *common,
        *_realtime(view),
        *([] if is_short else hosts),
    ]
    last = failure_time(head.last_failure)
    if last > dismissed and not head.cause:
        parts.append(pair("last failure", view.clock(last), "warn"))
    if head.refused:
        parts.append(pair("refused", str(head.refused), "warn"))
    span = view.history.span_s
    end = line((f"{age_text(span)} of history " if span else "no history ", "faint"))
    return spread(line(" ") + take(parts, width - end.width - 2, "   "), end, width)


def _realtime(view: View) -> list[Line]:
    """Draw the realtime sessions with their running requests, their interrupts, and the pages that sessions lease."""
    head = view.store.deployment
    parts = [pair("leased", counted(head.pages_leased, "page"))] if head.pages_leased else []
    if not (head.realtime_sessions or head.realtime_interrupts):
        return parts
    running = sum(request.route == REALTIME and request.state == "run" for request in view.store.requests.values())
    work = line((f" ({counted(running, 'request')})", "dim")) if running else EMPTY
    sessions = pair("realtime", str(head.realtime_sessions)) + work
    return [sessions, pair("interrupts", str(head.realtime_interrupts)), *parts]


def _hosts(view: View) -> list[Line]:
    """Draw the number of hosts, or `hosts 1/2` while an agent does not report."""
    reached = sum(view.is_reached(host) for host in view.hosts)
    if reached < len(view.hosts):
        return [pair("hosts", f"{reached}/{len(view.hosts)}", "bad")]
    return [pair("hosts", str(reached))] if reached else []


def _core(view: View, name: str) -> Line:
    child: ChildStatus | None = view.store.children.get(name)
    return EMPTY if child is None or child.core is None else pair(name, numbers.percent(child.core), unit="core")


def _tiny(view: View, width: int) -> Line:
    head = view.store.deployment
    end = _tiny_end(view)
    mark = state_mark(view.link.why.partition(":")[0] if view.link.is_over else head.state, view).spans[0]
    glyph: Part = (mark.text.split(" ")[0], mark.role)
    load = line((f"{head.running}/{head.waiting}", "value"))
    parts = [
        line(" ", (clip(safe(head.name), 14), "strong"), " ", glyph, " ", load),
        line(("TTFT ", "dim"), (numbers.whole_ms(head.ttft_p50_ms), "value")),
        line((_speed(head), "value")),
    ]
    return spread(take(parts, width - end.width - 1, "  "), end, width)


def _tiny_end(view: View) -> Line:
    if view.link.state in ("live", "connecting"):
        return line(" ")
    return line((clip(view.link.state, 7), "warn"), " ")
