"""Deaths of processes and of hosts under a stream: the client receives the bytes of an undisturbed run on one host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from bench.soak.answers import Answer, ask, flaws
from tests.hosts.spread import OTHER, Spread
from tests.runtime.client import new_client
from tests.runtime.deployment import LLM, PATIENT_S, SNAC, plan, until
from tests.survival.families import FAMILIES, TWO_RANKS
from tests.survival.judge import Judge, judge_of
from tests.survival.mortal import Mortal
from tests.survival.points import FOLLOWER, PHASES, WORKER, Point

SHORT_S = 1.5
"""Time that a host may be cut off."""

AWAY_S = 10.0
"""Silence after which a host is given up that comes back by itself, or not."""

WAIT_S = 60.0
REQUEST = "speech"
SENDER = "worker-1"
"""The codec, which is on the other host."""

MIDDLE = Point(request=REQUEST, sender=SENDER, message="Outputs", count=5)
TOKENS = Point(request=REQUEST, sender="worker-0", message="StreamItems", count=60)
"""Point at which the language model has sent the ids of some of the sound."""

GROUP_MIDDLE = Point(request=REQUEST, sender=WORKER, message="Outputs", count=5)


SPLIT = plan({0: (LLM,), 1: (SNAC,)})
COPIES = plan({0: (LLM, SNAC), 1: (LLM, SNAC)})
LONG = "The red fox ran over the green hill today and the old man saw the bird near the cold river. " * 3


@pytest.fixture(scope="module")
def one_host() -> Answer:
    """The answer of a deployment on one host, with which all others are compared."""
    with Mortal(FAMILIES["orpheus"]) as deployment:
        return asyncio.run(judge_of(deployment).undisturbed(REQUEST))


def judged(deployment: Spread, one_host: Answer) -> Judge:
    """Return the judge of a deployment over two hosts."""
    judge = judge_of(deployment)
    judge.references[REQUEST] = one_host
    return judge


@pytest.fixture(scope="module")
def split(one_host: Answer) -> Iterator[Judge]:
    """The language model on this host, the codec on the other one."""
    with Spread(FAMILIES["orpheus"], SPLIT, (1,), hang_s=PATIENT_S) as deployment:
        yield judged(deployment, one_host)


@pytest.fixture(scope="module")
def copies(one_host: Answer) -> Iterator[Judge]:
    """A replica on each host."""
    with Spread(FAMILIES["orpheus"], COPIES, (1,), hang_s=PATIENT_S) as deployment:
        yield judged(deployment, one_host)


def host_of(judge: Judge) -> Spread:
    assert isinstance(judge.deployment, Spread)
    return judge.deployment


@pytest.mark.parametrize("victim", [SENDER, pytest.param("worker-0", marks=pytest.mark.slow), "conductor", "api"])
async def test_a_process_of_either_host_dies(victim: str, split: Judge) -> None:
    deployment, agent = host_of(split), host_of(split).agent
    assert await split.flaws(REQUEST, MIDDLE.strike(victim)) == []
    assert deployment.agent == agent, "no host was given up"


async def during(judge: Judge, act: Callable[[Spread], None], count: int = 1, at: Point = MIDDLE) -> list[Answer]:
    """Return the answers to requests in whose middle `act` runs.

    at: the point at which its sender waits, with some of the streams unfinished, until `act` releases it.
    """
    await asyncio.to_thread(judge.settle)
    heard, begun, strikes = [Answer() for _ in range(count)], asyncio.Event(), judge.deployment.strikes
    strikes.arm(at.strike(""))

    def begins(answer: Answer) -> bool:
        if answer.outputs:
            begun.set()
        return False

    async with new_client(judge.deployment.url) as client:
        tasks = [asyncio.create_task(ask(client, judge.bodies[REQUEST], answer, begins)) for answer in heard]
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
        await asyncio.to_thread(until, lambda: strikes.holds, "the middle of a stream", WAIT_S)
        await asyncio.to_thread(act, host_of(judge))
        assert not strikes.holds, "nothing waits any more"
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*tasks)


async def assert_whole(judge: Judge, act: Callable[[Spread], None], count: int = 1, at: Point = MIDDLE) -> None:
    answers = await during(judge, act, count, at)
    assert [flaws(answer, judge.references[REQUEST]) for answer in answers] == [[]] * count
    await asyncio.to_thread(judge.settle)


@pytest.mark.parametrize(
    "act",
    [pytest.param(Spread.lose_agent, id="agent", marks=pytest.mark.slow), pytest.param(Spread.lose_host, id="host")],
)
async def test_a_lost_host_is_replaced_and_its_streams_go_on(act: Callable[[Spread], None], split: Judge) -> None:
    agent = host_of(split).agent
    await assert_whole(split, act)
    assert host_of(split).agent != agent
    assert len(host_of(split).agents) == len(host_of(split).agent_folders()) == 1


async def test_a_short_break_of_the_network_costs_a_pause(split: Judge) -> None:
    agent = host_of(split).agent

    def act(deployment: Spread) -> None:
        with deployment.suspended_host():
            time.sleep(SHORT_S)

    await assert_whole(split, act)
    assert host_of(split).agent == agent


async def test_a_host_that_comes_back_too_late_is_fenced(split: Judge) -> None:
    incarnation = newest(host_of(split))

    def act(deployment: Spread) -> None:
        with deployment.no_room():
            with deployment.suspended_host(), deployment.given_up():
                pass
            deployment.wait_event("host.fenced", host=OTHER, incarnation=incarnation)
            until(lambda: not deployment.agents, "the end of the agent")

    await assert_whole(split, act)
    assert newest(host_of(split)) == incarnation + 1
    assert len(host_of(split).agents) == len(host_of(split).agent_folders()) == 1


async def test_a_connection_that_loses_messages_costs_a_pause(one_host: Answer) -> None:
    """The process on the other host restarts, and the streams go on: none is lost, none repeats anything."""
    with Spread(FAMILIES["orpheus"], SPLIT, (1,), relayed=True, hang_s=PATIENT_S) as deployment:
        judge, agent = judged(deployment, one_host), deployment.agent
        for at, receiver in ((MIDDLE, "api"), (TOKENS, SENDER)):

            def cut(deployment: Spread, sender: str = at.sender, receiver: str = receiver) -> None:
                deployment.cut(sender, receiver)
                deployment.wait_event("link.broken", child=SENDER, sender=sender, receiver=receiver)

            await assert_whole(judge, cut, 3, at)
        assert deployment.agent == agent, "no host was given up"


@pytest.mark.slow
async def test_a_connection_that_dies_without_an_end_costs_a_pause(one_host: Answer) -> None:
    """Nothing that is sent arrives any more, also on new connections. Only its silence shows it."""
    with Spread(FAMILIES["orpheus"], SPLIT, (1,), relayed=True) as deployment:
        judge, agent = judged(deployment, one_host), deployment.agent
        for at, receiver in ((MIDDLE, "api"), (TOKENS, SENDER)):

            def cut(deployment: Spread, sender: str = at.sender, receiver: str = receiver) -> None:
                deployment.cut(sender, receiver, "silent")
                deployment.wait_event("link.broken", child=SENDER, sender=sender, receiver=receiver, lost=0)

            await assert_whole(judge, cut, 3, at)
        assert deployment.agent == agent, "no host was given up"


def newest(deployment: Spread) -> int:
    """Return the incarnation of the agent."""
    return int(deployment.snapshot()["hosts"][OTHER]["incarnation"])


async def test_copies_answer_alike_and_a_prompt_goes_back_to_the_host_that_has_read_it(copies: Judge) -> None:
    usual, body = copies.bodies[REQUEST], {**copies.bodies[REQUEST], "text": LONG}
    async with new_client(copies.deployment.url) as client:
        both = await asyncio.gather(*(ask(client, usual) for _ in range(4)))
        assert [flaws(answer, copies.references[REQUEST]) for answer in both] == [[]] * 4
        busy = asyncio.create_task(ask(client, usual))  # so that the other replica has the fewest requests
        first = await ask(client, body)
        assert flaws(await busy, copies.references[REQUEST]) == []
        again = await ask(client, body)
    assert flaws(again, first) == []
    assert cached(again) > cached(first)


def cached(answer: Answer) -> int:
    """Return the number of ids of the prompt that a replica had read before."""
    return int(answer.ends[0]["metadata"]["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_streams_of_a_lost_host_go_on_at_a_replica_while_no_host_has_room(copies: Judge) -> None:
    deployment, agent = host_of(copies), host_of(copies).agent
    with deployment.no_room():
        answers = await during(copies, Spread.lose_host, 4)
        assert [flaws(answer, copies.references[REQUEST]) for answer in answers] == [[]] * 4
        until(lambda: deployment.snapshot()["hosts"][OTHER]["state"] == "waiting", "the state in a snapshot", WAIT_S)
        deployment.wait_event("request.resumed")
        deployment.wait_event("host.waiting", host=OTHER, why="no host of the cluster has room; a test has taken it")
    await asyncio.to_thread(copies.settle)
    assert deployment.agent != agent


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [AWAY_S - 4, AWAY_S + 5])
async def test_a_host_is_away_for_seconds(away_s: float, one_host: Answer) -> None:
    with Spread(FAMILIES["orpheus"], SPLIT, (1,), silence_s=AWAY_S) as deployment:
        judge = judged(deployment, one_host)
        agent = deployment.agent

        def act(deployment: Spread) -> None:
            with deployment.suspended_host():
                time.sleep(away_s)

        await assert_whole(judge, act)
        assert (deployment.agent == agent) == (away_s < AWAY_S)
        until(lambda: len(deployment.agents) == 1, "the end of the old agent", WAIT_S)


@pytest.mark.slow
async def test_without_its_supervisor_a_host_ends_everything() -> None:
    with Spread(FAMILIES["orpheus"], SPLIT, (1,)) as deployment:
        deployment.kill(deployment.pids()["supervisor"])
        until(lambda: not deployment.processes(), "the end of every process", AWAY_S + 20)
        assert deployment.agent_folders() == []


@pytest.mark.slow
async def test_a_member_of_a_group_over_two_hosts_dies() -> None:
    family = FAMILIES["orpheus_tp2"]
    with Spread(family, TWO_RANKS, (1,), hang_s=PATIENT_S) as deployment:
        judge = judge_of(deployment)
        for victim in (FOLLOWER, WORKER):
            assert await judge.flaws(REQUEST, PHASES[family.name]["codec"].strike(victim)) == []
        await assert_whole(judge, Spread.lose_host, at=GROUP_MIDDLE)
