"""Connections to other hosts through ssh: a child process that forwards a socket, and remote commands.

The child lives as long as the command that needs it, and is replaced if it breaks. Rights are those of the remote
login's; nothing listens on TCP here.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import MstarError, Unreachable
from mstar_core.host.other_hosts.contexts import Context
from mstar_core.host.other_hosts.ssh import AGAIN, FORWARD, ssh

CONNECT_S: Final = 20.0
"""Time limit of a login, a passphrase prompt included."""

POLL_S: Final = 0.02
BACK_OFF_S: Final = (0.5, 1.0, 2.0, 5.0)
"""Delays before reconnection attempts; the last one repeats."""


@contextmanager
def forwarded(context: Context, remote: str) -> Iterator[Path]:
    """Forward a local socket to `remote`, a socket's path or HOST:PORT on the other host. Raises Unreachable.

    A broken connection is made again until the block ends; requests fail in the meantime.
    """
    with tempfile.TemporaryDirectory(prefix="mstar-ssh-") as folder:  # 0700
        tunnel = Tunnel(context, remote, Path(folder))
        try:
            tunnel.open()
            yield tunnel.local
        finally:
            tunnel.close()


class Tunnel:
    """The forwarding ssh process and its replacements. Owned by `forwarded`; a thread waits for its end."""

    def __init__(self, context: Context, remote: str, folder: Path) -> None:
        self.local = folder / "s"
        self._context = context
        self._words = ("-N", *FORWARD, "-L", f"{self.local}:{remote}")
        self._said = folder / "said"  # a file, not a pipe: ssh writes a line per failed connection
        self._closing = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, name="tunnel", daemon=True)

    def open(self) -> None:
        """Connect. Raises Unreachable with the message of ssh."""
        self._start()
        self._wait()
        self._keeper.start()

    def close(self) -> None:
        """End ssh and stop reconnecting."""
        self._closing.set()
        if self._child is not None:
            _end(self._child)
        if self._keeper.ident is not None:
            self._keeper.join(CONNECT_S)

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        with self._said.open("wb") as said:
            command = [ssh(), *self._words, *more, "--", str(self._context.ssh)]
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=said)
        return self._child

    def _keep(self) -> None:
        failures = 0
        while self._child is not None:
            started = time.monotonic()
            self._child.wait()
            failures = 0 if time.monotonic() - started > CONNECT_S else failures
            if self._closing.wait(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]):
                return
            failures += 1
            child = self._start(*AGAIN)
            if self._closing.is_set():  # closed just now: `close` has ended only the previous child
                _end(child)
                return

    def _wait(self) -> None:
        until = time.monotonic() + CONNECT_S
        while not _answers(self.local):
            if self._child is not None and self._child.poll() is not None:
                said = self._said.read_text(errors="replace").strip()
                raise unreachable(self._context, said or f"ssh ended with {self._child.returncode}")
            if time.monotonic() > until:
                raise unreachable(self._context, f"ssh did not connect within {CONNECT_S:g} s")
            time.sleep(POLL_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _answers(local: Path) -> bool:
    """Return whether ssh accepts connections; its socket file exists a moment earlier."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(local))
        except OSError:
            return False
    return True


def remote_items(context: Context, words: Sequence[str] = ("ps",)) -> list[dict[str, Any]]:
    """Return the items that a remote mstarctl command prints as JSON. Raises Unreachable, also if the command fails."""
    command = " ".join(shlex.quote(word) for word in ("mstarctl", *words, "-o", "json"))
    try:
        said = subprocess.run(
            [ssh(), "--", str(context.ssh), command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CONNECT_S * 2,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise unreachable(context, f"no answer within {error.timeout:g} s") from error
    try:
        items: list[dict[str, Any]] = json.loads(said.stdout)["items"]
    except (ValueError, KeyError, TypeError):
        detail = said.stderr.strip() or f"mstarctl there printed no JSON and ended with {said.returncode}"
        raise unreachable(context, detail) from None
    return items


def unreachable(context: Context, detail: str) -> MstarError:
    """Return the error for a host that cannot be reached."""
    return Unreachable(
        f"context {context.name!r} cannot be reached",
        detail,
        f"ssh {context.ssh} mstarctl ps, which shows the cause",
        context=context.name,
    )
