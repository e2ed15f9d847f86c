"""Keeper: connections are left with the supervisor before the loop of the process turns."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from typing import Any, cast

from sanic import Sanic

from mstar_core.api.handover.keeper import Keeper
from mstar_core.api.http.listener import Listener
from mstar_core.transport.fd_store import FdStore, FdStoreClient


def keeper_of(store: FdStore, incarnation: int) -> Keeper:
    """The keeper of a process that inherits the store's socket."""
    return Keeper(FdStoreClient(socket.socket(fileno=store.offer()), incarnation))


async def test_an_accepted_connection_outlives_a_process_that_dies_before_its_next_turn() -> None:
    with closing(FdStore()) as store, socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        with socket.create_connection(server.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1")
            with closing(keeper_of(store, 1)) as first:
                listener = Listener(cast("Sanic[Any, Any]", None), server, 8, keeper=first)
                listener._accept()  # and no turn of the loop behind it
                with closing(keeper_of(store, 2)) as second:
                    ((connection, kept),) = await second.take()
                    with connection:
                        assert connection.recv(14) == b"GET / HTTP/1.1"
                        assert kept.recording.unsent(connection) == b""
                        kept.end()
                listener.stop()
                await asyncio.gather(*listener._handshakes, return_exceptions=True)
            assert client.recv(1) == b""
