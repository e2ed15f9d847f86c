"""The gate from outside: rights, quotas in races, fair waiting, and usage when gateways and deployments die."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ConfigError, NotFound, Overloaded, Unavailable
from mstar_core.gateway.parts import AnsweredUsage, Replica, RequestFacts
from mstar_core.gateway.serve_file import ModelEntry, ServeFile, TenantSpec, load_serve_file
from mstar_core.gateway.tenants.accounts.directory import InvalidKey
from mstar_core.gateway.tenants.accounts.tenant_file import TenantFile
from mstar_core.gateway.tenants.gate import TenantGate, TenantPermit
from mstar_core.gateway.tenants.store import read_only
from mstar_core.gateway.tenants.usage import usage
from tests.fakes.usage_reports import UsageReports

REPLICA = Replica(model="m", deployment="fake", url="http://127.0.0.1:1")


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1_000_020.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def gate(
    folder: Path, clock: Clock, *, most_waiting: int = 100, **tenants: Mapping[str, Any]
) -> AsyncIterator[TenantGate]:
    """Open a gate with these tenants of a serve file; its deployments have sockets in the folder."""
    serve = ServeFile(tenants={name: TenantSpec(name=name, **terms) for name, terms in tenants.items()})
    opened = TenantGate(
        serve, folder, clock=clock, socket_of=lambda name: folder / f"{name}.sock", most_waiting=most_waiting
    )
    await opened.start()
    try:
        yield opened
    finally:
        await opened.close()


def key_of(folder: Path, tenant: str) -> str:
    return TenantFile(folder).new_key(tenant, 0.0, is_known=True)


def facts(request: str = "r", key: str | None = None, *, model: str = "m", tokens: int | None = None) -> RequestFacts:
    return RequestFacts(
        model=model, route="/v1/chat/completions", request_id=request, key=key, max_output_tokens=tokens
    )


def totals(folder: Path) -> dict[str, float]:
    db = read_only(folder)
    assert db is not None
    names = ("requests", "errors", "unknown", "input_tokens", "output_tokens")
    row = db.execute(f"SELECT {', '.join(f'coalesce(sum({name}), 0)' for name in names)} FROM usage").fetchone()
    db.close()
    return dict(zip(names, row, strict=True))


def journal(folder: Path) -> list[tuple[str, str, int | None]]:
    """Return the requests that are written down, with their deployments and statuses."""
    db = read_only(folder)
    assert db is not None
    rows = db.execute("SELECT request, deployment, status FROM journal ORDER BY number").fetchall()
    db.close()
    return rows


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks and the writer's thread bring about."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  a thread writes the store
            await asyncio.sleep(0.01)


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    yield tmp_path_factory.mktemp("g")


async def test_a_model_without_a_right_is_not_found(tmp_path: Path, clock: Clock) -> None:
    async with gate(tmp_path, clock, acme={"models": ("m",)}) as opened:
        key = key_of(tmp_path, "acme")
        assert opened.takes_keys and opened.models_of(key, ["m", "secret"]) == ["m"]
        with pytest.raises(NotFound) as hidden:
            await opened.admit(facts(key=key, model="secret"))
        assert hidden.value.status == 404 and hidden.value.code == "model_not_found"
        with pytest.raises(InvalidKey):
            await opened.admit(facts(key="wrong"))
        with pytest.raises(InvalidKey):
            opened.models_of(None, ["m"])


async def test_a_model_of_chosen_tenants_is_not_found_for_others(tmp_path: Path, clock: Clock) -> None:
    serve = ServeFile(
        models={"m": ModelEntry(name="m", target="x", tenants=("lab",))},
        tenants={name: TenantSpec(name=name) for name in ("acme", "lab")},
    )
    opened = TenantGate(serve, tmp_path, clock=clock)
    assert opened.models_of(key_of(tmp_path, "lab"), ["m"]) == ["m"]
    assert opened.models_of(key_of(tmp_path, "acme"), ["m"]) == []


async def test_a_request_without_quotas_is_forwarded_while_it_is_written_down(tmp_path: Path, clock: Clock) -> None:
    may_write = threading.Event()
    async with gate(tmp_path, clock) as opened:
        assert opened._writer is not None
        opened._writer.post(lambda db: may_write.wait(60))
        permit = await opened.admit(facts("r"))
        permit.forwarded(REPLICA)
        written = asyncio.create_task(permit.written())
        permit.close(200)
        assert not written.done() and totals(tmp_path)["requests"] == 0
        may_write.set()
        await written
        await until(lambda: journal(tmp_path) == [("r", "fake", 200)])


async def test_a_request_that_cannot_be_written_down_has_no_answer_and_no_entry(tmp_path: Path, clock: Clock) -> None:
    async with gate(tmp_path, clock) as opened:
        assert opened._writer is not None
        await opened._writer.call(lambda db: db.execute("PRAGMA query_only = 1"))
        permit = await opened.admit(facts("r"))
        permit.forwarded(REPLICA)
        with pytest.raises(Unavailable, match="cannot count requests"):
            await permit.written()
        permit.close(503)
        with pytest.raises(sqlite3.OperationalError):  # nothing is queued any more
            await opened._writer.call(lambda db: None)
        opened._writer._connection.execute("PRAGMA query_only = 0")
        assert journal(tmp_path) == []


async def test_keys_of_a_file_are_taken_and_read_again(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "acme.keys").write_text("# of the build\nfirst-key\n")
    file = tmp_path / "serve.yaml"
    file.write_text("tenants: {acme: {key_file: acme.keys}}\n")
    opened = TenantGate(load_serve_file(file), tmp_path / "state", clock=clock)
    assert opened.models_of("first-key", ["m"]) == ["m"]
    (tmp_path / "acme.keys").write_text("second-key\n")
    await opened.apply(load_serve_file(file))
    assert opened.models_of("second-key", ["m"]) == ["m"]
    with pytest.raises(InvalidKey):
        opened.models_of("first-key", ["m"])
    (tmp_path / "acme.keys").write_text("")
    with pytest.raises(ConfigError, match=r"tenants\.acme\.key_file"):
        await opened.apply(load_serve_file(file))
    assert opened.models_of("second-key", ["m"]) == ["m"]


async def test_a_race_for_requests_per_minute_admits_exactly_the_quota(tmp_path: Path, clock: Clock) -> None:
    async with gate(tmp_path, clock, acme={"requests_per_minute": 137}) as opened:
        key = key_of(tmp_path, "acme")
        results = await asyncio.gather(
            *(opened.admit(facts(f"r{number}", key)) for number in range(1000)), return_exceptions=True
        )
        assert sum(isinstance(each, TenantPermit) for each in results) == 137
        assert sum(isinstance(each, Overloaded) for each in results) == 863
        clock.now += 60
        assert isinstance(await opened.admit(facts("next", key)), TenantPermit)


async def test_two_gateways_beside_each_other_admit_one_quota_together(tmp_path: Path, clock: Clock) -> None:
    terms = {"acme": {"requests_per_minute": 101, "concurrency": 90}}
    async with gate(tmp_path, clock, **terms) as left, gate(tmp_path, clock, **terms) as right:
        key = key_of(tmp_path, "acme")
        both = [(each, f"{name}-{number}") for number in range(150) for name, each in (("l", left), ("r", right))]
        results = await asyncio.gather(*(each.admit(facts(name, key)) for each, name in both), return_exceptions=True)
        permits = [each for each in results if isinstance(each, TenantPermit)]
        assert len(permits) == 90, "as many as may run at once, in both together"
        for permit in permits:
            permit.close(200)
        more = [await each.admit(facts(f"more-{number}", key)) for number, (each, _) in enumerate(both[:11])]
        assert len(more) == 11
        with pytest.raises(Overloaded, match="101 of its 101 requests per minute"):
            await right.admit(facts("over", key))
        await until(lambda: usage(tmp_path, by=("tenant",))[0]["refused"] == 211)
        (standing,) = [each for each in await right.standings() if each.name == "acme"]
        assert (standing.running, standing.requests, standing.refused) == (11, 101, 211)


async def test_a_race_for_concurrency_never_exceeds_it(tmp_path: Path, clock: Clock) -> None:
    running, most, refused, done = 0, 0, 0, 0
    async with gate(tmp_path, clock, acme={"concurrency": 7}) as opened:
        key = key_of(tmp_path, "acme")

        async def request(number: int) -> None:
            nonlocal running, most, refused, done
            try:
                permit = await opened.admit(facts(f"r{number}", key))
            except Overloaded:
                refused += 1
                return
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            done += 1
            permit.close(200)

        await asyncio.gather(*(request(number) for number in range(1000)))
        assert most <= 7 and done >= 7 and done + refused == 1000
        for number in range(7):  # all were given back
            await opened.admit(facts(f"again{number}", key))


async def test_a_negative_limit_of_tokens_gives_nothing_back(tmp_path: Path, clock: Clock) -> None:
    async with gate(tmp_path, clock, acme={"tokens_per_day": 100}) as opened:
        key = key_of(tmp_path, "acme")
        await opened.admit(facts("r1", key, tokens=-1000))
        await opened.admit(facts("r2", key, tokens=100))
        with pytest.raises(Overloaded):
            await opened.admit(facts("r3", key, tokens=1))


async def test_tokens_per_day_are_never_exceeded_by_what_is_reserved(tmp_path: Path, clock: Clock) -> None:
    async with gate(tmp_path, clock, acme={"tokens_per_day": 10_000}) as opened:
        key = key_of(tmp_path, "acme")
        results = await asyncio.gather(
            *(opened.admit(facts(f"r{number}", key, tokens=100)) for number in range(1000)), return_exceptions=True
        )
        permits = [each for each in results if isinstance(each, TenantPermit)]
        assert len(permits) == 100
        assert permits[0].headers["x-ratelimit-limit-tokens"] == "10000"


async def test_a_request_that_leaves_while_it_waits_gives_everything_back(sockets: Path, clock: Clock) -> None:
    reports = UsageReports(slots=1)
    async with reports.serve(sockets / "fake.sock"), gate(sockets, clock, acme={"concurrency": 3}) as opened:
        key = key_of(sockets, "acme")
        first = await opened.admit(facts("first", key))
        first.forwarded(REPLICA)
        await until(lambda: opened.capacity("m") == 2)
        spare = await opened.admit(facts("spare", key))
        waiting = asyncio.create_task(opened.admit(facts("second", key)))
        await until(lambda: opened.waiting("m") == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert opened.waiting("m") == 0
        await until(lambda: totals(sockets)["requests"] == 2)
        third = asyncio.create_task(opened.admit(facts("third", key)))
        reports.report("first")
        first.close(200)
        assert (await third).tenant == spare.tenant == "acme"


async def test_waiting_requests_run_in_the_fair_order_of_tenants(sockets: Path, clock: Clock) -> None:
    order: list[str] = []
    reports = UsageReports(slots=1)
    async with (
        reports.serve(sockets / "fake.sock"),
        gate(sockets, clock, greedy={"weight": 1.0}, modest={"weight": 1.0}) as opened,
    ):
        keys = {name: key_of(sockets, name) for name in ("greedy", "modest")}
        first = await opened.admit(facts("first", keys["greedy"]))
        first.forwarded(REPLICA)
        await until(lambda: opened.capacity("m") == 2)
        await opened.admit(facts("spare", keys["greedy"]))

        async def request(number: int, tenant: str) -> None:
            permit = await opened.admit(facts(f"{tenant}{number}", keys[tenant]))
            order.append(permit.tenant)
            permit.close(200)

        many = [asyncio.create_task(request(number, "greedy")) for number in range(20)]
        await until(lambda: opened.waiting("m") == 20)
        few = [asyncio.create_task(request(number, "modest")) for number in range(3)]
        await until(lambda: opened.waiting("m") == 23)
        reports.report("first")
        first.close(200)
        await asyncio.gather(*many, *few)
        assert max(index for index, tenant in enumerate(order) if tenant == "modest") <= 6


async def test_usage_comes_from_the_reports_of_the_deployment(sockets: Path, clock: Clock) -> None:
    reports = UsageReports()
    async with reports.serve(sockets / "fake.sock"), gate(sockets, clock) as opened:
        assert not opened.takes_keys
        permit = await opened.admit(facts("r"))
        permit.forwarded(REPLICA)
        reports.report("r", prompt_tokens=10, tokens=5)
        reports.report("stranger", prompt_tokens=1000)
        permit.close(200)
        await until(lambda: totals(sockets)["output_tokens"] == 5)
        assert totals(sockets) == {"requests": 1, "errors": 0, "unknown": 0, "input_tokens": 10, "output_tokens": 5}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a gate that closes wait long for reports, as on a busy machine."""
    monkeypatch.setattr("mstar_core.gateway.tenants.gate.LAST_REPORTS_S", 60.0)


@pytest.mark.usefixtures("patient")
async def test_the_last_reports_are_read_before_the_gateway_ends(sockets: Path, clock: Clock) -> None:
    reports = UsageReports()
    async with reports.serve(sockets / "fake.sock"):
        async with gate(sockets, clock) as opened:
            permit = await opened.admit(facts("r"))
            permit.forwarded(REPLICA)
            await until(lambda: opened.capacity("m") == 5)
            permit.close(200)
            reports.report("r", tokens=5)
        assert totals(sockets)["output_tokens"] == 5


@pytest.mark.usefixtures("patient")
async def test_a_gateway_that_ends_waits_for_reports_that_are_on_their_way(sockets: Path, clock: Clock) -> None:
    reports = UsageReports()
    async with reports.serve(sockets / "fake.sock"):
        async with gate(sockets, clock) as opened:
            permit = await opened.admit(facts("r"))
            permit.forwarded(REPLICA)
            permit.close(200)
            asyncio.get_running_loop().call_later(0.3, lambda: reports.report("r", tokens=5))
        assert totals(sockets)["output_tokens"] == 5


async def test_a_new_gateway_books_what_a_dead_one_had_not(sockets: Path, clock: Clock) -> None:
    """The first gateway admits and forwards, and never learns how its requests ended."""
    reports = UsageReports()
    async with gate(sockets, clock, acme={"concurrency": 2}) as dead:
        key = key_of(sockets, "acme")
        for name in ("ended", "cut"):
            (await dead.admit(facts(name, key))).forwarded(REPLICA)
    reports.report("ended", tokens=5)
    reports.report("cut", tokens=2)
    async with reports.serve(sockets / "fake.sock"), gate(sockets, clock, acme={"concurrency": 2}) as opened:
        await opened.admit(facts("next", key))  # the dead one holds nothing
        clock.now += 10
        await opened.sweep()
        await until(lambda: totals(sockets)["output_tokens"] == 7)
        assert totals(sockets)["unknown"] == 0


@pytest.mark.parametrize(("age_s", "unknown"), [(5.0, 2), (3600.0, 0)])
async def test_a_request_is_unknown_if_its_deployment_has_been_restarted(
    sockets: Path, clock: Clock, age_s: float, unknown: int
) -> None:
    """One that ran all the time would know every request that it began."""
    reports = UsageReports(age_s=age_s)
    async with reports.serve(sockets / "fake.sock"), gate(sockets, clock) as opened:
        for name, status in (("lost", 200), ("left", 499), ("refused", 400)):
            permit = await opened.admit(facts(name))
            permit.forwarded(REPLICA)
            permit.close(status)
        (await opened.admit(facts("never sent"))).close(503)
        clock.now += 10
        await opened.sweep()
        assert totals(sockets) == {
            "requests": 4,
            "errors": 2,
            "unknown": unknown,
            "input_tokens": 0,
            "output_tokens": 0,
        }


async def test_a_request_of_a_dead_deployment_is_unknown_after_a_while(sockets: Path, clock: Clock) -> None:
    async with gate(sockets, clock) as opened:
        permit = await opened.admit(facts("r"))
        permit.forwarded(REPLICA)
        permit.close(200)
        clock.now += 30
        await opened.sweep()
        assert totals(sockets)["unknown"] == 0
        clock.now += 60
        await opened.sweep()
        assert totals(sockets)["unknown"] == 1


async def test_a_running_request_is_not_settled(sockets: Path, clock: Clock) -> None:
    reports = UsageReports()
    async with reports.serve(sockets / "fake.sock"), gate(sockets, clock) as opened:
        permit = await opened.admit(facts("r"))
        permit.forwarded(REPLICA)
        permit.close(499)
        reports.report("r", handle=1, ended=None)
        clock.now += 100
        await opened.sweep()
        assert set(reports.asked) == {"r"} and totals(sockets)["unknown"] == 0  # the sweep of each second may ask too
        reports.report("r", handle=1, tokens=9)
        await until(lambda: totals(sockets)["output_tokens"] == 9)


async def test_a_request_that_dies_with_its_api_counts_what_it_had(sockets: Path, clock: Clock) -> None:
    reports = UsageReports()
    async with reports.serve(sockets / "fake.sock"), gate(sockets, clock) as opened:
        permit = await opened.admit(facts("r"))
        permit.forwarded(REPLICA)
        reports.report("r", handle=1, ended=None, tokens=6)
        await until(lambda: opened.capacity("m") == 5)
        reports.hub.remove("requests", "1")
        await until(lambda: totals(sockets)["output_tokens"] == 6)
        permit.close(502)


async def test_permits_of_a_closed_gate_can_be_closed(tmp_path: Path, clock: Clock) -> None:
    async with gate(tmp_path, clock) as opened:
        permit = await opened.admit(facts())
    permit.close(200)
    with pytest.raises(Unavailable):
        await opened.admit(facts())


async def test_a_deployment_elsewhere_that_names_no_usage_is_unknown_and_its_namesake_here_is_not_asked(
    sockets: Path, clock: Clock
) -> None:
    far, namesake = Replica(model="m", deployment="fake", url="http://far:8000", is_local=False), UsageReports()
    async with namesake.serve(sockets / "fake.sock"), gate(sockets, clock) as opened:
        answered, refused, silent = [await opened.admit(facts(name)) for name in ("answered", "refused", "silent")]
        for permit in (answered, refused, silent):
            permit.forwarded(far)
        answered.used(AnsweredUsage(input_tokens=3, output_tokens=4))
        answered.used(AnsweredUsage(input_tokens=3, output_tokens=9))
        answered.close(200)
        answered.used(AnsweredUsage(output_tokens=100))
        refused.close(400)
        silent.close(200)
        namesake.report("answered", tokens=1000)
        clock.now += 10
        await opened.sweep()
        await until(lambda: totals(sockets)["unknown"] == 1)
        expected = {"requests": 3, "errors": 1, "unknown": 1, "input_tokens": 3, "output_tokens": 9}
        assert totals(sockets) == expected and namesake.asked == []
