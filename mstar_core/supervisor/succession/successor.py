"""Side of the deployment that takes over: gets the listening socket and the GPUs, and the name at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import StartError
from mstar_core.host.aliases import NEXT
from mstar_core.host.gpu_locks import MemoryClaim, held_bytes, is_share, note_holder, release, resize_gpus
from mstar_core.host.leftovers import end_leftovers
from mstar_core.host.run_dir import RunDirectory
from mstar_core.supervisor.listener import PortListener
from mstar_core.supervisor.succession.wire import MOST_FDS, PACKET, SERVES, Answer, Claim, connect

if TYPE_CHECKING:
    from mstar_core.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
POLL_S: Final = 0.02
END_S: Final = 60.0
"""Longest time from the end of the connection to that of the supervisor."""


class Takeover:
    """The takeover of a running deployment. Owned by main of the new one's supervisor.

    listener: the socket of the old one. locks: descriptors of the locks of its GPUs that the new one uses, by key.
    """

    def __init__(
        self, spec: DeploymentSpec, channel: socket.socket, listener: PortListener, locks: Mapping[str, int]
    ) -> None:
        self.listener = listener
        self.locks = locks
        self._channel = channel
        self._old = RunDirectory(Path(spec.replaces))
        self._run = RunDirectory(Path(spec.run_dir))
        self._stop_first = spec.stop_first
        self._claims = spec.claims
        self._pid = self._old.holder()

    @classmethod
    def begin(cls, spec: DeploymentSpec) -> Self:
        """Ask the deployment that `spec` replaces for what it holds. Raises StartError if it refuses."""
        channel = connect(RunDirectory(Path(spec.replaces)).handover_socket, ANSWER_S)
        try:
            channel.send(msgspec.json.encode(Claim(stop_first=spec.stop_first)))
            packet, fds, _, _ = socket.recv_fds(channel, PACKET, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
            answer = msgspec.json.decode(packet, type=Answer)
            if answer.title:
                raise StartError(answer.title, answer.detail, answer.hint, phase="plan", code=answer.code)
            listener = PortListener.receive(channel)
        except (OSError, ValueError) as error:
            channel.close()
            why = "another version of mstarctl started it, or it has ended"
            raise StartError("the deployment to replace does not answer", str(error), why, phase="plan") from error
        except BaseException:
            channel.close()
            raise
        locks = dict(zip(answer.gpus, fds, strict=False))
        unused = [key for key, fd in locks.items() if not _is_kept(spec, key, fd)]
        for key in unused:
            os.close(locks.pop(key))
        try:
            resize_gpus(
                locks, {key: _beside(spec.claims[key], locks[key]) for key in locks.keys() & spec.claims}, spec.name
            )
        except BaseException:
            release(locks)
            listener.close()
            channel.close()
            raise
        return cls(spec, channel, listener, locks)

    def close(self) -> None:
        """Give up the takeover, if the old deployment is still there: it serves on."""
        self._channel.close()

    async def before_start(self, deployment: Supervisor) -> None:
        """Wait for the end of the old deployment if it stops first."""
        if self._stop_first:
            await self._inherit(deployment)

    async def when_ready(self, deployment: Supervisor) -> None:
        """Let the old deployment end once the new one serves, and take its name."""
        if self._stop_first:
            return
        await deployment.changes.until(lambda: deployment.state != "starting")
        if deployment.state in ("failed", "stopping"):
            return
        with suppress(OSError):  # the old one has ended by itself
            await asyncio.get_running_loop().sock_sendall(self._channel, SERVES)
        await self._inherit(deployment)

    async def _inherit(self, deployment: Supervisor) -> None:
        """Wait until nothing of the old deployment is left, then take its name."""
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        with suppress(OSError):
            while await loop.sock_recv(self._channel, PACKET):
                pass
        for _ in range(int(END_S / POLL_S)):  # it removes its directory and releases the lock
            if self._old.holder() != self._pid:
                break
            await asyncio.sleep(POLL_S)
        end_leftovers(self._old)
        try:
            self._run.take_name()
        except OSError as error:
            log.error("the deployment stays known as %s%s: %s", self._run.name, NEXT, error.strerror)
        for fd in self.locks.values():
            note_holder(fd, self._run.name)
        with suppress(StartError):  # it can only shrink to its own budget
            resize_gpus(self.locks, self._claims, self._run.name)
        deployment.events.add("deployment.replaced", old_pid=self._pid)


def _is_kept(spec: DeploymentSpec, key: str, fd: int) -> bool:
    """Return whether the successor keeps a lock. Beside a predecessor that shares a GPU it takes its own share."""
    return key in spec.gpus.values() and (not is_share(fd) or (spec.stop_first and key in spec.claims))


def _beside(claim: MemoryClaim, fd: int) -> MemoryClaim:
    """Return a claim that covers the predecessor too, which uses its memory until it ends."""
    return msgspec.structs.replace(claim, need_bytes=max(claim.need_bytes, held_bytes(fd) or 0))
