"""A gateway that dies before, inside or after any transaction of its books: no quota is lost, held or charged twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mstar_core.gateway.tenants import books, quotas
from mstar_core.gateway.tenants.accounts.terms import Terms
from mstar_core.gateway.tenants.books import Entry
from mstar_core.gateway.tenants.figures import Figures, UsageReport
from mstar_core.gateway.tenants.store import opened, transact

NOW = 1_000_020.0
TERMS = Terms(name="acme", requests_per_minute=100, tokens_per_day=100_000, concurrency=8)
USED = {"here": 30, "long": 4000, "left": 7}
"""Tokens by request that its deployment reports; `long` uses more than it had reserved."""

ELSEWHERE, UNUSED = "there", "never sent"
ANSWERED = 12
"""Tokens that the answer of the deployment elsewhere names."""

Step = Callable[[sqlite3.Connection], object]


class KilledError(BaseException):
    """The gateway is dead."""


def admit(request: str) -> Step:
    entry = Entry(
        request=request, gateway="g", terms=TERMS, key="k", model="m", route="/generate", tokens=1000.0, audio_s=None
    )
    return partial(books.admit, entry=entry, now=NOW)


def report(request: str, tokens: int) -> UsageReport:
    figures = Figures(output_tokens=tokens, device_s=tokens / 1000)
    return UsageReport(id=f"boot/{request}", request=request, deployment="d", figures=figures)


def steps() -> list[Step]:
    """Return the transactions of five requests, interleaved: numbers in the journal follow the order of admission."""
    numbers = {name: number for number, name in enumerate((*USED, ELSEWHERE, UNUSED), 1)}
    sent: list[Step] = [admit(name) for name in numbers]
    sent += [partial(books.forward, number=numbers[name], deployment="d") for name in USED]
    sent.append(partial(books.forward, number=numbers[ELSEWHERE], deployment="http://far:8000"))
    half: list[Step] = [
        partial(books.book, reports=[report("here", 10)]),
        partial(books.book_answer, number=numbers[ELSEWHERE], figures=Figures(output_tokens=5)),
        partial(books.book_answer, number=numbers[ELSEWHERE], figures=Figures(output_tokens=ANSWERED)),
    ]
    ends: list[Step] = [partial(books.close, number=numbers[name], status=200, now=NOW) for name in ("here", "long")]
    ends += [partial(books.close, number=numbers[ELSEWHERE], status=200, now=NOW)]
    ends += [partial(books.book, reports=[report(name, tokens)]) for name, tokens in USED.items()]
    ends += [partial(books.close, number=numbers["left"], status=499, now=NOW)]
    ends += [partial(books.undo, number=numbers[UNUSED])]
    return [*sent, *half, *ends]


def run(db: sqlite3.Connection, at: float) -> int:
    """Run the steps until the gateway dies: between two at a whole number, else inside one. Returns how many count."""
    done = 0

    def dying(connection: sqlite3.Connection, step: Step) -> None:
        step(connection)
        raise KilledError

    for step in steps():
        if done == at:
            return done
        if at < done + 1:
            with pytest.raises(KilledError):
                transact(db, partial(dying, step=step))
            return done
        transact(db, step)
        done += 1
    return done


def recover(db: sqlite3.Connection) -> None:
    """Do what the next gateway does: close what the dead one left, read all reports, settle what has none."""
    transact(db, partial(books.close_lost, living=set(), now=NOW + 1))
    for _ in range(2):
        transact(db, partial(books.book, reports=[report(name, tokens) for name, tokens in USED.items()]))
    for each in transact(db, partial(books.unsettled, closed_before=NOW + 10)):
        unknown = bool(each.deployment)
        transact(db, partial(books.settle, number=each.number, is_unknown=unknown))


@pytest.mark.parametrize("inside", [0.0, 0.5], ids=["between", "inside a transaction"])
def test_a_kill_at_every_step_loses_no_quota_and_charges_once(tmp_path: Path, inside: float) -> None:
    count = len(steps())
    for at in range(count + 1):
        folder = tmp_path / str(at)
        db = opened(folder)
        run(db, at + inside)
        db.close()
        db = opened(folder)
        recover(db)
        journal = dict(db.execute("SELECT request, deployment FROM journal"))
        answered = db.execute("SELECT output_tokens FROM reports WHERE report LIKE 'answer/%'").fetchall()
        # A report names its deployment, so it belongs to a request that was forwarded there, or to which place none is
        # known because the gateway died before it was written.
        charged = sum(USED[name] for name in journal if name in USED) + sum(row[0] for row in answered)
        used, requests, tokens, devices = db.execute(
            "SELECT (SELECT coalesce(sum(used), 0) FROM counters WHERE quota = 'tokens'), coalesce(sum(requests), 0),"
            " coalesce(sum(output_tokens), 0), coalesce(sum(device_s), 0) FROM usage"
        ).fetchone()
        assert (used, tokens, requests) == (charged, charged, len(journal)), at
        assert devices == pytest.approx(sum(USED[name] for name in journal if name in USED) / 1000)
        held = db.execute("SELECT coalesce(sum(reserved), 0) FROM counters").fetchone()[0]
        assert held == 0 and books.running_of(db, "acme") == 0, "nothing stays reserved, and no place is taken"
        in_minute = db.execute("SELECT coalesce(sum(used), 0) FROM counters WHERE quota = 'requests'").fetchone()[0]
        assert in_minute == len(journal)
        assert db.execute("SELECT count(*) FROM journal WHERE state = 'running'").fetchone()[0] == 0
        left = quotas.reserve(db, TERMS, NOW, tokens=1.0).left
        assert {name: state.used for name, state in left} == {"requests": in_minute + 1, "tokens": charged + 1}
        db.close()
