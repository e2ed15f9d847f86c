"""Screen of a host: its deployments to choose from, GPUs with their holders, free memory. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mstarctl.objects.host import HostFacts, host_line
from mstarctl.output.line import Line, clip, fit, left, line, over, right, safe, take, window
from mstarctl.output.units import age_text, size_text
from mstarctl.top.data.host import HostDeployment, HostView
from mstarctl.top.data.view import View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import bar
from mstarctl.top.layout.header import state_mark

KEYS: Final = "123456789"
HINTS: Final = (("↑↓ enter", "open"), ("1-9", "open"), ("q", "quit"))
LEAST_BAR: Final = 8


def host_screen(host: HostView, view: View, chosen: int, width: int, height: int, notice: str = "") -> list[Line]:
    """Draw exactly `height` lines of `width` cells. chosen: number of the selected deployment. view: its glyphs."""
    title = host_line(host.host) if host.host is not None else "deployments"
    rows = [over(fit(line((f" {safe(title)}", "strong")), width), "bar"), line()]
    rows += deployment_rows(host.deployments, view, chosen, width)
    if host.host is not None and host.host.gpus:
        rows += [line(), *gpu_rows(host.host, view, width)]
    hints = line(" ") + take((line((key, "key"), (f" {label}", "hint")) for key, label in HINTS), width - 2)
    end = fit(line((f" {safe(notice)}", "bad")) if notice else hints, width)
    return [*window(rows, height - 1, width), end]


def deployment_rows(deployments: Sequence[HostDeployment], view: View, chosen: int, width: int) -> list[Line]:
    """Draw a table of deployments, each with its key."""
    wide = min(28, max((len(item.name) for item in deployments), default=4)) + 2
    head = line(("    ", ""), (left("DEPLOYMENT", max(wide, 12)), "head"), (left("STATE", 13), "head"))
    rows = [fit(head + line((" RUN/QUEUED  TTFT p50   SPEED          AGE", "head")), width)]
    for at, item in enumerate(deployments):
        key = KEYS[at] if at < len(KEYS) else " "
        mark = state_mark(item.state, view)
        row = line(
            (f" {view.glyphs.cursor if at == chosen else ' '}", "accent"),
            (f"{key} ", "key"),
            (left(safe(item.name), max(wide, 12)), "strong"),
            fit(mark, 13),
            (f" {_load(item.facts):>10}", "value"),
            (f"  {_ttft(item.facts):>8}", ""),
            (f"   {left(speed(item.facts), 12)}", "value"),
            (right(_age(item.facts), 6), "dim"),
            (f"  {safe(str(item.facts.get('model') or ''))}", "dim"),
        )
        row = fit(row, width)
        rows.append(over(row, "selected") if at == chosen else row)
    return (
        rows
        if deployments
        else [fit(line(("  no deployment is running; start one with: mstarctl up MODEL", "dim")), width)]
    )


def _load(facts: Mapping[str, Any]) -> str:
    return numbers.NONE if facts.get("running") is None else f"{facts['running']}/{facts.get('waiting') or 0}"


def _ttft(facts: Mapping[str, Any]) -> str:
    value = facts.get("ttft_p50_ms")
    return numbers.NONE if value is None else f"{value:.0f} ms"


def _age(facts: Mapping[str, Any]) -> str:
    return age_text(float(facts["age_s"])) if facts.get("age_s") is not None else numbers.NONE


def speed(facts: Mapping[str, Any]) -> str:
    """Format the throughput of a deployment: audio, tokens or answers, the first that is not zero."""
    if facts.get("audio_x"):
        return f"audio {facts['audio_x']:.1f}x"
    if facts.get("tokens_s"):
        return f"{numbers.rate(facts['tokens_s'])} tok/s"
    return f"{numbers.rate(facts['requests_s'])}/s" if facts.get("requests_s") else numbers.NONE


def gpu_rows(host: HostFacts, view: View, width: int) -> list[Line]:
    """Draw a line per GPU: product, used memory, holder."""
    wide = min(26, max(len(gpu.product) for gpu in host.gpus)) + 2
    room = max(LEAST_BAR, min(24, width - wide - 48))
    rows = [fit(line((left("  GPU", 7), "head"), (left("PRODUCT", wide), "head"), ("MEMORY USED", "head")), width)]
    for gpu in host.gpus:
        used = gpu.total - gpu.free
        share = numbers.part(used, gpu.total)
        holder = line((f"  {safe(gpu.user)}", "value")) if gpu.user else line(("  free", "ok"))
        rows.append(
            fit(
                line((f"  {gpu.index:<5}", "strong"), (left(clip(safe(gpu.product), wide - 2), wide), ""))
                + bar(share, room, view.glyphs)
                + line((f" {size_text(gpu.free)} free of {size_text(gpu.total)}", "dim"))
                + holder,
                width,
            )
        )
    return rows
