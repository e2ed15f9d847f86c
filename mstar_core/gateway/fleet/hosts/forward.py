"""Connection to one deployment of another host: an ssh process that forwards its api and its admin socket."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit, urlunsplit

from mstar_core.errors import Unreachable
from mstar_core.gateway.fleet.hosts.messages import DeploymentReport
from mstar_core.host.network import LOOPBACK, free_ports
from mstar_core.host.other_hosts.ssh import AGAIN, FORWARD, SOON, ssh

OPEN_S: Final = 60.0
"""Longest login."""

HOLD: Final = "cat >/dev/null"
"""Command that ends with its input, so that ssh ends even if the gateway is killed."""

POLL_S: Final = 0.05
END_S: Final = 5.0


class ReplicaForward:
    """The ends of the connection on this host. Owned by a RemoteHost.

    url: of the api here. socket: path of the admin socket here. source: of the deployment there, for which a new
    connection is needed if it changes.
    """

    def __init__(self, destination: str, there: DeploymentReport, socket: Path) -> None:
        parts = urlsplit(there.url)
        address = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        self._port = free_ports(LOOPBACK, 1)[0]
        self.url = urlunsplit(parts._replace(netloc=f"{LOOPBACK}:{self._port}"))
        self.socket = socket
        self.source = (there.url, there.socket)
        self._words = [
            *("-T", *SOON, *FORWARD, *AGAIN),
            *("-L", f"{LOOPBACK}:{self._port}:{address}:{parts.port}"),
            *("-L", f"{socket}:{there.socket}"),
            *("--", destination, HOLD),
        ]
        self._child: asyncio.subprocess.Process | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile()  # not a pipe: ssh writes a line per failed connection
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether requests reach the deployment's host."""
        return self._is_open and self._child is not None and self._child.returncode is None

    async def open(self) -> None:
        """Connect. Raises Unreachable with the message of ssh."""
        self._child = await asyncio.create_subprocess_exec(
            ssh(),
            *self._words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(OPEN_S):
                while not await self._answers():
                    if self._child.returncode is not None:
                        raise Unreachable("ssh cannot forward", self._reason(), "see AllowTcpForwarding of its server")
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Unreachable("ssh cannot forward", f"not within {OPEN_S:g} s") from error
        self._is_open = True

    async def close(self) -> None:
        """End ssh; requests that run through it break."""
        self._is_open = False
        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                self._child.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await self._child.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._child.kill()
                await self._child.wait()
        self._said.close()
        self.socket.unlink(missing_ok=True)

    def _reason(self) -> str:
        self._said.seek(0)
        return self._said.read().decode("utf-8", "replace").strip()

    async def _answers(self) -> bool:
        """Return whether ssh accepts connections; the file of its socket exists a moment earlier."""
        try:
            _, port = await asyncio.open_connection(LOOPBACK, self._port)
            port.close()
            _, socket = await asyncio.open_unix_connection(str(self.socket))
            socket.close()
        except OSError:
            return False
        return True
