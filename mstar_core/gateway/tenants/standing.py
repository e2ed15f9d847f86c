"""Standing of tenants at one moment: what they use now and today, beside their quotas. Read by the admin socket."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mstar_core.gateway.parts import TenantStanding
from mstar_core.gateway.tenants.accounts.terms import ANONYMOUS, Terms
from mstar_core.gateway.tenants.quotas import AUDIO, MINUTE_S, TOKENS, day_of
from mstar_core.gateway.tenants.store import read_only

TODAY: Final = (
    "SELECT tenant, sum(requests), sum(refused), sum(input_tokens + output_tokens), sum(audio_in_s + audio_out_s)"
    " FROM usage WHERE day = ? GROUP BY tenant"
)


def read_standings(folder: Path, tenants: Mapping[str, Terms], now: float) -> list[TenantStanding]:
    """Return the standing of each tenant, and of requests without one if there were any today, by name.

    The figures are those of all gateways of the user. Raises ConfigError and sqlite3.Error if the store cannot be read.
    """
    db = read_only(folder)
    if db is None:
        return [_standing(tenants[name], {}, {}, 0, 0) for name in sorted(tenants)]
    try:
        return _standings(db, tenants, now)
    finally:
        db.close()


def _standings(db: sqlite3.Connection, tenants: Mapping[str, Terms], now: float) -> list[TenantStanding]:
    day = day_of(now)
    today = {row[0]: row[1:] for row in db.execute(TODAY, (day,))}
    charged = {
        (tenant, quota): used
        for tenant, quota, used in db.execute("SELECT tenant, quota, used FROM counters WHERE window = ?", (day,))
    }
    running = _counts(db, "closed IS NULL")
    recent = _counts(db, "admitted > ?", now - MINUTE_S)
    known = dict(tenants)
    if ANONYMOUS in today or ANONYMOUS in running:
        known.setdefault(ANONYMOUS, Terms(name=ANONYMOUS))
    return [
        _standing(
            known[name],
            dict(zip(("requests", "refused", "tokens", "audio_s"), today.get(name, (0, 0, 0, 0.0)), strict=True)),
            {quota: charged.get((name, quota), 0.0) for quota in (TOKENS, AUDIO)},
            running.get(name, 0),
            recent.get(name, 0),
        )
        for name in sorted(known)
    ]


def _counts(db: sqlite3.Connection, test: str, *values: float) -> dict[str, int]:
    return dict(db.execute(f"SELECT tenant, count(*) FROM journal WHERE {test} GROUP BY tenant", values).fetchall())


def _standing(
    terms: Terms, today: Mapping[str, Any], charged: Mapping[str, float], running: int, recent: int
) -> TenantStanding:
    """Return one standing. A quota counts from the moment at which it was set, other totals count the whole day."""
    tokens, audio_s = today.get("tokens", 0), today.get("audio_s", 0.0)
    return TenantStanding(
        name=terms.name,
        running=running,
        concurrency=terms.concurrency,
        requests_minute=recent,
        requests_per_minute=terms.requests_per_minute,
        tokens=int(tokens if terms.tokens_per_day is None else charged.get(TOKENS, 0.0)),
        tokens_per_day=terms.tokens_per_day,
        audio_s=audio_s if terms.audio_seconds_per_day is None else charged.get(AUDIO, 0.0),
        audio_seconds_per_day=terms.audio_seconds_per_day,
        requests=today.get("requests", 0),
        refused=today.get("refused", 0),
    )
