"""Distribution of replicas over hosts by the number of free devices of each. Used by `up` and `scale`.

A replica consists of columns: its tensor-parallel groups, and its ranks that are in none. A search places whole
replicas on hosts; if that is impossible it places whole columns, and if that is impossible single devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

MOST_STEPS: Final = 20_000
"""Steps after which a search counts as failed, so that a large cluster is planned in bounded time."""

Replica = Sequence[int]
"""Number of devices of each column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """Devices that one host must offer together. replica, column: of which they are a part; -1 for all columns."""

    replica: int
    column: int
    size: int


def pack(
    replicas: Sequence[Replica], room: Mapping[str, int], load: Mapping[str, int], *, spread: bool = False
) -> list[list[tuple[str, ...]]]:
    """Return the host of each device of each column of each replica. The devices together must suffice.

    room: number of free devices by host, the preferred host first. load: number of replicas on the hosts in use, which
    come before others. spread: prefer the hosts with the fewest replicas.
    """
    whole = [_Item(replica=i, column=-1, size=sum(columns)) for i, columns in enumerate(replicas)]
    columns = [_Item(replica=i, column=j, size=n) for i, sizes in enumerate(replicas) for j, n in enumerate(sizes)]
    single = [_Item(replica=item.replica, column=item.column, size=1) for item in columns for _ in range(item.size)]
    for items in (whole, columns, single):
        hosts = _Search(items=items, load=load, spread=spread, order=list(room)).run(dict(room))
        if hosts is not None:
            return _by_column(replicas, items, hosts, list(room))
    raise AssertionError("the callers check that the devices suffice")


def _by_column(
    replicas: Sequence[Replica], items: Sequence[_Item], hosts: Sequence[str], order: Sequence[str]
) -> list[list[tuple[str, ...]]]:
    """Return the hosts of items by column. Devices of one host are adjacent in a column."""
    devices: dict[tuple[int, int], list[str]] = {}
    for item, host in zip(items, hosts, strict=True):
        devices.setdefault((item.replica, item.column), []).extend([host] * item.size)
    return [
        [
            tuple(sorted(devices[i, j], key=order.index)) if (i, j) in devices else tuple(devices[i, -1][:size])
            for j, size in enumerate(sizes)
        ]
        for i, sizes in enumerate(replicas)
    ]


@dataclass(slots=True, kw_only=True)
class _Search:
    """Depth-first search for a host of each item. failed: remaining room from which the later items do not fit."""

    items: Sequence[_Item]
    load: Mapping[str, int]
    spread: bool
    order: Sequence[str]
    hosts: list[str] = field(default_factory=list)
    failed: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    steps: int = 0

    def run(self, room: dict[str, int]) -> list[str] | None:
        """Return the host of each item, None if there is no such placement. room: free devices by host."""
        rooms, choices = [room], list[Iterator[str]]()
        while len(self.hosts) < len(self.items):
            item = self.items[len(self.hosts)]
            if len(choices) == len(self.hosts):
                choices.append(iter(self._candidates(item, rooms[-1]) if self._may_fit(rooms[-1]) else ()))
            host = next(choices[-1], None)
            if host is not None:
                self.hosts.append(host)
                rooms.append({**rooms[-1], host: rooms[-1][host] - item.size})
                continue
            self.failed.add(self._state(rooms[-1]))
            choices.pop()
            if not choices:
                return None
            self.hosts.pop()
            rooms.pop()
        return self.hosts

    def _state(self, room: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
        return len(self.hosts), tuple(sorted(room.values()))  # which host has the room is irrelevant

    def _may_fit(self, room: Mapping[str, int]) -> bool:
        self.steps += 1
        return self.steps <= MOST_STEPS and self._state(room) not in self.failed

    def _candidates(self, item: _Item, room: Mapping[str, int]) -> list[str]:
        """Return the hosts with room for an item, the best first."""
        placed = list(zip(self.items, self.hosts, strict=False))
        beside = {host for other, host in placed if other.replica == item.replica}
        in_column = {host for other, host in placed if (other.replica, other.column) == (item.replica, item.column)}
        later = [other for other in self.items[len(placed) :] if other.replica == item.replica]
        rest = sum(other.size for other in later)
        rest_of_column = sum(other.size for other in later if other.column == item.column)
        load = Counter(host for host, _ in {(host, other.replica) for other, host in placed})
        load.update(self.load)
        used = {*self.load, *self.hosts}

        def order(host: str) -> tuple[int, ...]:
            together = host not in in_column, room[host] < rest_of_column, host not in beside, room[host] < rest
            by_host = (load[host],) if self.spread else (host not in used, 0 if host in used else -room[host])
            return (*together, *by_host, self.order.index(host))

        return sorted((host for host in self.order if room[host] >= item.size), key=order)
