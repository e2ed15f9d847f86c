"""Quotas of tenants: counters of UTC minutes and days in the store, with reservations. Used inside its transactions.

Windows are fixed, so that an error can say when a quota is renewed. Tokens and audio are known at the end of a request:
an estimate is reserved at its admission and replaced by what its deployment reports.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import Overloaded
from mstar_core.gateway.tenants.accounts.terms import Terms

MINUTE_S: Final = 60
DAY_S: Final = 86_400
REQUESTS: Final = "requests"
TOKENS: Final = "tokens"
AUDIO: Final = "audio"
"""Names of counters."""

CONCURRENCY_RETRY_S: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """State of one quota. used: what is reserved included. resets_s: seconds until it is renewed."""

    limit: float
    used: float
    resets_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Amounts that a request has reserved, and the quotas after it, by name."""

    tokens: float = 0.0
    audio_s: float = 0.0
    left: tuple[tuple[str, Left], ...] = ()


def day_of(now: float) -> int:
    """Return the number of a UTC day since 1970-01-01."""
    return int(now // DAY_S)


def reserve(
    db: sqlite3.Connection, terms: Terms, now: float, *, tokens: float | None = None, audio_s: float | None = None
) -> Reserved:
    """Count a request and reserve its estimates. Raises Overloaded, before any change, for a quota without room.

    tokens, audio_s: None for a request that uses none, which is admitted if that quota is used up. An estimate above a
    whole limit is lowered to it. The caller checks the concurrency.
    """
    tokens = _within(tokens, terms.tokens_per_day)
    audio_s = _within(audio_s, terms.audio_seconds_per_day)
    minute, day = int(now // MINUTE_S), day_of(now)
    wanted = (
        (REQUESTS, terms.requests_per_minute, minute, MINUTE_S, 1.0),
        (TOKENS, terms.tokens_per_day, day, DAY_S, tokens),
        (AUDIO, terms.audio_seconds_per_day, day, DAY_S, audio_s),
    )
    left = []
    for quota, limit, window, window_s, amount in wanted:
        if limit is None or amount is None:
            continue
        used = _used(db, terms.name, quota, window)
        state = Left(limit=limit, used=used + amount, resets_s=(window + 1) * window_s - now)
        # A tenant whose last request took more than it had reserved waits, and so does one whose limit is used up.
        if used + amount > limit or used >= limit:
            raise over(terms.name, quota, Left(limit=limit, used=used, resets_s=state.resets_s), amount)
        left.append((quota, state))
    for quota, limit, window, _, amount in wanted:
        if limit is not None and amount is not None:
            add(
                db,
                terms.name,
                quota,
                window,
                used=amount if quota == REQUESTS else 0.0,
                reserved=0.0 if quota == REQUESTS else amount,
            )
    return Reserved(tokens=tokens or 0.0, audio_s=audio_s or 0.0, left=tuple(left))


def _within(estimate: float | None, limit: float | None) -> float | None:
    return None if estimate is None or limit is None else min(estimate, limit)


def add(
    db: sqlite3.Connection, tenant: str, quota: str, window: int, *, used: float = 0.0, reserved: float = 0.0
) -> None:
    """Add to a counter."""
    db.execute(
        "INSERT INTO counters VALUES (?, ?, ?, ?, ?) ON CONFLICT (tenant, quota, window) DO UPDATE"
        " SET used = used + excluded.used, reserved = max(0, reserved + excluded.reserved)",
        (tenant, quota, window, used, reserved),
    )


def uncount(db: sqlite3.Connection, tenant: str, admitted: float) -> None:
    """Take a request that was never forwarded out of its minute."""
    db.execute(
        "UPDATE counters SET used = used - 1 WHERE tenant = ? AND quota = ? AND window = ?",
        (tenant, REQUESTS, int(admitted // MINUTE_S)),
    )


def forget_before(db: sqlite3.Connection, now: float) -> None:
    """Delete counters of windows that are over. The last day stays, for requests that began in it."""
    db.execute("DELETE FROM counters WHERE quota = ? AND window < ?", (REQUESTS, int(now // MINUTE_S) - 1))
    db.execute("DELETE FROM counters WHERE quota != ? AND window < ?", (REQUESTS, day_of(now) - 1))


def _used(db: sqlite3.Connection, tenant: str, quota: str, window: int) -> float:
    row = db.execute(
        "SELECT used + reserved FROM counters WHERE tenant = ? AND quota = ? AND window = ?", (tenant, quota, window)
    ).fetchone()
    return float(row[0]) if row else 0.0


UNITS: Final = {REQUESTS: "requests per minute", TOKENS: "tokens per day", AUDIO: "seconds of audio per day"}


def over(tenant: str, quota: str, left: Left, amount: float) -> Overloaded:
    """Return the error of a quota that is used up, with the time of its renewal."""
    room = max(0.0, left.limit - left.used)
    title = f"tenant {tenant!r} has used {left.used:g} of its {left.limit:g} {UNITS[quota]}"
    if quota != REQUESTS and room:
        title += f", and this request may need {amount:g}"
    retry_s = max(1, int(-(-left.resets_s // 1)))
    when = "minute" if quota == REQUESTS else "UTC day"
    return Overloaded(
        title,
        hint=f"the quota is renewed with the next {when}, in {retry_s} s",
        code="quota_reached",
        quota=UNITS[quota].replace(" ", "_"),
        limit=left.limit,
        used=left.used,
        retry_after_s=retry_s,
        headers=headers_of([(quota, left)]),
    )


def over_concurrency(terms: Terms, running: int) -> Overloaded:
    """Return the error of a tenant whose requests that run or wait have reached its limit."""
    return Overloaded(
        f"tenant {terms.name!r} has {running} requests that run or wait, as many as it may",
        hint="wait until one of them has ended",
        code="quota_reached",
        quota="concurrency",
        limit=terms.concurrency,
        used=running,
        retry_after_s=CONCURRENCY_RETRY_S,
    )


def headers_of(left: list[tuple[str, Left]] | tuple[tuple[str, Left], ...]) -> dict[str, str]:
    """Return the `x-ratelimit-*` headers of quotas. Source: OpenAI's API reference, "Rate limits in headers"."""
    headers = {}
    for quota, state in left:
        headers[f"x-ratelimit-limit-{quota}"] = f"{state.limit:g}"
        headers[f"x-ratelimit-remaining-{quota}"] = f"{max(0.0, state.limit - state.used):g}"
        headers[f"x-ratelimit-reset-{quota}"] = f"{state.resets_s:.3f}s"
    return headers
