"""Deployment of a miniature over two hosts: this one, and an agent of the same machine at another address."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.config.deployment import HostPlan, Plan
from tests.hosts.supervisor import CUT, NO_ROOM, RELAYS, SILENCE
from tests.runtime.deployment import END_S, Process, until
from tests.survival.families import Family
from tests.survival.mortal import Mortal

OTHER: Final = "b"
HOSTS: Final = (
    HostPlan(name="", address="127.0.0.1", title="a", node="node-a"),
    HostPlan(name=OTHER, address="127.0.0.2", title=OTHER, node="node-b"),
)
SILENCE_S: Final = 60.0
"""Silence of a host after which it is lost, unless a test changes it. No host is silent for so long by chance."""

SOON_S: Final = 2.0
"""The same where a test has made a host silent."""

AGENT: Final = "mstar_core.agent"


def on_hosts(plan: Plan, remote: Sequence[int]) -> Plan:
    """Return the plan with these ranks on the other host."""
    ranks = (msgspec.structs.replace(each, host=OTHER) if each.rank in remote else each for each in plan.ranks)
    return msgspec.structs.replace(plan, ranks=tuple(ranks))


class Spread(Mortal):
    """A miniature with some ranks on another host. remote: those. silence_s: after which that host is lost.

    relayed: connections between processes of the two hosts can be `cut`.
    """

    def __init__(
        self,
        family: Family,
        where: Plan,
        remote: Sequence[int],
        *,
        silence_s: float = SILENCE_S,
        relayed: bool = False,
        **changes: Any,
    ) -> None:
        super().__init__(family, where=on_hosts(where, remote), hosts=HOSTS, **changes)
        self._silence_s = silence_s
        self._relayed = relayed

    def start(self, *, makes_directory: bool = True, entry: Sequence[str] = ("-m", "tests.hosts.supervisor")) -> None:
        self._set_silence(self._silence_s)
        super().start(makes_directory=makes_directory, entry=entry)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), RELAYS: "1" if self._relayed else ""}

    # -- the other host -----------------------------------------------------------------------------------------

    @property
    def agent(self) -> int:
        """Process id of the agent that the supervisor knows."""
        return int(self.snapshot()["hosts"][OTHER]["pid"])

    @property
    def host_pids(self) -> list[int]:
        """Process ids of the other host, the agent first."""
        agent = self.agent
        return [agent, *(each.pid for each in self.processes() if each.parent == agent)]

    @property
    def agents(self) -> list[Process]:
        """Every agent that lives, given up or not."""
        return [each for each in self.processes() if AGENT in each.command]

    def lose_host(self) -> None:
        """Kill every process of the other host at once, and wait until it is given up."""
        with self.given_up():
            for pid in self.host_pids:
                self.kill(pid)

    def lose_agent(self) -> None:
        """Kill the agent of the other host, with which its processes end, and wait until it is given up."""
        with self.given_up():
            self.kill(self.agent)

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Wait behind the block, which makes the other host silent, until it is given up. Releases what waits there."""
        lost = self._losses()
        yield
        self.strikes.release()
        self._set_silence(SOON_S)
        until(lambda: self._losses() > lost, "the loss of the host")
        self._set_silence(self._silence_s)

    def _losses(self) -> int:
        return sum(event["type"] == "host.lost" for event in self.events())

    def _set_silence(self, seconds: float) -> None:
        """Change the silence after which the other host is lost."""
        path = self.root / SILENCE
        path.with_suffix(".new").write_text(str(seconds))
        path.with_suffix(".new").rename(path)

    @contextmanager
    def suspended_host(self) -> Iterator[None]:
        """Suspend every process of the other host during the block: to the others it is as if cut off.

        One that waited at a strike is released: it goes on behind the block.
        """
        pids = self.host_pids
        for pid in pids:
            self.kill(pid, signal.SIGSTOP)
        self.strikes.release()
        try:
            yield
        finally:
            for pid in pids:
                self.kill(pid, signal.SIGCONT)

    def cut(self, sender: str, receiver: str, how: str = "") -> None:
        """Break the connection from one process to another, with what is on the way. how: `silent`: without an end."""
        mark = self.root / CUT
        mark.with_suffix(".new").write_text(f"{sender} {receiver} {how}")
        mark.with_suffix(".new").rename(mark)
        until(lambda: not mark.exists(), "the cut", 2 * END_S)

    @contextmanager
    def no_room(self) -> Iterator[None]:
        """Let no host have room for another agent during the block."""
        mark = self.root / NO_ROOM
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    # -- the probe ----------------------------------------------------------------------------------------------

    def strangers(self) -> list[Process]:
        """Return the processes that neither the supervisor nor its agent has started."""
        agent = self.agent
        return [each for each in super().strangers() if agent not in (each.pid, each.parent)]

    def agent_folders(self) -> list[Path]:
        """Return the run directories of agents."""
        return list(self.root.glob(f".{self.name}@*"))

    def assert_gone(self) -> None:
        super().assert_gone()
        until(lambda: not self.agent_folders(), "the end of the run directories of agents", END_S)
