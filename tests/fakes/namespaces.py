"""Two network namespaces that stand for two hosts. Tests are skipped where the kernel or the user may not make them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import pytest

from tests.fakes.commands import output_of

ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
INTERFACES: Final = ("v0", "v1")


def inside(host: int, *words: str) -> list[str]:
    """Return the command that runs another one in the namespace of a process."""
    return ["nsenter", "-t", str(host), "-n", *words]


@contextmanager
def two_hosts() -> Iterator[tuple[int, int]]:
    """Make two namespaces that a pair of virtual interfaces connects. Yields a process in each."""
    with ExitStack() as stack:
        keepers = tuple(_keeper(stack) for _ in ADDRESSES)
        link = ["ip", "link", "add", INTERFACES[0], "type", "veth", "peer", "name", INTERFACES[1]]
        if subprocess.run(
            inside(keepers[0], *link, "netns", str(keepers[1])), capture_output=True, check=False
        ).returncode:
            pytest.skip("this kernel has no virtual interfaces (veth)")
        for host, name, address in zip(keepers, INTERFACES, ADDRESSES, strict=True):
            for words in (
                ("addr", "add", f"{address}/24", "dev", name),
                ("link", "set", name, "up"),
                ("link", "set", "lo", "up"),
            ):
                output_of(inside(host, "ip", *words))
        yield keepers[0], keepers[1]


def _keeper(stack: ExitStack) -> int:
    """Start a process in a namespace of its own, which lives as long as the process."""
    keeper = stack.enter_context(subprocess.Popen(["unshare", "-n", "sleep", "600"], stderr=subprocess.DEVNULL))
    stack.callback(keeper.kill)
    own, end = os.readlink("/proc/self/ns/net"), time.monotonic() + 60
    while keeper.poll() is None and os.readlink(f"/proc/{keeper.pid}/ns/net") == own:
        assert time.monotonic() < end
        time.sleep(1e-3)
    if keeper.poll() is not None:
        pytest.skip("this kernel or user may not make network namespaces")
    return keeper.pid
