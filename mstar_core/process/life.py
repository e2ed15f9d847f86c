"""Link of a child process to its supervisor: hello, start-up phases, heartbeats, telemetry, stop.

Used by api, conductor and worker. It never waits and owns no socket: the process's own loop calls `beat` and `on`.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import MstarError
from mstar_core.messages.adapters import AdapterDone
from mstar_core.messages.life import (
    Beat,
    Hello,
    LinkBroken,
    LogLevel,
    PeerDown,
    PeerReady,
    PeerUp,
    Phase,
    Ping,
    Stop,
    Telemetry,
)
from mstar_core.messages.names import follower_name, worker_name
from mstar_core.messages.sleep import SleepDone, SleepProgress, WakeWanted
from mstar_core.messages.telemetry import EdgeNews, MetricSample, RequestNews, SessionNews, Span
from mstar_core.messages.wire import Envelope, Message
from mstar_core.process.failures import guarded_run
from mstar_core.process.logs import start_logging
from mstar_core.process.peers import Peers
from mstar_core.process.silences import Silences
from mstar_core.process.system import end_imports
from mstar_core.ticks import next_tick

if TYPE_CHECKING:
    from mstar_core.transport import Courier, LinkBreak

HELLO_S: Final = 0.2
BEAT_S: Final = 1.0
PING_LIMIT_S: Final = 10.0
"""Silence of the supervisor after which a child ends: ten pings, the limit that the supervisor has for heartbeats.

The kernel ends the children of a dead supervisor (see `entry.py`); this limit is for a supervisor that hangs.
"""

SUPERVISOR: Final = "supervisor"

RANKED: Final = {"worker": worker_name, "follower": follower_name}
"""Kinds of processes that have a rank, with the function that names them."""

log = logging.getLogger("mstar.child")


class ChildArguments(NamedTuple):
    """Arguments of a child process. name: of its mailbox. supervisor: endpoint of the supervisor's mailbox.

    meet: where the members of its tensor-parallel group meet, if they are on several hosts (parallel/meeting.py).
    """

    name: str
    spec: DeploymentSpec
    incarnation: int
    supervisor: str
    rank: int = -1
    meet: str = ""


def start_child(kind: str, argv: Sequence[str] | None) -> ChildArguments:
    """Parse `SPEC --incarnation N --supervisor ENDPOINT [--rank R [--meet PLACE]]`, start the log. See `entry.py`."""
    end_imports()
    parser = argparse.ArgumentParser(prog=f"mstar_core.{kind}")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--supervisor", default="")
    if kind in RANKED:
        parser.add_argument("--rank", type=int, required=True)
        parser.add_argument("--meet", default="")
    args = parser.parse_args(argv)
    args.spec = DeploymentSpec.load(args.spec)
    arguments = ChildArguments(**{"name": RANKED[kind](args.rank) if kind in RANKED else kind, **vars(args)})
    start_logging(arguments.name, arguments.spec.log_level, secrets=arguments.spec.api.secrets)
    return arguments


class ChildLife:
    """State of one process towards its supervisor. Owned by the process's main loop.

    stop_reason: set when the supervisor asks the process to stop or is lost. known: the supervisor has answered.
    stale: number of dropped messages of processes that had ended. heard: returns the processes of other hosts, with
    their incarnations, of which its mailbox has got anything since the last call.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        spec: DeploymentSpec,
        courier: Courier,
        *,
        supervisor: str = "",
        fd_endpoint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """supervisor: endpoint of its mailbox; empty in tests, then nothing is sent and silence has no effect.

        The owner sets the endpoints for other hosts, if there are any, before the first `beat`, which announces them.
        """
        self.name = name
        self.incarnation = incarnation
        self.endpoint = f"ipc://{spec.ipc_dir / f'{name}.{incarnation}'}"
        self.fd_endpoint = fd_endpoint
        self.remote_endpoint = self.blob_endpoint = ""
        self.known = False
        self.stale = 0
        self.stop_reason: str | None = None
        self._run_dir = Path(spec.run_dir)
        self._courier = courier
        self._peers = Peers()
        self._clock = clock
        self._host = spec.on_host
        self._elsewhere: set[str] = set()  # peers of other hosts
        self.heard: Callable[[], Collection[tuple[str, int]]] = frozenset
        self._silences = Silences()
        self._alone = not supervisor
        self._phase = ""
        self._ready: Phase | None = None  # to be sent once the process is known
        self._next_send = clock()
        self._seen = clock()
        self._silence_s = self._watched_s = 0.0
        if supervisor:
            courier.connect(SUPERVISOR, supervisor, 0)

    def beat(self, now: float, *, work_ready: bool = False, steps: int = 0) -> None:
        """Send hello until known, then a heartbeat each second, and measure the silence of the supervisor.

        Also sends messages to other peers that wait for room.

        Call it again after `wait_s` or sooner, after draining the mailbox. Sets `stop_reason` when the supervisor is
        lost.
        """
        if self._alone:
            return
        self._courier.send_waiting()
        # A stopped or busy process reads its pings late, so only time in which this loop ran counts as silence.
        passed_s = min(now - self._seen, BEAT_S)
        self._silence_s += passed_s
        self._watched_s += passed_s
        self._seen = now
        if self._silence_s > PING_LIMIT_S and self.stop_reason is None:
            self.stop_reason = f"the supervisor has been silent for {PING_LIMIT_S:g} s"
        if now < self._next_send:
            return
        if self.known:
            self._next_send = next_tick(now, BEAT_S)
            self._send(Beat(name=self.name, incarnation=self.incarnation, work_ready=work_ready, steps=steps))
            self._watch_links()
        else:
            self._next_send = now + HELLO_S
            self._send(self._hello())

    def wait_s(self, now: float) -> float:
        """Return the seconds until `beat` must be called again, for loops that wait by themselves."""
        return max(0.0, self._next_send - now)

    def accepts(self, envelope: Envelope) -> bool:
        """Return whether to handle a message: its sender may live, or its content stays valid without the sender."""
        is_valid = self._peers.accepts(envelope)
        self.stale += not is_valid
        return is_valid

    def receive(self, envelope: Envelope) -> tuple[Message, ...]:
        """Handle an accepted message. Returns the messages that its owner has to handle, in order.

        PeerUp and PeerDown connect or disconnect the peer here and are returned. The first message of a new incarnation
        that overtakes the announcement of its predecessor's death is preceded by that announcement.
        """
        message = envelope.body
        down = self._succeed(envelope.sender, envelope.incarnation)
        match message:
            case PeerUp(name=self.name):
                pass
            case PeerUp() | PeerReady() if self._peers.is_over(message.name, message.incarnation):
                return down
            case PeerUp():
                down += self._succeed(message.name, message.incarnation)
            case PeerDown() if not self._peers.ended(message.name, message.incarnation):
                return down
        return down if self._on(message) else (*down, message)

    def _succeed(self, name: str, incarnation: int) -> tuple[Message, ...]:
        """Note a living peer. Returns the death of its predecessor if it was not announced yet."""
        before = self._peers.appeared(name, incarnation)
        if before is None:
            return ()
        self._courier.disconnect(name, before)
        return (PeerDown(name=name, incarnation=before, cause=f"{name} was replaced"),)

    def _on(self, message: Message) -> bool:
        """Handle a life-cycle message. Returns False if the owner has to handle it too."""
        match message:
            case Ping():
                self._silence_s = 0.0
            case PeerUp(name=self.name):
                self._introduced(message)
                self._silence_s = 0.0
            case PeerUp():
                self._connect(message)
                return False
            case PeerDown():
                self._courier.disconnect(message.name, message.incarnation)
                self._silences.forget(message.name, message.incarnation)
                return False
            case LogLevel():
                logging.getLogger().setLevel(message.level)
                log.info("log level set to %s", message.level)
            case Stop():
                self.stop_reason = self.stop_reason or message.reason or "stopped by the supervisor"
            case _:
                return False
        return True

    def link_broken(self, lost: LinkBreak) -> None:
        """Report that messages of a process of another host were lost. The supervisor then restarts one of the two."""
        if not self._peers.is_over(lost.sender, lost.incarnation):
            log.error("%d messages of %s were lost with a connection", lost.lost, lost.sender)
            self._send(LinkBroken(peer=lost.sender, incarnation=lost.incarnation, lost=lost.lost))

    def _watch_links(self) -> None:
        """Report peers of other hosts of which nothing comes, not even marks. The supervisor knows whether they run."""
        passed_s, self._watched_s = self._watched_s, 0.0
        for peer in self._silences.add(passed_s, self.heard()):
            log.warning("nothing has come from %s for %.0f s", peer.name, peer.seconds)
            self._send(LinkBroken(peer=peer.name, incarnation=peer.incarnation, silent_s=round(peer.seconds, 1)))

    def is_elsewhere(self, name: str) -> bool:
        """Return whether a peer is on another host: its clock and its memory are not those of this process."""
        return name in self._elsewhere

    def blobs_of(self, message: PeerUp) -> str:
        """Return where a peer of another host serves its tensors; empty for one of this host."""
        return message.blob_endpoint if message.host != self._host else ""

    def _connect(self, message: PeerUp) -> None:
        endpoint = message.endpoint
        if message.host == self._host:
            self._elsewhere.discard(message.name)
        else:
            self._elsewhere.add(message.name)
            endpoint = message.remote_endpoint
        if endpoint:
            self._courier.connect(message.name, endpoint, message.incarnation)
            if message.host != self._host:
                self._silences.expect(message.name, message.incarnation)
        else:
            log.error("%s has no endpoint for other hosts", message.name)

    def _introduced(self, message: PeerUp) -> None:
        """Handle the supervisor's answer to the hello, which follows the introductions of all peers."""
        self.known = self.known or message.incarnation == self.incarnation
        if self.known and self._ready is not None:
            self._send(self._ready)
            self._ready = None

    def phase(
        self, phase: str, *, done: int = 0, total: int = 0, detail: str = "", facts: dict[str, Any] | None = None
    ) -> None:
        """Report a start-up phase, or progress in it. done, total: bytes, or the unit that `detail` names.

        `ready` is reported once the supervisor has introduced all peers, because they send work at once and the answers
        need their addresses.
        """
        self._phase = phase
        message = Phase(
            name=self.name,
            incarnation=self.incarnation,
            phase=phase,
            done=done,
            total=total,
            detail=detail,
            facts=facts or {},
        )
        if phase == "ready" and not self.known:
            self._ready = message
        else:
            self._send(message)

    def telemetry(
        self,
        values: Mapping[str, float],
        requests: list[RequestNews] | None = None,
        spans: list[Span] | None = None,
        edges: list[EdgeNews] | None = None,
        *,
        dropped: int = 0,
        samples: list[MetricSample] | None = None,
        events: list[tuple[str, dict[str, Any]]] | None = None,
        sessions: list[SessionNews] | None = None,
    ) -> None:
        """Send one telemetry batch. The caller sends at most one per 100 ms. values: by reading."""
        self._send(
            Telemetry(
                name=self.name,
                incarnation=self.incarnation,
                at=self._clock(),
                values={f"{self.name}.{reading}": float(value) for reading, value in values.items()},
                requests=requests or [],
                spans=spans or [],
                edges=edges or [],
                dropped=dropped,
                samples=samples or [],
                events=events or [],
                sessions=sessions,
            )
        )

    def answer(self, message: AdapterDone | SleepDone | SleepProgress | WakeWanted) -> None:
        """Answer an order of the supervisor about an adapter or a sleep, or report that requests wait for a wake."""
        self._send(message)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Wrap a process's main: record an error that ends it, then exit with that error's code."""
        with guarded_run(self.name, self.incarnation, self._run_dir, lambda: self._phase):
            yield

    def _hello(self) -> Hello:
        return Hello(
            name=self.name,
            incarnation=self.incarnation,
            pid=os.getpid(),
            endpoint=self.endpoint,
            fd_endpoint=self.fd_endpoint,
            host=self._host,
            remote_endpoint=self.remote_endpoint,
            blob_endpoint=self.blob_endpoint,
        )

    def _send(self, message: Any) -> None:
        if self._alone:
            return
        with suppress(MstarError):  # missing pings reveal a supervisor that does not read
            self._courier.send(SUPERVISOR, message)
