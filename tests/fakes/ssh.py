"""Fake ssh for one machine: runs commands locally, and forwards a socket with real relays.

Accepts the commands of mstarctl: `ssh -N OPTIONS -L LOCAL:REMOTE -- HOST` and `ssh -- HOST COMMAND`. Host `nowhere`
refuses the login. Run as a program; it writes the arguments of each call to $FAKE_SSH_LOG, and the last pid to
$FAKE_SSH_LOG.pid.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path


def main() -> None:
    """Entry point. Exits as ssh does."""
    words = sys.argv[1:]
    with Path(os.environ["FAKE_SSH_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(words) + "\n")
    Path(f"{os.environ['FAKE_SSH_LOG']}.pid").write_text(str(os.getpid()))
    options, (host, *command) = words[: words.index("--")], words[words.index("--") + 1 :]
    if host.endswith("nowhere"):
        print("ssh: connect to host nowhere port 22: No route to host", file=sys.stderr)
        sys.exit(255)
    if "-N" in options:
        assert "ExitOnForwardFailure=yes" in options and "StreamLocalBindUnlink=yes" in options
        local, _, remote = options[options.index("-L") + 1].partition(":")
        forward(local, remote)
    sys.exit(subprocess.run(["sh", "-c", " ".join(command)], check=False).returncode)


def forward(local: str, remote: str) -> None:
    """Relay every connection until killed."""
    with socket.socket(socket.AF_UNIX) as server:
        Path(local).unlink(missing_ok=True)
        server.bind(local)
        server.listen()
        while True:
            here, _ = server.accept()
            threading.Thread(target=join, args=(here, connect(remote)), daemon=True).start()


def connect(remote: str) -> socket.socket:
    """Connect to the other end: the path of a Unix socket, or HOST:PORT."""
    if remote.startswith("/"):
        there = socket.socket(socket.AF_UNIX)
        there.connect(remote)
        return there
    host, _, port = remote.rpartition(":")
    return socket.create_connection((host, int(port)))


def join(here: socket.socket, there: socket.socket) -> None:
    """Relay in both directions until either end closes."""
    back = threading.Thread(target=pump, args=(there, here), daemon=True)
    back.start()
    pump(here, there)
    back.join()
    here.close()
    there.close()


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return


if __name__ == "__main__":
    main()
