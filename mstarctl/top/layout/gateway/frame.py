"""Frame of the screens of a gateway: the first line with its name and load, and the last one with keys or a notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mstarctl.output.line import Line, fit, line, over, safe, take, window
from mstarctl.output.units import age_text, counted
from mstarctl.top.data.gateway import GatewayView

MODELS: Final = (("t", "tenants"), ("q", "quit"))
TENANTS: Final = (("t", "models"), ("q", "quit"))
"""Keys that the screens name."""


def framed(
    gateway: GatewayView, rows: Sequence[Line], keys: Sequence[tuple[str, str]], width: int, height: int, notice: str
) -> list[Line]:
    """Return exactly `height` lines of `width` cells around the rows of a screen."""
    first = over(fit(line((f" {safe(title(gateway))}", "strong")), width), "bar")
    hints = line(" ") + take((line((key, "key"), (f" {label}", "hint")) for key, label in keys), width - 2)
    last = fit(line((f" {safe(notice)}", "bad")) if notice else hints, width)
    return [*window([first, line(), *rows], height - 1, width), last]


def title(gateway: GatewayView) -> str:
    """Return the first line: name, address, state, load and age."""
    facts = gateway.facts
    parts = [
        f"gateway {gateway.name}",
        str(facts.get("endpoint") or ""),
        str(facts.get("state") or ""),
        counted(len(gateway.models), "model"),
        f"{facts.get('running') or 0} running, {facts.get('waiting') or 0} waiting",
        age_text(float(facts.get("age_s") or 0.0)),
    ]
    return "  ".join(part for part in parts if part)
