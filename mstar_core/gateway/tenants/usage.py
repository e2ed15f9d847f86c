"""Usage totals of the store, summed by tenant, model, day or key. Read by `mstarctl usage`, with nothing running."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError
from mstar_core.gateway.tenants.figures import COLUMNS
from mstar_core.gateway.tenants.quotas import day_of
from mstar_core.gateway.tenants.store import columns_of, read_only

GROUPS: Final = ("tenant", "model", "day", "key")
SUMS: Final = ("requests", "errors", "refused", "unknown", *COLUMNS)
"""Names of the totals. refused: by a quota or a full queue, not in `requests`. unknown: their deployment died before it
reported them."""

EPOCH: Final = date(1970, 1, 1)


def usage(
    folder: Path,
    *,
    by: Sequence[str] = ("tenant", "model"),
    tenant: str | None = None,
    model: str | None = None,
    since: date | None = None,
    until: date | None = None,
) -> list[dict[str, Any]]:
    """Return the totals of the UTC days from `since` to `until`, both included, by groups in their order.

    by: of `GROUPS`. Each item has the names of its groups, its totals, and `running`, the requests that run now.
    Raises ConfigError if the store cannot be read.
    """
    db = read_only(folder)
    if db is None:
        return []
    try:
        return _usage(db, by, {"tenant": tenant, "model": model}, (_number(since), _number(until)))
    except sqlite3.Error as error:
        raise ConfigError("the usage file cannot be read", str(error), "is it that of another version?") from error
    finally:
        db.close()


def today() -> date:
    """Return the current UTC day."""
    return EPOCH + timedelta(days=day_of(datetime.now(UTC).timestamp()))


def _usage(
    db: sqlite3.Connection, by: Sequence[str], only: Mapping[str, str | None], days: tuple[int | None, int | None]
) -> list[dict[str, Any]]:
    chosen = [group for group in by if group in GROUPS]
    tests: dict[str, str | int] = {f"{name} = ?": value for name, value in only.items() if value is not None}
    tests |= {test: value for test, value in zip(("day >= ?", "day <= ?"), days, strict=True) if value is not None}
    where = f" WHERE {' AND '.join(tests)}" if tests else ""
    ending = f" GROUP BY {', '.join(chosen)}" if chosen else ""
    present = columns_of(db, "usage")
    sums = ", ".join(f"coalesce(sum({name}), 0)" if name in present else "0" for name in SUMS)
    is_used = " + ".join(f"sum({name})" for name in ("requests", "refused") if name in present)
    rows = db.execute(
        f"SELECT {', '.join([*chosen, sums])} FROM usage{where}{ending} HAVING {is_used} > 0"
        f"{' ORDER BY ' + ', '.join(chosen) if chosen else ''}",
        tuple(tests.values()),
    ).fetchall()
    running = f"SELECT {', '.join([*chosen, 'count(*)'])} FROM journal{where}"
    running += f"{' AND' if where else ' WHERE'} closed IS NULL{ending}"
    now = {tuple(row[:-1]): row[-1] for row in db.execute(running, tuple(tests.values()))}
    return [_item(chosen, row, now.get(tuple(row[: len(chosen)]), 0)) for row in rows]


def _item(chosen: Sequence[str], row: Sequence[Any], running: int) -> dict[str, Any]:
    item: dict[str, Any] = dict(zip((*chosen, *SUMS), row, strict=True))
    if "day" in item:
        item["day"] = (EPOCH + timedelta(days=item["day"])).isoformat()
    return {**item, "running": running}


def _number(day: date | None) -> int | None:
    return None if day is None else (day - EPOCH).days
