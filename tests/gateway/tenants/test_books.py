"""Books of requests: every report counts once, also if it is read again or a process is killed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.gateway.tenants import books
from mstar_core.gateway.tenants.accounts.terms import Terms
from mstar_core.gateway.tenants.books import Entry
from mstar_core.gateway.tenants.figures import COLUMNS, Figures, UsageReport, report_of
from mstar_core.gateway.tenants.store import opened, prepare, read_only, transact
from mstar_core.observe.frames import RequestStatus

NOW = 1_000_000.0
PARTS = [("r", 1, ""), ("r/1", 2, "r"), ("r-1", 4, "r"), ("video_x", 8, "other")]
ROOT = str(Path(__file__).parents[3])


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = opened(tmp_path)
    yield connection
    connection.close()


def admit(db: sqlite3.Connection, request: str, model: str = "m") -> int:
    entry = Entry(
        request=request, gateway="g", terms=Terms(name="acme"), key="k", model=model, route="/", tokens=0, audio_s=0
    )
    return transact(db, lambda db: books.admit(db, entry, NOW))[0]


def book(db: sqlite3.Connection, *reports: UsageReport) -> int:
    return transact(db, lambda db: books.book(db, reports))


def report(request: str, tokens: int, handle: int = 1, boot: str = "b") -> UsageReport:
    return UsageReport(id=f"{boot}/{handle}", request=request, deployment="d", figures=Figures(output_tokens=tokens))


def totals(db: sqlite3.Connection) -> dict[str, float]:
    names = ("requests", "errors", "unknown", *COLUMNS)
    sums = db.execute(f"SELECT {', '.join(f'coalesce(sum({name}), 0)' for name in names)} FROM usage").fetchone()
    return dict(zip(names, sums, strict=True))


def test_a_reader_sees_one_state_though_requests_end_meanwhile(db: sqlite3.Connection, tmp_path: Path) -> None:
    admit(db, "r")
    reader = read_only(tmp_path)
    assert reader is not None
    before = totals(reader)
    book(db, report("r", 5))
    assert (totals(reader), totals(db)["output_tokens"]) == (before, 5)
    reader.close()


def test_a_report_of_a_deployment_has_its_figures() -> None:
    status = RequestStatus(
        id="r",
        handle=7,
        ended=2.0,
        prompt_tokens=10,
        cached_tokens=4,
        tokens=20,
        audio_s=1.5,
        audio_in_s=2.5,
        images=2,
        video_s=3.5,
        device_s=0.75,
    )
    made = report_of(status, "d", "boot")
    assert made.id == "boot/7" and made.request == "r"
    assert made.figures == Figures(
        input_tokens=10,
        cached_tokens=4,
        output_tokens=20,
        audio_in_s=2.5,
        audio_out_s=1.5,
        images=2,
        video_s=3.5,
        device_s=0.75,
    )


def test_reports_that_are_read_again_change_nothing(db: sqlite3.Connection) -> None:
    admit(db, "r")
    assert book(db, report("r", 5)) == 1
    assert book(db, report("r", 5), report("r", 5)) == 0
    assert totals(db)["output_tokens"] == 5


def test_a_later_report_of_the_same_request_adds_its_difference(db: sqlite3.Connection) -> None:
    admit(db, "r")
    book(db, report("r", 5))
    book(db, report("r", 8))
    assert totals(db)["output_tokens"] == 8


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=30))
@settings(max_examples=30)
def test_any_order_and_repetition_of_reports_gives_the_same_totals(reads: list[tuple[int, int]]) -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    prepare(db)
    for request in range(6):
        admit(db, f"r{request}")
    last: dict[int, int] = {}
    for request, tokens in reads:
        last[request] = tokens
        book(db, report(f"r{request}", tokens, handle=request))
        book(db, *(report(f"r{known}", value, handle=known) for known, value in last.items()))
    assert totals(db)["output_tokens"] == sum(last.values()) and totals(db)["requests"] == 6
    db.close()


def test_parts_of_a_request_are_booked_for_it(db: sqlite3.Connection) -> None:
    admit(db, "r")
    statuses = [RequestStatus(id=name, handle=n, parent=parent, ended=1.0, tokens=n) for name, n, parent in PARTS]
    book(db, *(report_of(status, "d", "b") for status in statuses))
    assert totals(db)["output_tokens"] == 7 and totals(db)["requests"] == 1


def test_requests_that_did_not_come_through_the_gateway_are_ignored(db: sqlite3.Connection) -> None:
    admit(db, "r")
    assert book(db, report("stranger", 100)) == 0
    assert totals(db)["output_tokens"] == 0


def test_an_id_that_a_client_uses_again_is_booked_for_each_request(db: sqlite3.Connection) -> None:
    admit(db, "r", model="old")
    book(db, report("r", 5, 1))
    admit(db, "r", model="new")
    book(db, report("r", 5, 1), report("r", 7, 2))
    assert dict(db.execute("SELECT model, output_tokens FROM usage")) == {"old": 5, "new": 7}


def test_a_report_is_of_the_deployment_that_got_the_request(db: sqlite3.Connection) -> None:
    """Two clients use one id at the same time, on two deployments."""
    for model, deployment in (("first", "a"), ("second", "b")):
        number = admit(db, "r", model=model)
        transact(db, lambda db, number=number, name=deployment: books.forward(db, number, name))
    for deployment, tokens in (("a", 5), ("b", 7)):
        figures = Figures(output_tokens=tokens)
        book(db, UsageReport(id=f"{deployment}/1", request="r", deployment=deployment, figures=figures))
    assert dict(db.execute("SELECT model, output_tokens FROM usage")) == {"first": 5, "second": 7}


def test_a_late_report_makes_an_unknown_request_known(db: sqlite3.Connection) -> None:
    number = admit(db, "r")
    transact(db, lambda db: books.close(db, number, 200, NOW))
    transact(db, lambda db: books.settle(db, number, is_unknown=True))
    assert totals(db)["unknown"] == 1
    book(db, report("r", 5))
    assert totals(db)["unknown"] == 0 and totals(db)["output_tokens"] == 5


@pytest.mark.parametrize(("status", "errors"), [(200, 0), (499, 0), (400, 1), (503, 1)])
def test_errors_are_those_that_the_client_saw(db: sqlite3.Connection, status: int, errors: int) -> None:
    number = admit(db, "r")
    transact(db, lambda db: books.close(db, number, status, NOW))
    book(db, report("r", 1))
    assert totals(db)["errors"] == errors
    assert transact(db, lambda db: books.unsettled(db, NOW + 1)) == []


def test_forgotten_requests_stay_in_the_totals(db: sqlite3.Connection) -> None:
    number = admit(db, "r")
    transact(db, lambda db: books.close(db, number, 200, NOW))
    book(db, report("r", 5))
    transact(db, lambda db: books.forget(db, NOW + books.KEPT_S + 1))
    assert not db.execute("SELECT 1 FROM journal UNION ALL SELECT number FROM reports").fetchone()
    assert book(db, report("r", 5)) == 0 and totals(db)["output_tokens"] == 5


BOOKING = """
import sys
from pathlib import Path
from tests.gateway.tenants.test_books import admit, book, report
from mstar_core.gateway.tenants import books
from mstar_core.gateway.tenants.store import opened, transact

db = opened(Path(sys.argv[1]))
first = int(sys.argv[2])
for number in range(first, first + 100_000):
    row = admit(db, f"r{number}")
    print(f"admitted {number}", flush=True)
    book(db, report(f"r{number}", 3, number))
    transact(db, lambda db: books.close(db, row, 200, 1.0))
"""


def test_a_kill_at_any_point_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """After each kill all reports are read again, as a new gateway does: each request counts once, with its tokens."""
    random.seed(7)
    for life in range(3):
        script = [sys.executable, "-c", BOOKING, str(tmp_path), str(1_000_000 * life)]
        with subprocess.Popen(
            script, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT}
        ) as child:
            assert child.stdout is not None
            said = [child.stdout.readline() for _ in range(random.randrange(1, 60))]
            child.send_signal(signal.SIGKILL)
            child.communicate()
        db = opened(tmp_path)
        known = [int(name[1:]) for (name,) in db.execute("SELECT request FROM journal")]
        assert {int(line.split()[1]) for line in said} <= set(known)
        for _ in range(2):
            book(db, *(report(f"r{number}", 3, number) for number in known))
        transact(db, lambda db: books.close_lost(db, set(), NOW))
        assert totals(db)["requests"] == len(known) and totals(db)["output_tokens"] == 3 * len(known)
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        db.close()
