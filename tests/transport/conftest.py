"""Shared pieces of the transport tests: a private socket directory, a ZMQ context, a codec of plain bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq


class BytesCodec:
    """Messages are bytes; those that begin with `!` do not decode."""

    sender, incarnation = "api", 1

    def encode(self, message: bytes, /) -> bytes:
        return message

    def decode(self, data: bytes | memoryview, /) -> bytes:
        data = bytes(data)
        if data.startswith(b"!"):
            raise ValueError("not a message")
        return data


@pytest.fixture
def codec() -> BytesCodec:
    return BytesCodec()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: pytest's own tmp_path can be longer than a socket path may be."""
    path = Path(tempfile.mkdtemp(prefix="mstar-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)
