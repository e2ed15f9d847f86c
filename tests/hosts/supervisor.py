"""The real supervisor with agents on this machine as other hosts, and short pauses between restarts.

Started by `Spread` as `python -m tests.hosts.supervisor SPEC`.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

import msgspec

from mstar_core.cluster.placer import AgentOrder, Bundle, Placer, StartedAgent
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.host.run_dir import runtime_root
from mstar_core.messages.life import PeerUp
from mstar_core.messages.wire import Message
from mstar_core.supervisor import supervisor
from mstar_core.supervisor.child import Pace
from mstar_core.supervisor.main import main
from mstar_core.supervisor.outbound import Outbound
from tests.fakes.placer import ProcessPlacer
from tests.survival.strikes import Strikes
from tests.transport.relay import Relay

SILENCE: Final = "silence"
"""File in the runtime folder: seconds of silence after which a host is lost, which a test may change."""

NO_ROOM: Final = "no_room"
"""File in the runtime folder: while it exists, no host has room for another agent."""

CUT: Final = "cut"
"""File in the runtime folder: names of a sender and a receiver whose connection loses what is on the way.

With `silent` behind them, the connection and those that follow it between these two processes bring nothing, and no end
learns of it. A new process has a connection of its own.
"""

RELAYS: Final = "RELAYS"
"""Environment variable: not empty if connections between processes of two hosts can be cut."""

HELD_S: Final = 0.3
MOST_HELD_S: Final = 60.0
HELD_BYTES: Final = 200
"""A connection is cut once messages are on the way, which are larger than heartbeats and marks; at the latest then."""


class Machine(ProcessPlacer):
    """This machine as all hosts of a deployment."""

    def __init__(self, spec: DeploymentSpec) -> None:
        super().__init__({host.name: {"PYTHONPATH": os.environ["PYTHONPATH"]} for host in spec.hosts})
        self.addresses = {host.name: host.address for host in spec.hosts}
        self._mark = runtime_root() / NO_ROOM

    async def replace(self, bundle: Bundle, order: AgentOrder) -> StartedAgent:
        """See `Placer.replace`."""
        self.full = "a test has taken it" if self._mark.exists() else ""
        return await super().replace(bundle, order)


def machine(spec: DeploymentSpec) -> Placer:
    """Return the placer of a deployment."""
    return Machine(spec)


class ChangingPace(Pace):
    """A pace whose limit for the silence of a host is the one that stands in `SILENCE` now."""

    @property
    def host_silence_s(self) -> float:
        return float((runtime_root() / SILENCE).read_text())

    @host_silence_s.setter
    def host_silence_s(self, default: float) -> None:
        """Take no default."""


class CutOutbound(Outbound):
    """Introduces processes to those of other hosts at relays, which `CUT` cuts."""

    relays: Final[dict[tuple[str, str, int], Relay]] = {}

    def send(self, name: str, message: Message) -> None:
        """See `Outbound`."""
        if isinstance(message, PeerUp) and message.remote_endpoint and message.name != name:
            key = (name, message.name, message.incarnation)
            if key not in self.relays:
                self.relays[key] = Relay(message.remote_endpoint)
            message = msgspec.structs.replace(message, remote_endpoint=self.relays[key].endpoint)
        super().send(name, message)

    @classmethod
    def cut_forever(cls) -> None:
        """Cut the connections that the test names, with what is on the way."""
        mark, strikes = runtime_root() / CUT, Strikes(runtime_root())
        while True:
            time.sleep(0.02)
            if not mark.exists():
                continue
            sender, receiver, *words = mark.read_text().split()
            ends = [sender, receiver]
            keys = [key for key in list(cls.relays) if [*key[:2]] == ends]
            relays = [cls.relays[key] for key in keys]
            for relay in relays:
                relay.hold()
            strikes.release()  # the sender may wait for this
            time.sleep(HELD_S)
            end = time.monotonic() + MOST_HELD_S
            while not any(relay.on_the_way >= HELD_BYTES for relay in relays) and time.monotonic() < end:
                time.sleep(0.01)
            for key, relay in zip(keys, relays, strict=True):
                if words:  # held for ever; the introduction of a new process makes another
                    del cls.relays[key]
                else:
                    relay.drop()
            mark.unlink()


if __name__ == "__main__":
    if os.environ.get(RELAYS):
        supervisor.Outbound = CutOutbound  # type: ignore[misc]
        threading.Thread(target=CutOutbound.cut_forever, daemon=True).start()
    main(
        pace=ChangingPace(
            backoff_s=(0.05,),
            restarts_max=1_000_000,
            publish_s=0.05,
            host_retry_s=(0.2,),
        ),
        placer=machine,
    )
