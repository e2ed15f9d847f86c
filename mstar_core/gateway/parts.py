"""Interfaces between the parts of the gateway.

door      HTTP: finds the model and the tenant of a request, streams bytes between client and replica
fleet     deployments behind the models: starts them, wakes them, lets idle ones sleep, says what a request waits for
tenants   keys, rights, quotas, fair order and usage
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mstar_core.gateway.serve_file import ServeFile


class ModelState(enum.StrEnum):
    """State of a model behind the gateway. Only `READY` and `IDLE` take requests at once."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    IDLE = "idle"
    SLEEPING = "sleeping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A deployment that serves a model. url: of its api, without a slash at the end. key: an API key that it accepts.

    is_local: it is reached on this host, in person or through a connection of the fleet, and so is its admin socket.
    """

    model: str
    deployment: str
    url: str
    key: str | None = field(default=None, repr=False)
    is_local: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """Host of one deployment of a model. state: that of a model, or `lost` while its host cannot be reached."""

    deployment: str
    host: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Progress of what a request waits for, for SSE comments and `top`. share: 0 to 1, None if unknown."""

    state: ModelState
    text: str
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model for `/v1/models`, `ps`, `top` and `/metrics`.

    held: bytes of the ledger by device; totals: bytes of those devices. queued: requests that wait for it.
    reason: what they wait for. can_sleep: None until it is known. caution: for its operator. progress: of a load.
    config: path of its deployment file, empty until it was planned. loads: starts; wakes: from a sleep. sleep_level: 1
    or 2, 0 if it does not sleep or another gateway has put it to sleep.
    places: of its deployments that run or are lost.
    """

    name: str
    aliases: tuple[str, ...] = ()
    state: ModelState
    replicas: tuple[Replica, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    running: int = 0
    queued: int = 0
    loads: int = 0
    wakes: int = 0
    sleep_level: int = 0
    reason: str = ""
    can_sleep: bool | None = None
    caution: str = ""
    progress: LoadProgress | None = None
    config: str = ""
    places: tuple[ReplicaPlace, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStanding:
    """Use of one tenant beside its quotas, None without one, in all gateways of a user.

    running: requests that run or wait. requests_minute: of the last minute. tokens, audio_s, requests, refused: of the
    UTC day; refused: by a quota or a full queue.
    """

    name: str
    running: int = 0
    concurrency: int | None = None
    requests_minute: int = 0
    requests_per_minute: int | None = None
    tokens: int = 0
    tokens_per_day: int | None = None
    audio_s: float = 0.0
    audio_seconds_per_day: float | None = None
    requests: int = 0
    refused: int = 0


class Fleet(Protocol):
    """The deployments behind the models. Made on the gateway's event loop, by `assembly.make_fleet`."""

    async def start(self) -> None:
        """Find the deployments that run already, those that an earlier gateway started included."""
        ...

    async def close(self, *, is_final: bool) -> None:
        """Stop to manage. is_final: end the deployments that the gateway started; else another gateway goes on."""
        ...

    async def apply(self, serve: ServeFile) -> None:
        """Take over changed models and budgets. Requests that run are not disturbed."""
        ...

    def names(self) -> Sequence[str]:
        """Return the names of all models in order, for each request: cheap, as states and memory are not looked up."""
        ...

    def models(self) -> Sequence[ModelStatus]:
        """Return all models, by name. Reads the ledger of memory."""
        ...

    def resolve(self, name: str) -> str | None:
        """Return the model that a name or an alias means, None if there is none."""
        ...

    async def ready(self, model: str, progress: Callable[[LoadProgress], None]) -> Sequence[Replica]:
        """Return the replicas of a model that take requests, after it was loaded or woken if it must be.

        Raises Unavailable with `retry_after_s` where its queue is full, where it failed, or where no room can be made:
        the error names the deployments that hold the memory.
        """
        ...

    def using(self, replica: Replica) -> AbstractContextManager[None]:
        """Hold a replica awake while a request runs on it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Facts of a request before it is forwarded.

    model: its name, not an alias. key: the text behind `Bearer`, None without. request_id: under which the deployment
    reports its usage (X-Request-ID). max_output_tokens: that the request allows, None if it does not say.
    is_generation: it runs the model. Others, such as reading a stored response, only count as requests of their minute.
    """

    model: str
    route: str
    request_id: str
    key: str | None = None
    max_output_tokens: int | None = None
    is_generation: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredUsage:
    """Usage of a request as its answer names it. input_tokens: cached ones included."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    audio_in_s: float = 0.0
    audio_out_s: float = 0.0
    images: int = 0

    def plus(self, other: AnsweredUsage) -> AnsweredUsage:
        """Return the sum of two usages."""
        return AnsweredUsage(
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            audio_in_s=self.audio_in_s + other.audio_in_s,
            audio_out_s=self.audio_out_s + other.audio_out_s,
            images=self.images + other.images,
        )


class Permit(Protocol):
    """The right of one request to run. Its usage is counted from the deployment's own report; elsewhere by `used`."""

    @property
    def tenant(self) -> str:
        """Return the tenant's name."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Return headers for the answer: `x-ratelimit-*` of the tenant's quotas; empty without quotas."""
        ...

    async def written(self) -> None:
        """Return when the request is written down, before its answer begins. Raises Unavailable."""
        ...

    def forwarded(self, replica: Replica) -> None:
        """Note the replica that the request is sent to, which will report its usage. Again for each retry."""
        ...

    def used(self, usage: AnsweredUsage) -> None:
        """Count the usage that an answer names: of a deployment elsewhere. Again with the sum, for a session."""
        ...

    def close(self, status: int) -> None:
        """End the request. status: HTTP status that the client saw, 499 if it left."""
        ...


class Gate(Protocol):
    """Rights and quotas of tenants. Made on the gateway's event loop, by `assembly.make_gate`.

    takes_keys: keys of requests are those of tenants, so the door replaces them by the deployment's own. Otherwise
    the key of a request goes to the deployment, which checks it.
    """

    @property
    def takes_keys(self) -> bool:
        """Return whether keys of requests are those of tenants."""
        ...

    async def start(self) -> None:
        """Open the stores, and continue with what an earlier gateway counted."""
        ...

    async def close(self) -> None:
        """Write what is counted and close the stores."""
        ...

    async def apply(self, serve: ServeFile) -> None:
        """Take over changed tenants."""
        ...

    def models_of(self, key: str | None, models: Sequence[str]) -> Sequence[str]:
        """Return those of the models that a key may see. Raises Refused (401) for an unknown key."""
        ...

    async def standings(self) -> Sequence[TenantStanding]:
        """Return the use of each tenant beside its quotas, by name. Raises ConfigError if it cannot be read."""
        ...

    async def admit(self, facts: RequestFacts) -> Permit:
        """Return when the request may run: in the fair order of tenants, within their quotas.

        Raises NotFound for a model without a right to it, as if it were absent, and Overloaded (429) with
        `retry_after_s` where a quota is reached: the error says which and when it is renewed.
        """
        ...
