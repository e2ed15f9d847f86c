"""Loading and unloading of LoRA adapters while a deployment serves. Owned by the supervisor.

All ranks keep an adapter in the same row, which the supervisor chooses. Its number is never used again, so messages,
caches and requests of an earlier adapter cannot mean a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mstar_core.config.deployment import AdapterPlan, DeploymentSpec
from mstar_core.config.name import NAME_HINT, is_name
from mstar_core.errors import NotFound, StateConflict, TimedOut, UsageError, WeightsError, did_you_mean
from mstar_core.messages.adapters import AdapterDone, LoadAdapter, UnloadAdapter
from mstar_core.messages.names import API, process_rank
from mstar_core.messages.wire import Message
from mstar_core.supervisor.operations.answers import Answers

if TYPE_CHECKING:
    from mstar_core.supervisor.child import Child
    from mstar_core.supervisor.events import Events
    from mstar_core.supervisor.operations.changes import Changes
    from mstar_core.supervisor.operations.operations import Operations


class AdaptableDeployment(Protocol):
    """The parts of the supervisor that adapters need."""

    spec: DeploymentSpec
    children: dict[str, Child]
    changes: Changes
    events: Events
    deaths: list[dict[str, Any]]

    def respecify(self, spec: DeploymentSpec) -> None:
        """Replace the spec."""


class Adapters:
    """The LoRA adapters of a deployment. send: a message to a child."""

    def __init__(
        self, deployment: AdaptableDeployment, operations: Operations, send: Callable[[str, Message], object]
    ) -> None:
        self._deployment = deployment
        self._operations = operations
        self._send = send
        self._answers = Answers[AdapterDone](deployment, send)

    def facts(self) -> dict[str, Any]:
        """Return the loaded adapters and the room for them."""
        lora = self._deployment.spec.lora
        items = [msgspec.to_builtins(adapter) for adapter in self._deployment.spec.adapters]
        return {"items": items, "room": lora.max_adapters or 0, "max_rank": lora.max_rank or 0}

    def load(self, name: str, folder: str, rank: int = 0, base: str = "") -> dict[str, Any]:
        """Begin to load an adapter and return the record of the operation.

        Raises UsageError for a bad name or folder, StateConflict for a name in use and without room, and what
        `Operations.check_ready` raises.
        """
        spec = self._deployment.spec
        self._check_name(name)
        if not Path(folder).is_absolute():
            raise UsageError(f"the folder {folder!r} is not absolute", hint="send an absolute path")
        rows = {adapter.row for adapter in spec.adapters}
        free = next((row for row in range(spec.lora.max_adapters or 0) if row not in rows), None)
        if free is None:
            room = spec.lora.max_adapters or 0
            hint = "mstarctl lora unload frees a place" if room else "start it with --lora or --set lora.max_adapters=8"
            raise StateConflict(
                "there is no room for another LoRA adapter", f"the room is for {room}", hint, code="no_room"
            )
        self._operations.check_ready()
        plan = AdapterPlan(number=spec.next_adapter, row=free, name=name, folder=folder, rank=rank, base=base)
        self._deployment.respecify(msgspec.structs.replace(spec, next_adapter=spec.next_adapter + 1))
        return self._operations.begin(f"load of adapter {name}", self._load(plan))

    def unload(self, name: str) -> dict[str, Any]:
        """Begin to unload an adapter once its requests have ended, and return the record of the operation.

        Raises NotFound, and what `Operations.check_ready` raises.
        """
        adapters = {adapter.name: adapter for adapter in self._deployment.spec.adapters}
        if name not in adapters:
            raise NotFound(
                f"no adapter {name!r} is loaded", hint=did_you_mean(name, adapters), kind="adapter", name=name
            )
        self._operations.check_ready()
        return self._operations.begin(f"unload of adapter {name}", self._unload(adapters[name]))

    def take(self, child: str, message: AdapterDone) -> None:
        """Take the answer of a child."""
        self._answers.take(child, message)

    def _check_name(self, name: str) -> None:
        spec = self._deployment.spec
        if not is_name(name):
            raise UsageError(f"{name!r} cannot name an adapter", hint=NAME_HINT)
        if name in (spec.name, spec.model, *(adapter.name for adapter in spec.adapters)):
            raise StateConflict(f"a model has the name {name!r}", hint="choose another name", code="name_in_use")

    async def _load(self, plan: AdapterPlan) -> None:
        ranks = self._ranks()
        try:
            await self._ask(ranks, LoadAdapter(adapter=plan), plan.number)
        except Exception:
            for name in ranks:
                self._send(name, UnloadAdapter(number=plan.number))
            raise
        spec = self._deployment.spec
        self._deployment.respecify(msgspec.structs.replace(spec, adapters=(*spec.adapters, plan)))
        self._deployment.events.add("adapter.loaded", adapter=plan.name, folder=plan.folder)

    async def _unload(self, plan: AdapterPlan) -> None:
        before = self._deployment.spec
        without = tuple(adapter for adapter in before.adapters if adapter.number != plan.number)
        self._deployment.respecify(msgspec.structs.replace(before, adapters=without))
        limit_s = before.drain_timeout_s
        try:
            await self._ask([API], UnloadAdapter(number=plan.number), plan.number, limit_s)
        except TimedOut:
            spec = self._deployment.spec
            self._deployment.respecify(msgspec.structs.replace(spec, adapters=(*spec.adapters, plan)))
            raise
        await self._ask(self._ranks(), UnloadAdapter(number=plan.number), plan.number)
        self._deployment.events.add("adapter.unloaded", adapter=plan.name)

    def _ranks(self) -> list[str]:
        return [name for name in self._deployment.children if process_rank(name) is not None]

    async def _ask(self, names: Iterable[str], message: Message, number: int, limit_s: float | None = None) -> None:
        """Send a request to children and wait for all answers.

        A child that dies needs no unloading: its next incarnation reads the spec. Raises WeightsError with the first
        error, StateConflict if a child dies while it loads, TimedOut after `limit_s`.
        """
        answers = await self._answers.ask(names, message, number, limit_s)
        if answers is None:
            raise TimedOut(
                "requests still use the adapter", f"they did not end within {limit_s:g} s", "cancel them, or try again"
            )
        check_answers(answers, is_loading=isinstance(message, LoadAdapter))


def check_answers(answers: Mapping[str, AdapterDone | None], *, is_loading: bool) -> None:
    """Raise the first error of these answers. None: the child has died, which fails a load."""
    for name, answer in answers.items():
        if answer is None and is_loading:
            raise StateConflict(f"{name} ended while the adapter was loaded", hint="load it again", code="restarting")
        if answer is not None and answer.title:
            raise WeightsError(answer.title, answer.detail, answer.hint)
