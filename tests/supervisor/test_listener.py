"""The listening socket of a deployment outlives the processes that use it, and goes from supervisor to supervisor."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from mstar_core.errors import StartError, TransportError
from mstar_core.supervisor.listener import PortListener
from tests.fakes.ports import free_port


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a Unix socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def inherited(listener: PortListener) -> socket.socket:
    """The socket as an api has it."""
    return socket.socket(fileno=socket.dup(listener.open()))


def test_connections_wait_while_no_api_runs() -> None:
    port = free_port()
    with closing(PortListener("127.0.0.1", port)) as listener:
        with inherited(listener) as first:
            first.listen()
        with socket.create_connection(("127.0.0.1", port)) as client, inherited(listener) as second:
            second.setblocking(True)
            served, _ = second.accept()
            with served:
                served.sendall(b"answer")
            assert client.recv(6) == b"answer"


def test_a_closed_listener_refuses_and_can_be_opened_again() -> None:
    port = free_port()
    with closing(PortListener("127.0.0.1", port)) as listener:
        with inherited(listener) as api:
            api.listen()
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert listener.open() >= 0


def test_another_supervisor_takes_the_socket_without_a_gap(pair: tuple[socket.socket, socket.socket]) -> None:
    port = free_port()
    old = PortListener("127.0.0.1", port)
    with inherited(old) as api:
        api.listen()
    old.send(pair[0])
    old.close()
    with closing(PortListener.receive(pair[1])) as new, socket.create_connection(("127.0.0.1", port)) as client:
        with inherited(new) as api:
            api.setblocking(True)
            served, address = api.accept()
            served.close()
        assert address == client.getsockname()


def test_a_descriptor_of_something_else_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    socket.send_fds(pair[0], [b"hello"], [pair[0].fileno()])
    with pytest.raises(TransportError, match="not handed over"):
        PortListener.receive(pair[1])


def test_a_port_in_use_is_named_with_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(StartError, match="is taken") as caught:
            PortListener("127.0.0.1", taken.getsockname()[1]).open()
    assert caught.value.code == "port_in_use" and "--port" in caught.value.hint
