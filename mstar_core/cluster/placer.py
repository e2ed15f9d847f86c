"""Placers: they reserve room on hosts for a deployment and start an agent on each. Used by the supervisor."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Room that a deployment needs on one host. host: its name. gpus: number. cpus: cores of its processes.

    node: Ray's id of the host that the plan chose; empty: any host that no other bundle has. address: at which the
    others reach it; empty: its address in `network` (`ray.network`), else Ray's. A replacement has its own.
    """

    host: str
    gpus: int = 0
    cpus: float = 0.0
    node: str = ""
    address: str = ""
    network: str = ""


class AgentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Start of an agent; nothing in it is secret. deployment: its name.

    `python -m mstar_core.agent --detach` reads it as JSON from standard input, prints a StartedAgent as one line of
    JSON, and exits while the agent goes on. owner_key: CURVE public key (Z85) of the deployment, the only one that may
    send to the agent. ports: of its sockets, first and last; None: any. The placer sets host, address (at which the
    other hosts reach this one) and incarnation for each agent, and node and gpus of the StartedAgent.
    """

    deployment: str
    owner_key: str
    ports: tuple[int, int] | None = None
    host: str = ""
    address: str = "127.0.0.1"
    incarnation: int = 1


class StartedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that waits for its owner. endpoint: of its mailbox, `tcp://ADDRESS:PORT`; key: CURVE public key of that.

    host: name in the bundle. node: Ray's id of the host where it runs. gpus: indices (of NVML) that were reserved.
    incarnation: of the agents of this host in this deployment, from 1. The local host has a record without an agent:
    its host, endpoint and key are empty. title: host name. versions: of mstarctl (`mstarctl`) and of the wire format
    (`wire`), empty if unknown; the supervisor refuses others than its own.
    """

    host: str
    address: str
    endpoint: str
    key: str
    pid: int
    incarnation: int
    node: str = ""
    gpus: tuple[int, ...] = ()
    title: str = ""
    versions: dict[str, str] = {}


class Placer(Protocol):
    """Reserves room and starts agents. Calls may take seconds, and raise StartError with what to do."""

    async def start(self, bundles: tuple[Bundle, ...], order: AgentOrder) -> tuple[StartedAgent, ...]:
        """Reserve all bundles, and start an agent in each but the local one, whose `host` is empty.

        Returns a record of each bundle, in their order. No room stays reserved after an error.
        """

    async def replace(self, bundle: Bundle, order: AgentOrder) -> StartedAgent:
        """Start another agent in place of one that was lost. Waits until a host has room for its bundle."""

    async def release(self, hosts: tuple[str, ...] = (), *, when: asyncio.Event | None = None) -> None:
        """Give back the room of these hosts, of all without names. Agents end by themselves. Never raises.

        when: set once the room is not in use any more. Until then the call is prepared.
        """
