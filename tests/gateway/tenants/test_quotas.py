"""Quotas: renewed with UTC minutes and days, reserved by estimates, settled by reports, exact in races."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mstar_core.errors import Overloaded
from mstar_core.gateway.tenants import books, quotas
from mstar_core.gateway.tenants.accounts.terms import Terms
from mstar_core.gateway.tenants.books import Entry
from mstar_core.gateway.tenants.figures import Figures, UsageReport
from mstar_core.gateway.tenants.store import opened, transact

NOON = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC).timestamp()
DAY_S = 86_400.0


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = opened(tmp_path)
    yield connection
    connection.close()


def admit(
    db: sqlite3.Connection,
    terms: Terms,
    now: float,
    *,
    request: str = "r",
    model: str = "m",
    tokens: float = 0.0,
    audio_s: float | None = None,
) -> int:
    entry = Entry(
        request=request, gateway="g", terms=terms, key="k", model=model, route="/v1/x", tokens=tokens, audio_s=audio_s
    )
    return transact(db, lambda db: books.admit(db, entry, now))[0]


def report(db: sqlite3.Connection, request: str, **figures: float) -> None:
    made = UsageReport(id=f"boot/{request}", request=request, deployment="d", figures=Figures(**figures))  # type: ignore[arg-type]  # numbers
    transact(db, lambda db: books.book(db, [made]))


def close(db: sqlite3.Connection, number: int, status: int = 200) -> None:
    transact(db, lambda db: books.close(db, number, status, NOON))


def test_requests_per_minute_are_renewed_at_the_border(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", requests_per_minute=2)
    admit(db, terms, NOON)
    admit(db, terms, NOON + 29.9)
    with pytest.raises(Overloaded) as refused:
        admit(db, terms, NOON + 29.9)
    assert refused.value.retry_after_s == 1
    assert "2 of its 2 requests per minute" in refused.value.public and "next minute" in refused.value.public
    admit(db, terms, NOON + 30.0)


def test_the_time_to_retry_is_that_of_the_renewal(db: sqlite3.Connection) -> None:
    minutes, days = Terms(name="a", requests_per_minute=1), Terms(name="b", tokens_per_day=10)
    admit(db, minutes, NOON)
    admit(db, days, NOON, tokens=10)
    for terms, seconds in ((minutes, 30), (days, 12 * 3600 - 30)):
        with pytest.raises(Overloaded) as refused:
            admit(db, terms, NOON)
        assert refused.value.retry_after_s == seconds


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
def test_days_are_utc_in_every_zone(db: sqlite3.Connection, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    midnight = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
    terms = Terms(name="acme", tokens_per_day=100)
    admit(db, terms, midnight - 0.001, tokens=100)
    with pytest.raises(Overloaded):
        admit(db, terms, midnight - 0.001, tokens=1)
    admit(db, terms, midnight, tokens=100)


def test_tokens_are_settled_by_what_was_used(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", tokens_per_day=100)
    first = admit(db, terms, NOON, request="one", tokens=80)
    with pytest.raises(Overloaded, match="may need 30"):
        admit(db, terms, NOON, tokens=30)
    report(db, "one", input_tokens=5, output_tokens=15)
    close(db, first)
    admit(db, terms, NOON, tokens=80)
    with pytest.raises(Overloaded):
        admit(db, terms, NOON, tokens=1)


def test_a_request_that_used_more_than_it_reserved_uses_up_the_rest(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", audio_seconds_per_day=60.0)
    first = admit(db, terms, NOON, request="one", audio_s=30)
    report(db, "one", audio_out_s=61.5)
    close(db, first)
    with pytest.raises(Overloaded, match="61.5 of its 60 seconds of audio per day"):
        admit(db, terms, NOON)
    admit(db, terms, NOON, model="other")  # it has neither heard nor made sound


def test_requests_that_run_no_model_only_count_in_their_minute(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", requests_per_minute=2, tokens_per_day=1)
    admit(db, terms, NOON, tokens=1)
    transact(db, lambda db: quotas.reserve(db, terms, NOON))
    with pytest.raises(Overloaded, match="requests per minute"):
        transact(db, lambda db: quotas.reserve(db, terms, NOON))


def test_an_estimate_above_the_whole_quota_is_lowered_to_it(db: sqlite3.Connection) -> None:
    admit(db, Terms(name="acme", tokens_per_day=100), NOON, tokens=4096)


def test_an_unused_reservation_is_freed_when_the_request_failed(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", tokens_per_day=100)
    number = admit(db, terms, NOON, tokens=100)
    close(db, number, 503)
    transact(db, lambda db: books.settle(db, number))
    admit(db, terms, NOON, tokens=100)


def test_a_request_that_never_ran_is_undone_without_a_trace(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", requests_per_minute=1, tokens_per_day=100, audio_seconds_per_day=9, concurrency=1)
    for _ in range(3):
        number = admit(db, terms, NOON, tokens=100, audio_s=9)
        transact(db, lambda db, number=number: books.undo(db, number))
    assert not db.execute("SELECT 1 FROM journal").fetchone()
    assert db.execute("SELECT sum(used + reserved) FROM counters").fetchone()[0] == 0
    assert db.execute("SELECT sum(requests) FROM usage").fetchone()[0] == 0


def test_concurrency_counts_requests_of_living_gateways(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", concurrency=2)
    first = admit(db, terms, NOON)
    admit(db, terms, NOON)
    with pytest.raises(Overloaded, match="2 requests that run or wait"):
        admit(db, terms, NOON)
    close(db, first)
    admit(db, terms, NOON)
    assert transact(db, lambda db: books.close_lost(db, {"g"}, NOON)) == 0
    assert transact(db, lambda db: books.close_lost(db, {"other"}, NOON)) == 2
    admit(db, terms, NOON)


def test_a_refused_request_changes_no_counter(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", requests_per_minute=5, tokens_per_day=10, concurrency=9)
    admit(db, terms, NOON, tokens=10)
    before = db.execute("SELECT * FROM counters").fetchall()
    with pytest.raises(Overloaded):
        admit(db, terms, NOON, tokens=1)
    assert db.execute("SELECT * FROM counters").fetchall() == before


def test_headers_name_what_is_left(db: sqlite3.Connection) -> None:
    terms = Terms(name="acme", requests_per_minute=5, tokens_per_day=1000)
    reserved = transact(db, lambda db: quotas.reserve(db, terms, NOON, tokens=100, audio_s=0))
    headers = quotas.headers_of(reserved.left)
    assert headers["x-ratelimit-limit-requests"] == "5" and headers["x-ratelimit-remaining-requests"] == "4"
    assert headers["x-ratelimit-reset-requests"] == "30.000s"
    assert headers["x-ratelimit-remaining-tokens"] == "900"


def test_old_counters_are_forgotten(db: sqlite3.Connection) -> None:
    admit(db, Terms(name="acme", requests_per_minute=5, tokens_per_day=1000), NOON)
    transact(db, lambda db: books.forget(db, NOON + 3 * DAY_S))
    assert not db.execute("SELECT 1 FROM counters").fetchone()


RACE = """
import sys
from pathlib import Path
from mstar_core.errors import Overloaded
from mstar_core.gateway.tenants import books
from mstar_core.gateway.tenants.books import Entry
from mstar_core.gateway.tenants.store import opened, transact
from mstar_core.gateway.tenants.accounts.terms import Terms

folder, name, tries = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
db = opened(folder)
terms = Terms(name="acme", requests_per_minute=400, tokens_per_day=3000)
print("ready", flush=True)
sys.stdin.readline()
admitted = 0
for number in range(tries):
    request = f"{name}{number}"
    entry = Entry(request=request, gateway=name, terms=terms, key="", model="m", route="/", tokens=10, audio_s=0)
    try:
        transact(db, lambda db: books.admit(db, entry, 1000.0))
        admitted += 1
    except Overloaded:
        pass
print(admitted)
"""


def test_two_processes_that_race_stay_within_the_quotas(tmp_path: Path) -> None:
    """1000 requests for 300 reservations of tokens: exactly those are admitted."""
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    racers = [
        subprocess.Popen([*command, name, "500"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    counts = [int(racer.communicate()[0]) for racer in racers]
    assert sum(counts) == 300
