"""Messages between the supervisor and its agents, one on each other host. An agent also says Hello and sends beats."""

from __future__ import annotations

from typing import Any

import msgspec


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Supervisor to agent, first: the deployment it belongs to. The agent then connects to the supervisor.

    host: name of the agent's host. incarnation: of the agent. supervisor: endpoint of its mailbox. public_key,
    secret_key: CURVE key pair of the deployment (Z85). spec: spec.json for this host.
    """

    host: str
    incarnation: int
    supervisor: str
    public_key: str
    secret_key: str
    spec: bytes


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, tag="host_spec"):
    """Supervisor to agent: the deployment spec has changed. spec: spec.json for this host."""

    spec: bytes


class SpawnChild(msgspec.Struct, frozen=True, kw_only=True, tag="spawn_child"):
    """Supervisor to agent: start a process. key: of this process in all messages about it; never used again.

    name: of the child. module, arguments: behind the spec's path on its command line.
    """

    key: int
    name: str
    module: str
    arguments: list[str]


class ChildSpawned(msgspec.Struct, frozen=True, kw_only=True, tag="child_spawned", omit_defaults=True):
    """Agent to supervisor: the process exists, or could not be started. error: why not; detail, hint, code: of it."""

    key: int
    pid: int = 0
    error: str = ""
    detail: str = ""
    hint: str = ""
    code: str = ""


class SignalChild(msgspec.Struct, frozen=True, kw_only=True, tag="signal_child"):
    """Supervisor to agent: send a signal to the process and its group."""

    key: int
    number: int


class ChildExited(msgspec.Struct, frozen=True, kw_only=True, tag="child_exited", omit_defaults=True):
    """Agent to supervisor: the process has ended, after its last log lines. status: negative for a signal.

    key: 0: the agent itself ends, after all its children. fatal: the record that it wrote (process/failures.py), with
    its age in place of its times. left: small files that it wrote into the run directory for the supervisor, such as
    `weights.folder`, by name.
    """

    key: int
    status: int
    fatal: dict[str, Any] | None = None
    left: dict[str, str] = {}


class LogLines(msgspec.Struct, frozen=True, kw_only=True, tag="log_lines"):
    """Agent to supervisor: output of a process, whole lines without their ends. dropped: lines lost before them.

    key: 0: log of the agent itself.
    """

    key: int
    lines: list[bytes]
    dropped: int = 0


class FindPorts(msgspec.Struct, frozen=True, kw_only=True, tag="find_ports"):
    """Supervisor to agent: name free TCP ports for a tensor-parallel group that begins on its host."""

    number: int
    count: int


class PortsFound(msgspec.Struct, frozen=True, kw_only=True, tag="ports_found"):
    """Agent to supervisor: free ports. number: of the FindPorts."""

    number: int
    ports: list[int]


class HostReading(msgspec.Struct, frozen=True, kw_only=True, tag="host_reading", omit_defaults=True):
    """Agent to supervisor, each second: loads of its host. cores, resident_bytes, computed_s: by child name.

    host: a HostStatus, and gpus: GpuStatus records (observe/frames.py), as plain values. memory_kills: recent kills for
    lack of memory, None if unknown. computed_s: CPU seconds of the main thread. suspended: children that are stopped by
    a signal. running: keys of all processes; newest: highest key of a SpawnChild so far. ping: number of the latest
    Ping, which came ping_age_s before; 0 without one.
    """

    host: dict[str, Any]
    gpus: list[dict[str, Any]] = []
    cores: dict[str, float] = {}
    resident_bytes: dict[str, int] = {}
    computed_s: dict[str, float] = {}
    suspended: list[str] = []
    memory_kills: int | None = None
    running: list[int] = []
    newest: int = 0
    ping: int = 0
    ping_age_s: float = 0.0


HostMessage = (
    Welcome
    | HostSpec
    | SpawnChild
    | ChildSpawned
    | SignalChild
    | ChildExited
    | LogLines
    | FindPorts
    | PortsFound
    | HostReading
)
