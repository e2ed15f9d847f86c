"""Standing of tenants: what runs, what is used of the quotas, and what was refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mstar_core.errors import Overloaded
from mstar_core.gateway.parts import RequestFacts, TenantStanding
from mstar_core.gateway.serve_file import ServeFile, TenantSpec
from mstar_core.gateway.tenants.accounts.tenant_file import TenantFile
from mstar_core.gateway.tenants.gate import TenantGate
from mstar_core.gateway.tenants.store import FILE, opened
from mstar_core.gateway.tenants.usage import usage
from tests.fakes.usage_reports import UsageReports
from tests.gateway.tenants.test_gate import REPLICA, Clock, until

ACME = TenantSpec(name="acme", concurrency=2, requests_per_minute=10, tokens_per_day=5000)


def by_name(standings: list[TenantStanding]) -> dict[str, TenantStanding]:
    return {each.name: each for each in standings}


async def test_a_standing_has_load_use_of_quotas_and_refusals(tmp_path: Path) -> None:
    serve, clock, deployment = ServeFile(tenants={"acme": ACME, "lab": TenantSpec(name="lab")}), Clock(), UsageReports()
    gate = TenantGate(serve, tmp_path, clock=clock, socket_of=lambda name: tmp_path / f"{name}.sock")
    key = TenantFile(tmp_path).new_key("acme", 0.0, is_known=True)

    def facts(request: str) -> RequestFacts:
        return RequestFacts(model="m", route="/generate", request_id=request, key=key, max_output_tokens=100)

    async with deployment.serve(tmp_path / "fake.sock"):
        await gate.start()
        try:
            before = by_name(list(await gate.standings()))
            assert before == {
                "acme": TenantStanding(name="acme", concurrency=2, requests_per_minute=10, tokens_per_day=5000),
                "lab": TenantStanding(name="lab"),
            }
            done, runs = await gate.admit(facts("a")), await gate.admit(facts("b"))
            for number in range(3):
                with pytest.raises(Overloaded):
                    await gate.admit(facts(f"over-{number}"))
            done.forwarded(REPLICA)
            done.close(200)
            deployment.report("a", prompt_tokens=40, tokens=60)
            await until(lambda: bool(usage(tmp_path, by=("tenant",))[0]["output_tokens"]))
            acme = by_name(list(await gate.standings()))["acme"]
            assert (acme.running, acme.requests_minute, acme.requests, acme.refused) == (1, 2, 2, 3)
            assert acme.tokens == 100, "what is reserved is not used"
            (item,) = usage(tmp_path, by=("tenant",))
            assert (item["requests"], item["refused"]) == (2, 3)
            clock.now += 61
            assert by_name(list(await gate.standings()))["acme"].requests_minute == 0
            runs.close(200)
        finally:
            await gate.close()


async def test_requests_without_a_tenant_are_shown_once_there_are_any(tmp_path: Path) -> None:
    gate = TenantGate(ServeFile(), tmp_path, clock=Clock())
    await gate.start()
    try:
        assert list(await gate.standings()) == []
        permit = await gate.admit(RequestFacts(model="m", route="/generate", request_id="a"))
        await permit.written()
        permit.close(200)
        assert [(each.name, each.requests) for each in await gate.standings()] == [("anonymous", 1)]
    finally:
        await gate.close()


def test_a_file_of_an_older_version_gets_its_columns_and_keeps_its_totals(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        for table, column in (("usage", "refused"), ("usage", "device_s"), ("reports", "device_s")):
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        db.execute("INSERT INTO usage (day, tenant, key, model, requests) VALUES (1, 'acme', '', 'm', 5)")
        db.commit()
    assert usage(tmp_path, by=("tenant",))[0]["requests"] == 5, "it is read before a gateway has opened it"
    with closing(opened(tmp_path)) as db:
        assert db.execute("SELECT requests, refused, device_s FROM usage").fetchall() == [(5, 0, 0.0)]
        assert db.execute("SELECT device_s FROM reports").fetchall() == []
