"""Messages between a gateway and its agent on another host: one JSON object per line, over ssh."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from mstar_core.errors import MstarError, StartError, StateConflict, Unavailable, Unreachable
from mstar_core.gateway.fleet.head import DeploymentHead
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.host.gpu_locks import Holder

Verb = Literal["look", "survey", "launch", "placed", "ready", "sleep", "wake", "end"]

KINDS: Final = {kind.__name__: kind for kind in (StartError, StateConflict, Unavailable, Unreachable)}
"""Errors that the fleet tells apart."""


class AgentCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Gateway to agent: do something, and answer with the same number.

    keys: devices whose holders are reported from now on. entry: of a survey or launch. start: number of the launch
    whose progress is awaited. level: of a sleep. owner: of a launch.
    """

    number: int
    verb: Verb
    keys: tuple[str, ...] = ()
    entry: ModelEntry | None = None
    name: str = ""
    need: Need | None = None
    is_replacement: bool = False
    start: int = 0
    level: int = 1
    owner: str = ""


class DeploymentReport(msgspec.Struct, frozen=True, kw_only=True):
    """A running deployment of the agent's host. url, key: of its api there. socket: its admin socket there.

    head: None while it does not answer.
    """

    name: str
    url: str
    key: str | None
    socket: str
    head: DeploymentHead | None


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of the agent's host. holders: by the keys of the last calls. memory_bytes: free memory of the host."""

    deployments: tuple[DeploymentReport, ...]
    holders: dict[str, tuple[Holder, ...]]
    memory_bytes: int


class AgentFault(msgspec.Struct, frozen=True, kw_only=True):
    """An MstarError on its way to the gateway."""

    kind: str
    title: str
    detail: str
    hint: str
    code: str

    @classmethod
    def of(cls, error: MstarError) -> AgentFault:
        """Return an error as data."""
        return cls(kind=type(error).__name__, title=error.title, detail=error.detail, hint=error.hint, code=error.code)

    def error(self, host: str) -> MstarError:
        """Return the error, with the name of its host."""
        kind = KINDS.get(self.kind, MstarError)
        return kind(f"{host}: {self.title}", self.detail, self.hint, code=self.code)


class AgentAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Agent to gateway: the answer to a call, or a regular report, which has number 0.

    version: of mstarctl there. report: read after what was called for had been done.
    """

    version: str
    report: HostReport
    number: int = 0
    need: Need | None = None
    fault: AgentFault | None = None
