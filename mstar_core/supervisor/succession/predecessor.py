"""Side of the deployment that is replaced: hands over what it holds, and ends once its successor serves."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from mstar_core.errors import MstarError, StartError, StateConflict
from mstar_core.supervisor.operations.rolling import RollingDeployment
from mstar_core.supervisor.succession.wire import PACKET, SERVES, Answer, Claim

if TYPE_CHECKING:
    from mstar_core.config.deployment import DeploymentSpec
    from mstar_core.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

REASON: Final = "replaced by a new deployment"


class Successor:
    """Connection of the deployment that takes over. serves: it has become ready. is_gone: its supervisor has ended."""

    def __init__(self, channel: socket.socket, changed: Callable[[], None]) -> None:
        self.serves = self.is_gone = False
        self._channel = channel
        self._changed = changed

    async def follow(self) -> None:
        """Note what the successor says, until its end."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while packet := await loop.sock_recv(self._channel, PACKET):
                self.serves = self.serves or packet == SERVES
                self._changed()
        self.is_gone = True
        self._changed()


class Replacement:
    """One replacement. drain_s: limit for the requests in flight. leave: ends the deployment; called with the reason,
    and with why requests do not finish, if any are left at the limit.
    """

    def __init__(
        self,
        deployment: RollingDeployment,
        successor: Successor,
        *,
        stop_first: bool,
        drain_s: float,
        leave: Callable[[str, str], None],
    ) -> None:
        self._deployment = deployment
        self._successor = successor
        self._stop_first = stop_first
        self._drain_s = drain_s
        self._leave = leave

    async def run(self, begins: Callable[[str, int], None]) -> None:
        """Serve until the successor does, let the requests finish, and end. Raises StartError if it ends before.

        begins: called with each step in words and the number of steps before it.
        """
        successor, changes = self._successor, self._deployment.changes
        if not self._stop_first:
            begins("the new deployment starts", 0)
            await changes.until(lambda: successor.serves or successor.is_gone)
            self._check(successor)
        begins("requests in flight finish", 1)
        has_ended = self._deployment.hand_over()
        try:
            is_over = await changes.until(lambda: has_ended() or successor.is_gone, self._drain_s)
            self._check(successor)
            self._leave(REASON, "" if is_over else f"drain took longer than {self._drain_s:g} s")
        except BaseException:
            self._deployment.take_back()
            raise

    @staticmethod
    def _check(successor: Successor) -> None:
        if successor.is_gone:
            raise StartError("the new deployment has ended", "it did not take over", "this one serves on")


def check_hosts(spec: DeploymentSpec, claim: Claim) -> None:
    """Raise StateConflict if a deployment on a cluster would serve beside its successor: its room has one owner."""
    if spec.hosts and not claim.stop_first:
        raise StateConflict(
            f"deployment {spec.name!r} on several hosts cannot be replaced while it serves",
            hint="mstarctl up --replace --stop-first ends it first",
            code="several_hosts",
        )


class HandoverServer:
    """Socket at which the successor of a deployment asks for what it holds. Owned by the supervisor's main.

    locks: returns the descriptors of its GPU locks by key.
    """

    def __init__(self, deployment: Supervisor, sock: socket.socket, locks: Callable[[], Mapping[str, int]]) -> None:
        self._deployment = deployment
        self._socket = sock
        self._locks = locks
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Accept connections on the running loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    async def stop(self) -> None:
        """Close the socket and all connections."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        with suppress(OSError):
            channel, _ = self._socket.accept()
            channel.setblocking(False)
            task = asyncio.ensure_future(self._serve(channel))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, channel: socket.socket) -> None:
        with channel:
            try:
                claim = msgspec.json.decode(await asyncio.get_running_loop().sock_recv(channel, PACKET), type=Claim)
                await self._replaced(channel, claim)
            except (OSError, ValueError, MstarError) as error:
                log.warning("a successor was not served: %s", error)

    async def _replaced(self, channel: socket.socket, claim: Claim) -> None:
        deployment = self._deployment
        try:
            deployment.operations.check_serving()
            check_hosts(deployment.spec, claim)
        except MstarError as error:
            refusal = Answer(title=error.title, detail=error.detail, hint=error.hint, code=error.code)
            channel.send(msgspec.json.encode(refusal))
            return
        locks = self._locks()
        socket.send_fds(channel, [msgspec.json.encode(Answer(gpus=tuple(locks)))], list(locks.values()))
        deployment.listener.send(channel)
        successor = Successor(channel, deployment.changes.notify)
        replacement = Replacement(
            deployment,
            successor,
            stop_first=claim.stop_first,
            drain_s=deployment.spec.drain_timeout_s,
            leave=deployment.leave,
        )
        deployment.operations.replace(replacement.run)
        await successor.follow()
