"""Two fleets on one host: gateways beside each other, and two workers of one gateway during a rolling restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.fleet.owned import owner_token
from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.parts import ModelState
from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from tests.fakes.fleet import TOTAL, FakeHost, MovedClock
from tests.fakes.fleet_kills import KilledHost, Life, World

NEEDS = {"a": {"0": 60}, "b": {"0": 30}, "c": {"0": 50}, "d": {"1": 55}, "e": {"1": 65}}
SERVE = ServeFile(models={name: ModelEntry(target=name, name=name) for name in NEEDS}, discover=False)


def fleet_of(world: World, folder: Path, clock: MovedClock) -> ManagedFleet:
    """Return a fleet on the host of the world, with the names of a folder."""
    return ManagedFleet(
        SERVE, FleetHosts(lambda name: KilledHost(world, Life())), clock, RunningFleet(SERVE), owner_token(folder)
    )


async def used(fleet: ManagedFleet, world: World, model: str, clock: MovedClock, seconds: float) -> str:
    """Run a request for some time. Returns its outcome."""
    try:
        replicas = await fleet.ready(model, lambda progress: None)
    except MstarError as error:
        assert error.detail or error.facts.get("holders"), error
        return error.code
    deployment = world.host.deployments[replicas[0].deployment]
    with fleet.using(replicas[0]):
        if deployment.state != "ready":
            return "asleep"  # the other gateway was faster: the deployment wakes for the request
        deployment.running += 1
        try:
            await clock.wait(asyncio.Event(), seconds)
            assert deployment.state == "ready", "asleep below a request"
        finally:
            deployment.running -= 1
    return "done"


@pytest.mark.parametrize("seed", range(4))
def test_two_gateways_share_devices_and_each_ends_its_own(seed: int, tmp_path: Path) -> None:
    """Random traffic through both: no device holds more than it has, no deployment runs twice, and nothing is left."""
    world, ends = World(FakeHost(NEEDS)), list[str]()

    async def client(fleet: ManagedFleet, clock: MovedClock, random: Random) -> None:
        for _ in range(5):
            ends.append(await used(fleet, world, random.choice(list(NEEDS)), clock, random.random() * 3))

    async def run() -> None:
        clock = MovedClock()
        fleets = [fleet_of(world, tmp_path / name, clock) for name in ("left", "right")]
        for fleet in fleets:
            await fleet.start()
        clients = [
            asyncio.create_task(client(fleet, clock, Random(f"{seed}-{number}-{index}")))
            for index, fleet in enumerate(fleets)
            for number in range(2)
        ]
        for _ in range(2000):
            await clock.advance(1)
            assert all(world.host.used(key) <= TOTAL for key in "01")
            if all(each.done() for each in clients):
                break
        await asyncio.gather(*clients)
        await fleets[0].close(is_final=True)
        await fleets[1].close(is_final=True)

    asyncio.run(run())
    assert len(ends) == 20 and ends.count("done") >= 10, ends
    assert world.host.deployments == {} and world.commands == {}


def test_a_rolling_restart_loses_no_deployment_that_the_old_worker_starts_meanwhile(tmp_path: Path) -> None:
    world = World(FakeHost(NEEDS))

    async def run() -> None:
        clock = MovedClock()
        old = fleet_of(world, tmp_path, clock)
        await old.start()

        async def uses(fleet: ManagedFleet, model: str) -> str:
            task = asyncio.create_task(used(fleet, world, model, clock, 1.0))
            async with asyncio.timeout(60):
                while not task.done():
                    await clock.advance(1)
            return await task

        assert await uses(old, "a") == "done"
        new = fleet_of(world, tmp_path, clock)
        await new.start()
        assert await uses(old, "d") == "done", "a request that the old worker had accepted"
        assert await uses(new, "b") == "done"
        await clock.advance(2)
        states = {status.name: status.state for status in new.models()}
        assert states["a"] is states["b"] is states["d"] is ModelState.IDLE
        await old.close(is_final=False)
        assert set(world.host.deployments) == {"a", "b", "d"}, "the old worker ends nothing"
        await new.close(is_final=True)

    asyncio.run(run())
    assert world.host.deployments == {}


def test_all_workers_of_a_folder_have_one_token_and_other_gateways_another(tmp_path: Path) -> None:
    tokens = [owner_token(tmp_path / name) for name in ("left", "left", "right")]
    assert tokens[0] == tokens[1] != tokens[2] and all(tokens)
    assert [path.name for path in (tmp_path / "left").iterdir()] == ["owner"]
