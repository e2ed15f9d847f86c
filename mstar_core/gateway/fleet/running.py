"""Fleet of the deployments that run on this host, without a life cycle: found in the run directories, followed as they
come and go. Also serves the models of a serve.yaml that have a `url`."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import Unavailable
from mstar_core.gateway.fleet.head import DeploymentHead, read_head
from mstar_core.gateway.parts import LoadProgress, ModelState, ModelStatus, Replica
from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from mstar_core.host.run_dir import deployments

SCAN_S: Final = 1.0
"""Time between two readings of the run directories."""

START_S: Final = 600.0
"""Longest wait of a request for a deployment that starts."""


@dataclass(slots=True)
class Found:
    """A running deployment. stamp: of its spec, which changes with a new start. head: None while it does not answer."""

    replica: Replica
    aliases: tuple[str, ...]
    stamp: tuple[int, int]
    socket: Path
    head: DeploymentHead | None = None

    @property
    def state(self) -> ModelState:
        return ModelState.ABSENT if self.head is None else self.head.model_state


@dataclass(slots=True)
class RunningFleet:
    """Deployments that others started. Owned by the gateway's main.

    running: requests of this gateway by replica. changed: set and replaced after each scan, wakes what waits.
    """

    serve: ServeFile
    found: dict[str, Found] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)
    queued: Counter[str] = field(default_factory=Counter)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _scanner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the running deployments once, then follow them."""
        await self.scan()
        self._scanner = asyncio.create_task(self._follow(), name="fleet scan")

    async def close(self, *, is_final: bool) -> None:
        """Stop to follow. The deployments go on, because others started them."""
        if self._scanner is not None:
            self._scanner.cancel()
            with suppress(asyncio.CancelledError):
                await self._scanner

    async def apply(self, serve: ServeFile) -> None:
        """Take over the entries with a url."""
        self.serve = serve
        await self.scan()

    def names(self) -> Sequence[str]:
        """Return the names of the found deployments and of the entries with a url, in order."""
        return sorted({*self.found, *self._links()})

    def models(self) -> Sequence[ModelStatus]:
        """Return the found deployments and the entries with a url, by name."""
        found = [self._status(each) for each in self.found.values()]
        linked = [self._linked(entry) for entry in self._links().values()]
        return sorted([*found, *linked], key=lambda status: status.name)

    def resolve(self, name: str) -> str | None:
        """Return the deployment with this name, else the first with this alias."""
        links = self._links()
        if name in self.found or name in links:
            return name
        aliases = {
            **{name: key for key, each in sorted(self.found.items(), reverse=True) for name in each.aliases},
            **{name: entry.name for entry in links.values() for name in entry.aliases},
        }
        return aliases.get(name)

    async def ready(self, model: str, progress: Callable[[LoadProgress], None]) -> Sequence[Replica]:
        """Return the deployment once it has started."""
        link = self._links().get(model)
        if link is not None:
            return (self._replica(link),)
        self.queued[model] += 1
        try:
            async with asyncio.timeout(START_S):
                return (await self._started(model, progress),)
        except TimeoutError as error:
            raise Unavailable(f"{model} is still starting", hint="retry later", code="starting") from error
        finally:
            self.queued[model] -= 1

    async def _started(self, model: str, progress: Callable[[LoadProgress], None]) -> Replica:
        while True:
            found, changed = self.found.get(model), self._changed
            if found is None:
                raise Unavailable(f"{model} has stopped", hint="retry later", code="stopped")
            if found.head is None or found.state in (ModelState.READY, ModelState.IDLE):
                return found.replica  # a silent supervisor does not keep its api from serving
            if found.state is not ModelState.LOADING:
                return found.replica  # the deployment itself says why it refuses
            progress(found.head.progress)
            await changed.wait()

    @contextmanager
    def using(self, replica: Replica) -> Iterator[None]:
        """Count a request."""
        self.running[replica.model] += 1
        try:
            yield
        finally:
            self.running[replica.model] -= 1

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(SCAN_S)
            await self.scan()

    async def scan(self) -> None:
        """Read the run directories and the heads of all deployments, and wake the requests that wait."""
        names = set(self.serve.models)
        shown = await asyncio.to_thread(read_running, dict(self.found)) if self.serve.discovers else {}
        self.found = {name: each for name, each in shown.items() if name not in names}
        heads = await asyncio.gather(*(read_head(each.socket) for each in self.found.values()))
        for each, head in zip(self.found.values(), heads, strict=True):
            each.head = head
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, found: Found) -> ModelStatus:
        name, head = found.replica.model, found.head
        return ModelStatus(
            name=name,
            aliases=found.aliases,
            state=found.state,
            replicas=(found.replica,),
            running=self.running[name],
            queued=self.queued[name],
            reason="its supervisor does not answer" if head is None else head.reason,
            progress=head.progress if head is not None and head.is_coming else None,
        )

    def _linked(self, entry: ModelEntry) -> ModelStatus:
        return ModelStatus(
            name=entry.name,
            aliases=entry.aliases,
            state=ModelState.READY,
            replicas=(self._replica(entry),),
            running=self.running[entry.name],
        )

    def _links(self) -> Mapping[str, ModelEntry]:
        return {name: entry for name, entry in self.serve.models.items() if entry.url is not None}

    @staticmethod
    def _replica(entry: ModelEntry) -> Replica:
        return Replica(model=entry.name, deployment=entry.name, url=(entry.url or "").rstrip("/"), is_local=False)


def read_running(known: Mapping[str, Found]) -> dict[str, Found]:
    """Return the deployments of this host whose supervisor runs. known: of the last call, kept if nothing changed.

    Reads files. A spec of another version, or of a deployment that has just ended, is left out.
    """
    shown: dict[str, Found] = {}
    for run in deployments():
        try:
            facts = os.stat(run.spec)
            stamp = (facts.st_ino, facts.st_mtime_ns)
            before = known.get(run.name)
            if run.holder() is None:
                continue
            if before is not None and before.stamp == stamp:
                shown[run.name] = before
                continue
            spec = DeploymentSpec.load(run.spec)
        except (OSError, ValueError):
            continue
        shown[run.name] = Found(replica_of(spec, run.name), names_of(spec), stamp, run.admin_socket)
    return shown


def replica_of(spec: DeploymentSpec, model: str) -> Replica:
    """Return a deployment of this host as a replica of a model."""
    return Replica(model=model, deployment=spec.name, url=spec.api.url, key=next(iter(spec.api.api_keys), None))


def names_of(spec: DeploymentSpec) -> tuple[str, ...]:
    """Return further names of a deployment's model; `*` means any name."""
    variant = [f"{spec.model}:{spec.weights_source}"] if spec.weights_source in ("tiny", "mini") else []
    names = dict.fromkeys([*spec.api.aliases, spec.model, *variant])
    return tuple(name for name in names if name != spec.name)
