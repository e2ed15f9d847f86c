"""Main of the agent: calls arrive on stdin, answers leave on stdout."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

from mstar_core.gateway.fleet.hosts.agent import HostAgent
from mstar_core.gateway.fleet.hosts.remote_host import LINE_LIMIT
from mstar_core.gateway.fleet.local_host import LocalHost
from mstar_core.process.logs import start_logging


def run_agent(host: LocalHost) -> None:
    """Serve one gateway until it closes the connection. Deployments that were started go on."""
    start_logging("agent", "WARNING", stream=sys.stderr)  # stdout carries the answers
    with suppress(BrokenPipeError, ConnectionError):
        asyncio.run(_served(host))


async def _served(host: LocalHost) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    out = os.dup(sys.stdout.fileno())

    async def write(data: bytes) -> None:
        await asyncio.to_thread(_write_all, out, data)

    try:
        await HostAgent(host, write).serve(reader)
    finally:
        os.close(out)


def _write_all(out: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(out, left) :]
