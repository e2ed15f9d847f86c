"""Messages about the sleep of nodes, which gives the memory of their devices back, and about their wake."""

from __future__ import annotations

import msgspec


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep", omit_defaults=True):
    """Supervisor to workers and followers: let nodes sleep. Each answers with SleepDone.

    number: of the order. level: 1 keeps their weights in host memory, 2 drops them. nodes: empty for all of the rank.
    """

    number: int
    level: int = 1
    nodes: list[str] = []


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake", omit_defaults=True):
    """Supervisor to workers and followers: wake nodes. Each answers with SleepDone. nodes: empty for all of the rank.

    A process that cannot wake its nodes ends with the error, and its next incarnation loads them.
    """

    number: int
    nodes: list[str] = []


class SleepProgress(msgspec.Struct, frozen=True, kw_only=True, tag="sleep_progress"):
    """Child to supervisor, at most every 100 ms: progress of a wake. done, total: bytes."""

    number: int
    done: int
    total: int


class SleepDone(msgspec.Struct, frozen=True, kw_only=True, tag="sleep_done", omit_defaults=True):
    """Child to supervisor: an order is carried out, or refused. asleep: level by node that sleeps on this rank now;
    is_whole: all of them do.

    freed: bytes of the device that the nodes of the order have given back, or taken again. kept: bytes of host memory
    that all sleeping nodes of the rank keep. busy: handles of requests that use the nodes; then nothing has changed.
    title, detail, hint: of an error; then nothing has changed either.
    """

    number: int
    asleep: dict[str, int] = {}
    is_whole: bool = False
    freed: int = 0
    kept: int = 0
    busy: list[int] = []
    title: str = ""
    detail: str = ""
    hint: str = ""


class WakeWanted(msgspec.Struct, frozen=True, kw_only=True, tag="wake_wanted", omit_defaults=True):
    """Api or worker to supervisor: requests wait for nodes that sleep. nodes: empty for all."""

    nodes: list[str] = []


SleepMessage = Sleep | Wake | SleepProgress | SleepDone | WakeWanted
