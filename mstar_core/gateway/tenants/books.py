"""Journal and books of requests: operations of the store, each a whole transaction or part of one.

A request is written down when it is admitted, and booked by the reports of its deployment. A report is booked by its
difference to the last report of the same id, so reading reports twice changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.gateway.tenants import quotas
from mstar_core.gateway.tenants.accounts.terms import Terms
from mstar_core.gateway.tenants.figures import COLUMNS, Figures, UsageReport
from mstar_core.gateway.tenants.quotas import AUDIO, TOKENS, Reserved

KEPT_S: Final = 7 * 86_400.0
"""Time for which the journal keeps booked requests. Later reports about them are ignored."""

CLIENT_LEFT: Final = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request that is to be admitted. gateway: of this process. tokens, audio_s: estimates to reserve.

    audio_s: None for a route that is not of sound, whose answer may be spoken all the same.
    """

    request: str
    gateway: str
    terms: Terms
    key: str
    model: str
    route: str
    tokens: float
    audio_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsettledRequest:
    """A closed request of which no report has come. status: that the client saw, None if the gateway died before."""

    number: int
    request: str
    deployment: str
    admitted: float
    closed: float
    status: int | None

    @property
    def is_elsewhere(self) -> bool:
        """Whether its deployment has an address in place of a name, and no admin socket that can be asked."""
        return "://" in self.deployment

    @property
    def is_refused(self) -> bool:
        """Whether its deployment may have refused it, and then has no report of it."""
        return self.status is not None and self.status >= 400 and self.status != CLIENT_LEFT


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the journal."""

    tenant: str
    key: str
    model: str
    day: int
    admitted: float
    state: str
    closed: float | None
    status: int | None
    tokens_held: float
    audio_held: float

    @property
    def place(self) -> tuple[int, str, str, str]:
        """The key of its usage."""
        return self.day, self.tenant, self.key, self.model


def admit(db: sqlite3.Connection, entry: Entry, now: float) -> tuple[int, Reserved]:
    """Reserve the quotas of a request and write it down. Returns its number in the journal. Raises Overloaded."""
    terms = entry.terms
    if terms.concurrency is not None:
        running = running_of(db, terms.name)
        if running >= terms.concurrency:
            raise quotas.over_concurrency(terms, running)
    day = quotas.day_of(now)
    audio_s = entry.audio_s
    if audio_s is None and terms.audio_seconds_per_day is not None and _speaks(db, entry, day):
        audio_s = 0.0
    reserved = quotas.reserve(db, terms, now, tokens=entry.tokens, audio_s=audio_s)
    number = db.execute(
        "INSERT INTO journal (request, gateway, tenant, key, model, route, day, admitted, tokens_held, audio_held)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            entry.request,
            entry.gateway,
            terms.name,
            entry.key,
            entry.model,
            entry.route,
            day,
            now,
            reserved.tokens,
            reserved.audio_s,
        ),
    ).lastrowid
    assert number is not None
    _count(db, (day, terms.name, entry.key, entry.model), requests=1)
    return number, reserved


def refuse(db: sqlite3.Connection, entry: Entry, now: float) -> None:
    """Count a request that a quota or a full queue has refused."""
    _count(db, (quotas.day_of(now), entry.terms.name, entry.key, entry.model), refused=1)


def _speaks(db: sqlite3.Connection, entry: Entry, day: int) -> bool:
    """Return whether a model has heard or made sound for a tenant today, so that any request to it may do so again."""
    row = db.execute(
        "SELECT 1 FROM usage WHERE day = ? AND tenant = ? AND model = ? AND audio_in_s + audio_out_s > 0 LIMIT 1",
        (day, entry.terms.name, entry.model),
    ).fetchone()
    return row is not None


def running_of(db: sqlite3.Connection, tenant: str) -> int:
    """Return how many requests of a tenant run or wait, in all gateways."""
    return int(db.execute("SELECT count(*) FROM journal WHERE tenant = ? AND closed IS NULL", (tenant,)).fetchone()[0])


def undo(db: sqlite3.Connection, number: int) -> None:
    """Remove a request that was never forwarded, with all that it reserved."""
    row = _row(db, number)
    if row is None:
        return
    _release(db, number)
    quotas.uncount(db, row.tenant, row.admitted)
    _count(db, row.place, requests=-1)
    db.execute("DELETE FROM journal WHERE number = ?", (number,))


def forward(db: sqlite3.Connection, number: int, deployment: str) -> None:
    """Note the deployment that will report a request."""
    db.execute("UPDATE journal SET deployment = ? WHERE number = ?", (deployment, number))


def close(db: sqlite3.Connection, number: int, status: int | None, now: float) -> None:
    """Note that a request has ended for its client: it no longer counts as running. It is settled by `settle`."""
    db.execute("UPDATE journal SET closed = ?, status = ? WHERE number = ? AND closed IS NULL", (now, status, number))
    if db.execute("SELECT 1 FROM reports WHERE number = ? LIMIT 1", (number,)).fetchone():
        settle(db, number)


def close_lost(db: sqlite3.Connection, living: Collection[str], now: float) -> int:
    """Close the requests of gateways that have died, so that they hold no concurrency. Returns how many."""
    gateways = {row[0] for row in db.execute("SELECT DISTINCT gateway FROM journal WHERE closed IS NULL")}
    closed = 0
    for gateway in gateways - set(living):
        closed += db.execute(
            "UPDATE journal SET closed = ? WHERE closed IS NULL AND gateway = ?", (now, gateway)
        ).rowcount
    return closed


def book(db: sqlite3.Connection, reports: Iterable[UsageReport]) -> int:
    """Book reports about requests of the journal, and ignore all others. Returns how many changed the books."""
    changed = 0
    for report in reports:
        number = _number_of(db, report)
        if number is not None:
            changed += _book(db, number, report)
    return changed


def book_answer(db: sqlite3.Connection, number: int, figures: Figures) -> None:
    """Book the usage that the answer of a deployment elsewhere names, by its difference to the last call."""
    _book(db, number, UsageReport(id=f"answer/{number}", request="", deployment="", figures=figures))


def _number_of(db: sqlite3.Connection, report: UsageReport) -> int | None:
    """Return the journal entry of a new report: the oldest of its id that waits for one, else the newest.

    A client may use an id again once its request has ended. None for a request that did not come through a gateway.
    """
    row = db.execute(
        "SELECT number, state = 'running' AND NOT EXISTS (SELECT 1 FROM reports r WHERE r.number = j.number) AS waits"
        " FROM journal j WHERE request = ? AND deployment IN ('', ?)"
        " ORDER BY waits DESC, CASE WHEN waits THEN number ELSE -number END LIMIT 1",
        (report.request, report.deployment),
    ).fetchone()
    return None if row is None else int(row[0])


def _book(db: sqlite3.Connection, number: int, report: UsageReport) -> bool:
    names = ", ".join(COLUMNS)
    known = db.execute(f"SELECT number, {names} FROM reports WHERE report = ?", (report.id,)).fetchone()
    before = Figures() if known is None else Figures(**dict(zip(COLUMNS, known[1:], strict=True)))
    if known is not None:
        number = known[0]  # a client may use an id again, and its first request is then reported again
        if before == report.figures:
            return False
    marks = ", ".join("?" * (2 + len(COLUMNS)))
    db.execute(
        f"INSERT OR REPLACE INTO reports (report, number, {names}) VALUES ({marks})",
        (report.id, number, *report.figures.values()),
    )
    row = _row(db, number)
    if row is None:
        return False
    more = report.figures.minus(before)
    _count(db, row.place, **dict(zip(COLUMNS, more.values(), strict=True)))
    # What was reserved becomes what was used.
    tokens, audio = (row.tenant, TOKENS, row.day), (row.tenant, AUDIO, row.day)
    _settle_quota(db, number, tokens, "tokens_held", held=row.tokens_held, used=more.tokens)
    _settle_quota(db, number, audio, "audio_held", held=row.audio_held, used=more.audio_s)
    if row.state == "unknown":
        db.execute("UPDATE journal SET state = 'booked' WHERE number = ?", (number,))
        _count(db, row.place, unknown=-1)
    elif row.state == "running" and row.closed is not None:
        settle(db, number)
    return True


def _settle_quota(
    db: sqlite3.Connection, number: int, counter: tuple[str, str, int], column: str, *, held: float, used: float
) -> None:
    if not used and not held:
        return
    freed = min(held, max(0.0, used))
    quotas.add(db, *counter, used=used, reserved=-freed)
    db.execute(f"UPDATE journal SET {column} = {column} - ? WHERE number = ?", (freed, number))


def settle(db: sqlite3.Connection, number: int, *, is_unknown: bool = False) -> None:
    """End a closed request: free what it still reserves, and count an error or an unknown usage."""
    row = _row(db, number)
    if row is None or row.state != "running":
        return
    is_error = row.status is not None and row.status >= 400 and row.status != CLIENT_LEFT
    _release(db, number)
    db.execute("UPDATE journal SET state = ? WHERE number = ?", ("unknown" if is_unknown else "booked", number))
    _count(db, row.place, errors=int(is_error), unknown=int(is_unknown))


def unsettled(db: sqlite3.Connection, closed_before: float) -> Sequence[UnsettledRequest]:
    """Return requests that were closed before a time and are not settled."""
    rows = db.execute(
        "SELECT number, request, deployment, admitted, closed, status FROM journal"
        " WHERE state = 'running' AND closed < ? ORDER BY number",
        (closed_before,),
    )
    names = ("number", "request", "deployment", "admitted", "closed", "status")
    return [UnsettledRequest(**dict(zip(names, row, strict=True))) for row in rows]


def forget(db: sqlite3.Connection, now: float) -> None:
    """Delete what is no longer needed: old counters, and settled requests with their reports. The totals stay."""
    quotas.forget_before(db, now)
    old = "SELECT number FROM journal WHERE state != 'running' AND closed < ?"
    db.execute(f"DELETE FROM reports WHERE number IN ({old})", (now - KEPT_S,))
    db.execute("DELETE FROM journal WHERE state != 'running' AND closed < ?", (now - KEPT_S,))


def _row(db: sqlite3.Connection, number: int) -> _Row | None:
    names = "tenant, key, model, day, admitted, state, closed, status, tokens_held, audio_held"
    found = db.execute(f"SELECT {names} FROM journal WHERE number = ?", (number,)).fetchone()
    return None if found is None else _Row(*found)


def _release(db: sqlite3.Connection, number: int) -> None:
    """Free what a request still reserves."""
    row = _row(db, number)
    if row is None:
        return
    if row.tokens_held:
        quotas.add(db, row.tenant, TOKENS, row.day, reserved=-row.tokens_held)
    if row.audio_held:
        quotas.add(db, row.tenant, AUDIO, row.day, reserved=-row.audio_held)
    db.execute("UPDATE journal SET tokens_held = 0, audio_held = 0 WHERE number = ?", (number,))


def _count(db: sqlite3.Connection, where: tuple[int, str, str, str], **more: float) -> None:
    """Add to the usage of a day, tenant, key and model."""
    changed = {name: value for name, value in more.items() if value}
    if not changed:
        return
    names, marks = ", ".join(changed), ", ".join("?" * (4 + len(changed)))
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in changed)
    db.execute(
        f"INSERT INTO usage (day, tenant, key, model, {names}) VALUES ({marks})"
        f" ON CONFLICT (day, tenant, key, model) DO UPDATE SET {sums}",
        (*where, *changed.values()),
    )
