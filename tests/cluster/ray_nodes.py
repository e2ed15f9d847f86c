"""Nodes of Ray on this machine, by `ray start`. Each has an address of the loopback network and its own folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CUDA_"))},
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that ends is noticed after 2 s instead of 20.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


class RayNode(NamedTuple):
    """A node. address: of its network. folder: of its files, whose path is part of its processes' command lines."""

    address: str
    folder: Path

    def pids(self, word: str = "") -> list[int]:
        """Return the processes of the node with a word in their command line: `raylet/raylet`, `gcs_server`."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
                if f"{self.folder}/" in f"{line}/" and word in line and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    def raylet(self) -> int:
        """Return the process of the raylet."""
        return next(pid for pid in self.pids("raylet/raylet") if "gcs_server" not in _executable(pid))

    def workers(self) -> list[int]:
        """Return the worker processes, which are children of the raylet."""
        children = Path(f"/proc/{self.raylet()}/task/{self.raylet()}/children").read_text().split()
        return [int(pid) for pid in children if "/agent" not in _command(int(pid))]

    def kill(self, word: str = "") -> None:
        """Kill processes of the node, all without a word."""
        for pid in self.pids(word):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def ray_node(
    address: str, *, head: str = "", port: int = 0, cpus: int = 1, gpus: int = 0, **variables: str
) -> Iterator[RayNode]:
    """Start a node and end it with all its processes. head: `HOST:PORT` of the head; empty: it is one, at `port`."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # paths of sockets have 107 bytes at most, and Ray's part is long
    node = RayNode(address, folder)
    place = [f"--address={head}"] if head else ["--head", f"--port={port}", "--include-dashboard=false"]
    words = [
        *(str(Path(sys.executable).parent / "ray"), "start", *place),
        *(f"--node-ip-address={address}", f"--temp-dir={folder}", "--object-store-memory=80000000"),
        *(f"--num-cpus={cpus}", f"--num-gpus={gpus}", "--include-log-monitor=false", "--disable-usage-stats"),
    ]
    try:
        environment = {**ENVIRONMENT, **variables}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield node
    finally:
        node.kill()
        shutil.rmtree(folder, ignore_errors=True)
