"""A world in which a gateway dies at a chosen point: before or after any call of its fleet.

The deployments and their commands survive it, as they survive a SIGKILL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mstar_core.errors import MstarError, StartError
from mstar_core.gateway.fleet.head import DeploymentHead
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.parts import Replica
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.host.gpu_locks import Holder
from tests.fakes.fleet import FakeHost

Effect = Callable[[], Awaitable[object]]


class KilledError(BaseException):
    """The gateway is dead; nothing of it runs any more."""


@dataclass
class Life:
    """One gateway's life. at: point at which it dies, None for none.

    is_sent: a call that is cut reaches its goal later.
    lands_at: point at which what an earlier life has left in progress ends. points: passed so far, by name.
    """

    at: int | None = None
    is_sent: bool = False
    lands_at: int | None = None
    points: list[str] = field(default_factory=list)
    is_dead: bool = False

    def passes(self, name: str) -> bool:
        """Count a point. Returns whether the gateway dies here; raises KilledError if it is dead."""
        if self.is_dead:
            raise KilledError
        self.points.append(name)
        self.is_dead = len(self.points) == self.at
        return self.is_dead


class KilledHost:
    """The deployments of a host as one life sees them. world: the deployments themselves, which all lives share."""

    def __init__(self, world: World, life: Life) -> None:
        self._world, self._life = world, life

    async def _point(self, name: str, effect: Effect | None = None) -> None:
        if self._life.passes(name):
            if effect is not None and self._life.is_sent:
                self._world.left.append(effect)
            raise KilledError
        if self._life.lands_at is not None and len(self._life.points) >= self._life.lands_at:
            self._life.lands_at = None
            await self._world.land()

    async def _called(self, name: str, effect: Effect) -> None:
        await self._point(f"before {name}", effect)
        await effect()
        await self._point(f"after {name}")

    async def survey(self, entry: ModelEntry) -> Need:
        await self._point("survey")
        return await self._world.host.survey(entry)

    async def launch(
        self, entry: ModelEntry, name: str, need: Need, owner: str, *, is_replacement: bool = False
    ) -> KilledLaunch:
        await self._point(f"before launch {name}")
        launch = KilledLaunch(self, self._world, name, is_first=name not in self._world.commands)
        if launch.is_first:
            self._world.commands[name] = entry, owner
        await self._point(f"after launch {name}")
        return launch

    async def heads(self, names: Sequence[str]) -> Mapping[str, tuple[Replica, DeploymentHead | None]]:
        await self._point("heads")
        return await self._world.host.heads(names)

    async def sleep(self, name: str, level: int) -> None:
        await self._called(f"sleep {name}", lambda: self._world.host.sleep(name, level))

    async def wake(self, name: str) -> None:
        await self._called(f"wake {name}", lambda: self._world.host.wake(name))

    async def end(self, name: str) -> None:
        await self._called(f"end {name}", lambda: self._world.end(name))

    fault: MstarError | None = None

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def host_memory(self) -> int:
        return self._world.host.host_memory()

    def holders(self, key: str) -> Sequence[Holder]:
        return self._world.host.holders(key)


class KilledLaunch:
    """A command that starts a deployment. is_first: no other command of this name runs or has run."""

    def __init__(self, host: KilledHost, world: World, name: str, *, is_first: bool) -> None:
        self._host, self._world, self._name, self.is_first = host, world, name, is_first

    async def until_placed(self) -> None:
        await self._host._point(f"placing {self._name}")
        if not self.is_first:
            raise StartError(f"deployment {self._name!r} is already running", code="name_in_use")
        await self._world.place(self._name)
        await self._host._point(f"placed {self._name}")

    async def until_ready(self) -> None:
        await self._host._point(f"starting {self._name}")
        self._world.host.deployments[self._name].state = "ready"
        await self._host._point(f"started {self._name}")


@dataclass
class World:
    """Deployments, and what a dead gateway has left in progress.

    commands: of `up` with their owners, by the name of their deployment, from their start until the deployment ends:
    names are locked.
    orphans: commands whose gateway died before their deployment served.
    """

    host: FakeHost
    commands: dict[str, tuple[ModelEntry, str]] = field(default_factory=dict)
    left: list[Effect] = field(default_factory=list)
    orphans: set[str] = field(default_factory=set)

    def note_death(self) -> None:
        """Note the commands that a dead gateway has left."""
        for name in self.commands:
            deployment = self.host.deployments.get(name)
            if deployment is None or deployment.state == "starting":
                self.orphans.add(name)

    async def place(self, name: str) -> None:
        """Let a command start its deployment. Raises StartError if memory is short, and the command has then ended."""
        entry, owner = self.commands[name]
        try:
            await (await self.host.launch(entry, name, await self.host.survey(entry), owner)).until_placed()
        except MstarError:
            del self.commands[name]
            self.host.log.pop()  # it has not started
            raise

    async def end(self, name: str) -> None:
        """End a deployment that runs."""
        if name in self.host.deployments:
            await self.host.end(name)
        self.commands.pop(name, None)

    async def land(self) -> None:
        """End what a dead gateway has begun: its calls arrive, and its commands start their deployments."""
        left, self.left = self.left, []
        for effect in left:
            with suppress(MstarError, KeyError):
                await effect()
        orphans, self.orphans = self.orphans, set()
        for name in sorted(orphans & self.commands.keys()):
            deployment = self.host.deployments.get(name)
            with suppress(MstarError):
                if deployment is None:
                    await self.place(name)
                if self.host.deployments[name].state == "starting":
                    self.host.deployments[name].state = "ready"
        await asyncio.sleep(0)
