"""Fake ssh for one machine: runs commands locally, and forwards a socket with real relays.

Accepts the commands of mstarctl: `ssh OPTIONS -L LOCAL:REMOTE... -- HOST [COMMAND]`, without one with `-N`, and `ssh --
HOST COMMAND`. Host `nowhere` refuses the login. Run as a program; it writes the arguments of each call to
$FAKE_SSH_LOG, and the last pid to $FAKE_SSH_LOG.pid. With $FAKE_SSH_HOSTS each host is a folder below that: it has the
run directories and the locks of the host, and a file for each ssh process, `ssh.PID`. A file `down` there refuses the
login.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from mstar_core.host.ledger.lock_files import FOLDER_VARIABLE


def main() -> None:
    """Entry point. Exits as ssh does."""
    words = sys.argv[1:]
    with Path(os.environ["FAKE_SSH_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(words) + "\n")
    Path(f"{os.environ['FAKE_SSH_LOG']}.pid").write_text(str(os.getpid()))
    options, (host, *command) = words[: words.index("--")], words[words.index("--") + 1 :]
    if host.endswith("nowhere") or (Path(os.environ.get("FAKE_SSH_HOSTS", "/nowhere")) / host / "down").exists():
        print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr)
        sys.exit(255)
    if "FAKE_SSH_HOSTS" in os.environ:
        (Path(os.environ["FAKE_SSH_HOSTS"]) / host / f"ssh.{os.getpid()}").touch()
    if "-L" in options:
        assert "ExitOnForwardFailure=yes" in options and "StreamLocalBindUnlink=yes" in options
        forwards = [words[1] for words in itertools.pairwise(options) if words[0] == "-L"]
        for each in forwards:
            threading.Thread(target=forward, args=(each,), daemon=True).start()
        sys.exit(threading.Event().wait() if "-N" in options else subprocess.call(["sh", "-c", " ".join(command)]))
    os.execvpe("sh", ["sh", "-c", " ".join(["exec", *command])], environment(host))


def environment(host: str) -> dict[str, str]:
    """Return the environment of commands on a host, after a login that is not refused."""
    root = os.environ.get("FAKE_SSH_HOSTS")
    if root is None:
        return dict(os.environ)
    folder = Path(root) / host
    return {**os.environ, "MSTAR_RUNTIME_DIR": str(folder / "run"), FOLDER_VARIABLE: str(folder / "locks")}


def forward(each: str) -> None:
    """Relay every connection until killed. each: PATH:REMOTE, or ADDRESS:PORT:REMOTE."""
    local, _, remote = each.partition(":")
    family = socket.AF_UNIX if local.startswith("/") else socket.AF_INET
    with socket.socket(family) as server:
        if family is socket.AF_UNIX:
            Path(local).unlink(missing_ok=True)
            server.bind(local)
        else:
            port, _, remote = remote.partition(":")
            server.bind((local, int(port)))
        server.listen()
        while True:
            here, _ = server.accept()
            threading.Thread(target=join, args=(here, remote), daemon=True).start()


def connect(remote: str) -> socket.socket:
    """Connect to the other end: the path of a Unix socket, or HOST:PORT."""
    if remote.startswith("/"):
        there = socket.socket(socket.AF_UNIX)
        there.connect(remote)
        return there
    host, _, port = remote.rpartition(":")
    return socket.create_connection((host, int(port)))


def join(here: socket.socket, remote: str) -> None:
    """Relay in both directions until either end closes. A connection that is refused there is closed here."""
    try:
        there = connect(remote)
    except OSError:
        here.close()
        return
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
