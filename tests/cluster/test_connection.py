"""Wrong addresses of Ray fail within seconds, with what is there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mstar_core.cluster.connection import check_listener, is_own, split_address
from mstar_core.errors import ConfigError, Unreachable


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A server that answers each connection with some bytes and closes it; None: it keeps it open and silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if answer is not None:
                    connection.recv(64)
                    connection.sendall(answer)
                    connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


def test_a_port_without_a_listener_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(Unreachable, match=f"no Ray cluster at 127.0.0.1:{port}") as caught:
        check_listener("127.0.0.1", port)
    assert "ray start --head" in caught.value.hint


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\0" * 9])
def test_another_program_on_the_port_is_told_from_ray(answer: bytes) -> None:
    with listener(answer) as port, pytest.raises(Unreachable, match="another program than Ray listens"):
        check_listener("127.0.0.1", port)


def test_a_silent_program_on_the_port_is_told_from_ray() -> None:
    with listener(None) as port, pytest.raises(Unreachable, match="another program than Ray listens"):
        check_listener("127.0.0.1", port, timeout_s=0.2)


def test_a_server_of_http_2_passes() -> None:
    settings = b"\0\0\6\4\0\0\0\0\0" + b"\0\3\0\0\0d"
    with listener(settings) as port:
        check_listener("127.0.0.1", port)


def test_an_address_has_a_host_and_a_port() -> None:
    assert split_address("node-a:7000") == ("node-a", 7000)
    assert split_address("node-a") == ("node-a", 6379)
    for wrong in ("node-a:", ":6379", "node-a:99999", "node-a:port"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            split_address(wrong)
    with pytest.raises(ConfigError) as caught:
        split_address("ray://node-a:10001")
    assert "ray start --address" in caught.value.hint


def test_every_address_of_this_host_is_its_own() -> None:
    assert is_own("127.0.0.1") and is_own("127.9.8.7")
    assert not is_own("192.0.2.77")
    assert not is_own("no address")
