"""Screen "models" of a gateway: state, load and wakes of each model, memory of each device, and tenants. Pure."""

from __future__ import annotations

from typing import Final

from mstarctl.output.line import Line, fit, left, line, right, safe
from mstarctl.output.units import size_text
from mstarctl.top.data.gateway import GatewayModel, GatewayView
from mstarctl.top.data.view import View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import bar
from mstarctl.top.layout.gateway.frame import MODELS, framed
from mstarctl.top.layout.gateway.tenants import tenant_rows

ROLES: Final = {
    "ready": "ok",
    "idle": "ok",
    "loading": "warn",
    "sleeping": "dim",
    "absent": "dim",
    "failed": "bad",
}
LEAST_BAR: Final = 8


def models_screen(gateway: GatewayView, view: View, width: int, height: int, notice: str = "") -> list[Line]:
    """Draw exactly `height` lines of `width` cells. view: its glyphs."""
    rows = model_rows(gateway, width)
    if gateway.devices:
        rows += [line(), *device_rows(gateway, view, width)]
    if gateway.tenants:
        rows += [line(), *tenant_rows(gateway, width)]
    return framed(gateway, rows, MODELS, width, height, notice)


def model_rows(gateway: GatewayView, width: int) -> list[Line]:
    """Draw a table of models; below a model that waits, loads or has failed, the reason."""
    wide = min(28, max((len(model.name) for model in gateway.models), default=4)) + 2
    wide = max(wide, 8)
    head = line((f"  {left('MODEL', wide)}{left('STATE', 10)}", "head"))
    rows = [fit(head + line(("REPLICAS  RUN/QUEUED  WAKES     MEMORY", "head")), width)]
    for model in gateway.models:
        rows.append(fit(_model_row(model, wide), width))
        if model.hosts:
            rows.append(fit(line((f"    on {safe(model.hosts)}", "dim")), width))
        if note := model.reason or model.progress or model.caution:
            role = "bad" if model.state == "failed" else "warn"
            rows.append(fit(line(("    ", ""), (safe(note), role)), width))
    if not gateway.models:
        rows.append(fit(line(("  no model; add one with: mstarctl serve add NAME TARGET", "dim")), width))
    return rows


def _model_row(model: GatewayModel, wide: int) -> Line:
    memory = size_text(sum(model.held.values())) if model.held else numbers.NONE
    return line(
        (f"  {left(safe(model.name), wide)}", "strong"),
        (left(model.state, 10), ROLES.get(model.state, "")),
        (right(str(model.replicas), 8), "value"),
        (right(f"{model.running}/{model.queued}", 12), "value"),
        (right(str(model.wakes), 7), "value"),
        (right(memory, 11), "value"),
    )


def device_rows(gateway: GatewayView, view: View, width: int) -> list[Line]:
    """Draw a bar per device with the models that hold its memory, the largest first."""
    room = max(LEAST_BAR, min(24, width - 56))
    rows = [fit(line((left("  DEVICE", 12), "head"), ("MEMORY HELD", "head")), width)]
    for device, total in gateway.devices.items():
        holders = sorted(
            ((model.held[device], model.name) for model in gateway.models if model.held.get(device)), reverse=True
        )
        held = sum(size for size, _ in holders)
        parts = ", ".join(f"{name} {size_text(size)}" for size, name in holders) or "free"
        rows.append(
            fit(
                line((f"  {left(safe(device), 10)}", "strong"))
                + bar(numbers.part(held, total), room, view.glyphs)
                + line((f" {size_text(total - held)} free of {size_text(total)}  ", "dim"), (safe(parts), "value")),
                width,
            )
        )
    return rows
