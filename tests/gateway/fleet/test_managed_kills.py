"""A gateway that dies at any point of its fleet's work: the next one loses, doubles and wrongly ends no deployment."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from tests.fakes.fleet import TOTAL, FakeHost, MovedClock
from tests.fakes.fleet_kills import KilledError, KilledHost, Life, World

NEEDS = {"a": {"0": 60}, "b": {"0": 30}, "c": {"0": 50}, "whole": {"0": 95}, "theirs": {"1": 40}, "side": {"1": 70}}
SCRIPT = ("a", "b", "c", "a", "whole", "side", "theirs", "a")
"""Requests, one after the other: loads, sleeps, wakes, ends of sleepers, and a model of an operator."""

OPERATOR = "theirs"
OWNER = "token"
SERVE = ServeFile(models={name: ModelEntry(target=name, name=name) for name in NEEDS}, discover=False)
FEW = 15


def new_world() -> World:
    """Return a host on which an operator has started one deployment."""
    world = World(FakeHost(NEEDS))
    world.host.adopt(OPERATOR, OPERATOR)
    world.commands[OPERATOR] = SERVE.models[OPERATOR], ""
    return world


async def live(world: World, life: Life) -> list[str]:
    """Run a gateway until it has done its script and ended, or has died. Returns the outcome of each request."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # tasks of the dead
    clock = MovedClock()
    host = KilledHost(world, life)
    fleet = ManagedFleet(SERVE, FleetHosts(lambda name: host), clock, RunningFleet(SERVE), OWNER)
    outcomes: list[str] = []

    async def request(model: str) -> None:
        try:
            replicas = await fleet.ready(model, lambda progress: None)
        except MstarError as error:
            outcomes.append(error.code)
            return
        with fleet.using(replicas[0]):
            assert world.host.deployments[replicas[0].deployment].state == "ready", "asleep below a request"
        outcomes.append("done")

    async def work() -> None:
        await fleet.start()
        for model in SCRIPT:
            task = asyncio.create_task(request(model))
            try:
                while not task.done() and not life.is_dead:
                    await clock.advance(1)
                    check_ledger(world)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if task.done() and not task.cancelled() and isinstance(failed := task.exception(), Exception):
                raise failed
            if life.is_dead:
                return
            await clock.advance(3)
        await fleet.close(is_final=True)

    with suppress(KilledError):
        async with asyncio.timeout(120):
            await work()
    with suppress(KilledError):
        await fleet.close(is_final=False)  # only its tasks: the dead gateway reaches nothing
    world.note_death()
    return outcomes


def check_ledger(world: World) -> None:
    """No device holds more than it has."""
    assert all(world.host.used(key) <= TOTAL for key in "01")


def check_end(world: World) -> None:
    """All that gateways have started has ended, and the operator's deployment runs."""
    assert set(world.host.deployments) == {OPERATOR} == set(world.commands), world.host.log
    assert f"end {OPERATOR}" not in world.host.log
    running: set[str] = set()
    for line in world.host.log:
        verb, _, name = line.partition(" ")
        if verb == "start":
            assert name not in running, f"{name} was started twice: {world.host.log}"
            running.add(name)
        if verb == "end":
            running.remove(name)
    assert not running


@pytest.fixture(scope="module")
def points() -> list[str]:
    """The points of a life that is not cut."""
    life, world = Life(), new_world()
    assert asyncio.run(live(world, life)) == ["done"] * len(SCRIPT)
    check_end(world)
    verbs = {line.partition(" ")[0] for line in world.host.log}
    assert verbs == {"start", "sleep", "wake", "end"}, "the script reaches every kind of step"
    return life.points


def distinct(points: list[str]) -> list[int]:
    """Return the numbers of all points but repeated readings of the heads, of which the first of a row stays."""
    return [
        number
        for number, name in enumerate(points, 1)
        if name != "heads" or number == 1 or points[number - 2] != "heads"
    ]


@pytest.mark.parametrize(("lands_at", "is_sent"), [(1, True), (12, False), (40, True)])
def test_a_kill_at_every_point_loses_and_doubles_no_deployment(points: list[str], lands_at: int, is_sent: bool) -> None:
    """lands_at: what the dead gateway had begun ends early or late in the next life. is_sent: its last call too."""
    for at in distinct(points):
        world = new_world()
        first, second = Life(at=at, is_sent=is_sent), Life(lands_at=lands_at)

        async def two(world: World = world, lives: tuple[Life, Life] = (first, second)) -> None:
            for life in lives:
                await live(world, life)
            await world.land()

        asyncio.run(two())
        assert first.is_dead and not second.is_dead
        check_end(world)


def test_many_gateways_die_in_turn_and_the_last_one_cleans_up(points: list[str]) -> None:
    for seed in range(FEW):
        random, world = Random(seed), new_world()
        lives = [
            Life(at=random.randint(1, len(points)), is_sent=random.random() < 0.5, lands_at=random.randint(1, 30))
            for _ in range(4)
        ]

        async def run(world: World = world, lives: list[Life] = lives) -> None:
            for life in [*lives, Life(lands_at=2)]:
                await live(world, life)

        asyncio.run(run())
        check_end(world)
