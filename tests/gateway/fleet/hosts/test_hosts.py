"""Replicas over several hosts with fake deployments and a clock that tests move: placement, loss, ledger, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import NotFound, StartError, Unavailable, Unreachable
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.fleet.owned import owner_token
from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.parts import ModelState, ModelStatus
from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from tests.fakes.fleet import FakeHost, MovedClock, run_scene

NEEDS = {"a": {"0": 60}, "b": {"0": 60}}
NAMES = ("local", "gpu7", "gpu8")


class Stage:
    """A fleet on fake hosts. entry fields by model; all models may run on all hosts."""

    def __init__(self, folder: Path, **fields: dict[str, Any]) -> None:
        self.hosts = {name: FakeHost(NEEDS) for name in NAMES}
        self.clock = MovedClock()
        entries = {name: ModelEntry(target=name, name=name, **fields.get(name, {})) for name in NEEDS}
        self.serve = ServeFile(models=entries, discover=False, hosts=NAMES)
        self.fleet = ManagedFleet(
            self.serve, FleetHosts(self.made), self.clock, RunningFleet(self.serve), owner_token(folder / "state")
        )

    def made(self, name: str) -> FakeHost:
        if name not in self.hosts:
            raise NotFound(f"no context {name!r}")
        return self.hosts[name]

    async def ready(self, model: str) -> list[str]:
        return [each.deployment for each in await self.fleet.ready(model, lambda progress: None)]

    async def late(self, model: str, seconds: float = 5.0) -> list[str]:
        """Deployments that take a request which has to wait."""
        waiting = asyncio.create_task(self.ready(model))
        await self.clock.advance(seconds)
        return await waiting

    def status(self, model: str) -> ModelStatus:
        return next(status for status in self.fleet.models() if status.name == model)

    def places(self, model: str) -> list[tuple[str, str]]:
        return [(each.deployment, each.state) for each in self.status(model).places]

    def lose(self, name: str) -> None:
        self.hosts[name].fault = Unreachable(f"host {name!r} cannot be reached", "No route to host")

    def log(self) -> dict[str, list[str]]:
        return {name: host.log for name, host in self.hosts.items() if host.log}


def played(play: Callable[[Stage], Any], folder: Path, **fields: Any) -> Stage:
    return run_scene(lambda: Stage(folder, **fields), play)


def queue(host: FakeHost, name: str, waiting: int) -> None:
    host.deployments[name].waiting = waiting
    host.deployments[name].running = min(waiting, 1)


def test_replicas_are_added_on_other_hosts_by_the_queue_and_end_without_one(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        assert await stage.ready("a") == ["a"], "the first host is preferred"
        queue(stage.hosts["local"], "a", 3)
        await stage.clock.advance(40)
        assert stage.places("a") == [("a", "ready"), ("gpu7/a", "ready")]
        queue(stage.hosts["gpu7"], "a", 3)
        await stage.clock.advance(120)
        assert len(stage.places("a")) == 2, "there are no more than the entry allows"
        assert stage.status("a").held == {"cuda:0": 60, "gpu7/cuda:0": 60}
        for name in ("local", "gpu7"):
            queue(stage.hosts[name], "a", 0)
        await stage.clock.advance(200)
        assert stage.places("a") == [("a", "ready")]
        assert stage.log() == {"local": ["start a"], "gpu7": ["start a", "end a"]}

    played(play, tmp_path, a={"replicas_text": "1..2"})


def test_a_host_with_free_memory_is_taken_before_another_model_has_to_sleep(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        assert await stage.ready("a") == ["a"]
        await stage.clock.advance(5)
        assert await stage.ready("b") == ["gpu7/b"]
        assert all("sleep" not in line for lines in stage.log().values() for line in lines)

    played(play, tmp_path)


def test_a_lost_host_is_marked_its_replica_starts_elsewhere_and_a_surplus_ends_when_it_is_back(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.ready("a")
        await stage.clock.advance(40)
        assert [name for name, _ in stage.places("a")] == ["a", "gpu7/a"]
        stage.lose("gpu7")
        await stage.clock.advance(5)
        assert stage.places("a") == [("a", "ready"), ("gpu7/a", "lost"), ("gpu8/a", "ready")]
        assert await stage.ready("a") == ["a", "gpu8/a"]
        assert stage.status("a").caution == "host 'gpu7' cannot be reached: No route to host"
        stage.hosts["gpu7"].fault = None
        await stage.clock.advance(60)
        assert len(stage.places("a")) == 2 and not stage.status("a").caution
        assert "lost" not in {state for _, state in stage.places("a")}

    played(play, tmp_path, a={"replicas_text": "2"})


def test_the_only_replica_of_a_lost_host_is_started_elsewhere_at_once(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.lose("local")
        assert await stage.late("a") == ["gpu7/a"]
        stage.lose("gpu7")
        await stage.clock.advance(5)
        assert stage.places("a") == [("gpu7/a", "lost"), ("gpu8/a", "ready")]

    played(play, tmp_path)


def test_a_model_that_no_host_can_run_is_refused_with_the_bytes_that_each_lacks(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        for name in ("local", "gpu7"):
            stage.hosts[name].adopt("other", "b")
        stage.lose("gpu8")
        await stage.clock.advance(1)
        with pytest.raises(Unavailable) as refused:
            await stage.late("a", 20)
        error = refused.value
        assert error.code == "no_memory" and error.facts["holders"] == ["other", "gpu7/other"]
        assert error.detail.count("20 bytes too few") == 2 and "gpu7/cuda:0" in error.detail
        assert "gpu8: host 'gpu8' cannot be reached" in error.detail

    played(play, tmp_path, a={"keep_text": "on_demand"})


def test_a_start_that_fails_on_one_host_is_tried_on_the_next(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.hosts["local"].failures["a"] = [StartError("no weights", code="late")]
        assert await stage.late("a") == ["gpu7/a"]

    played(play, tmp_path)


def test_a_replica_sleeps_and_wakes_on_its_own_host(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.lose("local")
        assert await stage.late("a") == ["gpu7/a"]
        await stage.clock.advance(30)
        assert stage.status("a").state is ModelState.SLEEPING and stage.places("a") == [("gpu7/a", "sleeping")]
        stage.hosts["local"].fault = None
        assert await stage.late("a") == ["gpu7/a"]
        assert stage.log() == {"gpu7": ["start a", "sleep a", "wake a"]}

    played(play, tmp_path, a={"keep_text": "idle 10s"})


def test_a_replica_leaves_a_host_that_its_model_no_longer_names(tmp_path: Path) -> None:
    async def play(stage: Stage) -> None:
        assert await stage.ready("a") == ["a"]
        await stage.clock.advance(5)
        await stage.fleet.apply(changed(stage.serve, ("gpu8", "gpu9")))
        await stage.clock.advance(10)
        assert stage.log()["local"] == ["start a", "end a"]
        assert stage.status("a").caution == "no context 'gpu9'"
        assert await stage.late("a") == ["gpu8/a"]

    played(play, tmp_path)


def changed(serve: ServeFile, hosts: Sequence[str]) -> ServeFile:
    return ServeFile(models=serve.models, discover=False, hosts=tuple(hosts))
