"""ZAP authenticator: one accepted key, quiet about a flood of others, refusal once it is closed."""

from __future__ import annotations

import logging
from contextlib import suppress

import pytest
import zmq

from mstar_core.errors import TransportError
from mstar_core.transport.curve import connect_curve, make_keys, serve_curve
from mstar_core.transport.zap import Authenticator


@pytest.fixture
def keys():
    return make_keys()


def serve(context, keys) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    serve_curve(socket, keys)
    socket.bind("tcp://127.0.0.1:*")
    return socket


def send(context, endpoint: str, keys, server_key: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    connect_curve(socket, endpoint, keys, server_key)
    with suppress(zmq.Again):  # the server has refused the key already
        socket.send(b"hello", zmq.NOBLOCK)
    return socket


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def test_refusals_are_reported_once_a_minute_with_their_number(context, keys, caplog):
    caplog.set_level(logging.WARNING)
    now = [100.0]
    with Authenticator(context, keys.public, clock=lambda: now[0]), serve(context, keys) as server:
        for _ in range(5):
            with send(context, endpoint_of(server), make_keys(), keys.public):
                assert not server.poll(100)
        now[0] += 60.0
        with send(context, endpoint_of(server), make_keys(), keys.public):
            assert not server.poll(200)
    first, second = [record.getMessage() for record in caplog.records]
    assert first == "refused 1 connections with an unknown key, the last from 127.0.0.1"
    assert int(second.split()[1]) >= 5


def test_without_an_authenticator_no_client_is_accepted(context, keys):
    with serve(context, keys) as server, send(context, endpoint_of(server), keys, keys.public):
        assert not server.poll(300)


def test_after_its_end_no_client_is_accepted_and_another_may_follow(context, keys):
    with serve(context, keys) as server:
        first = Authenticator(context, keys.public)
        first.close()
        first.close()
        with send(context, endpoint_of(server), keys, keys.public):
            assert not server.poll(300)
        with Authenticator(context, keys.public), send(context, endpoint_of(server), keys, keys.public):
            assert server.poll(10_000)


def test_a_context_has_one_authenticator(context, keys):
    with Authenticator(context, keys.public), pytest.raises(TransportError, match="already"):
        Authenticator(context, keys.public)


def test_the_end_of_the_context_ends_the_thread(keys):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = Authenticator(context, keys.public)
    context.term()
    authenticator.close()
