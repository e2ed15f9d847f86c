"""Reaches another host by the system's ssh: one child that forwards a socket, and one command run there.

The child lives as long as the command that needs it. Authority is the remote login's; nothing listens on TCP here.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import MstarError, Unreachable
from mstarctl.client.contexts import Context

CONNECT_S: Final = 20.0
"""How long a login may take, a question for a passphrase included."""

POLL_S: Final = 0.02
FORWARD: Final = (
    "-N",
    "-o",
    "ExitOnForwardFailure=yes",
    "-o",
    "StreamLocalBindUnlink=yes",
    "-o",
    "StreamLocalBindMask=0177",
)


@contextmanager
def forwarded(context: Context, remote: str) -> Iterator[Path]:
    """A local socket that leads to `remote` there: a socket's path, or HOST:PORT. Raises Unreachable."""
    with tempfile.TemporaryDirectory(prefix="mstar-ssh-") as folder:  # 0700
        local = Path(folder) / "s"
        command = [ssh(), *FORWARD, "-L", f"{local}:{remote}", "--", str(context.ssh)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
            try:
                _wait(child, local, context)
                yield local
            finally:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    child.kill()


def ssh() -> str:
    """The system's ssh. Raises Unreachable."""
    found = shutil.which("ssh")
    if found is None:
        raise Unreachable("there is no ssh on this machine", hint="install OpenSSH's client, or run mstarctl there")
    return found


def _wait(child: subprocess.Popen[str], local: Path, context: Context) -> None:
    until = time.monotonic() + CONNECT_S
    while not _answers(local):
        if child.poll() is not None:
            said = child.stderr.read().strip() if child.stderr is not None else ""
            raise unreachable(context, said or f"ssh ended with {child.returncode}")
        if time.monotonic() > until:
            raise unreachable(context, f"ssh did not connect within {CONNECT_S:g} s")
        time.sleep(POLL_S)


def _answers(local: Path) -> bool:
    """Whether ssh listens: its socket is there a moment before it takes connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(local))
        except OSError:
            return False
    return True


def remote_items(context: Context, words: Sequence[str] = ("ps",)) -> list[dict[str, Any]]:
    """The items that a command of mstarctl prints there as JSON. Raises Unreachable, and the error it ended with."""
    command = " ".join(shlex.quote(word) for word in ("mstarctl", *words, "-o", "json"))
    try:
        said = subprocess.run(
            [ssh(), "--", str(context.ssh), command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=CONNECT_S * 2, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise unreachable(context, f"no answer within {error.timeout:g} s") from error
    try:
        found: list[dict[str, Any]] = json.loads(said.stdout)["items"]
    except (ValueError, KeyError, TypeError):
        detail = said.stderr.strip() or f"mstarctl there printed no JSON and ended with {said.returncode}"
        raise unreachable(context, detail) from None
    return found


def unreachable(context: Context, detail: str) -> MstarError:
    """What is said when a host cannot be reached."""
    return Unreachable(
        f"context {context.name!r} cannot be reached",
        detail,
        f"ssh {context.ssh} mstarctl ps, to see what is in the way",
    )
