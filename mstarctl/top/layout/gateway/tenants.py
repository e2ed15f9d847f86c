"""Screen "tenants" of a gateway: load of each tenant, and what it has used of its quotas. Pure functions."""

from __future__ import annotations

from mstar_core.gateway.parts import TenantStanding
from mstarctl.output.line import Line, fit, left, line, right, safe
from mstarctl.top.data.gateway import GatewayView
from mstarctl.top.drawing import numbers
from mstarctl.top.layout.gateway.frame import TENANTS, framed

FULL = 0.9
"""Used share of a quota from which it is shown as a warning."""


def tenants_screen(gateway: GatewayView, width: int, height: int, notice: str = "") -> list[Line]:
    """Draw exactly `height` lines of `width` cells."""
    return framed(gateway, tenant_rows(gateway, width), TENANTS, width, height, notice)


def tenant_rows(gateway: GatewayView, width: int) -> list[Line]:
    """Draw a table of tenants, with the use of the UTC day beside its quotas."""
    wide = max(8, min(28, max((len(tenant.name) for tenant in gateway.tenants), default=4)) + 2)
    head = f"  {left('TENANT', wide)}{right('RUN', 9)}{right('REQ/min', 12)}{right('TOKENS TODAY', 18)}"
    rows = [fit(line((f"{head}{right('AUDIO s TODAY', 18)}{right('REFUSED', 9)}", "head")), width)]
    rows += [fit(_tenant_row(tenant, wide), width) for tenant in gateway.tenants]
    if not gateway.tenants:
        rows.append(fit(line(("  no tenant; add one with: mstarctl tenants add NAME", "dim")), width))
    return rows


def _tenant_row(tenant: TenantStanding, wide: int) -> Line:
    return line(
        (f"  {left(safe(tenant.name), wide)}", "strong"),
        _cell(tenant.running, tenant.concurrency, 9),
        _cell(tenant.requests_minute, tenant.requests_per_minute, 12),
        _cell(tenant.tokens, tenant.tokens_per_day, 18),
        _cell(tenant.audio_s, tenant.audio_seconds_per_day, 18),
        (right(numbers.count(tenant.refused), 9), "warn" if tenant.refused else "dim"),
    )


def _cell(used: float, limit: float | None, wide: int) -> tuple[str, str]:
    """Return what is used of a limit: `12/600`; a nearly used-up limit is a warning."""
    share = numbers.part(used, limit)
    text = short(used) if limit is None else f"{short(used)}/{short(limit)}"
    return right(text, wide), "warn" if share is not None and share >= FULL else "value"


def short(value: float) -> str:
    """Format a count with at most four digits: `0`, `812`, `12.4k`, `5.0M`."""
    if value < 9_999.5:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 999_950 else f"{value / 1_000_000:.1f}M"
