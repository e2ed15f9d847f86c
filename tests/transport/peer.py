"""A process for the tests to stop and kill: `peer.py ROLE DIRECTORY`. Takes a command per line, answers with a line."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import zmq

from mstar_core.messages.tensors import TensorRef
from mstar_core.transport import Mailbox, RemoteAccess, mailbox_endpoint, read_keys
from mstar_core.transport.shm import TensorTransport

INCARNATION = 1


class RawCodec:
    def encode(self, message: bytes, /) -> bytes:
        return message

    def decode(self, data: bytes, /) -> bytes:
        return data


def lend(directory: Path) -> None:
    """`put BYTES FILL`: lend a tensor, answer with its handle."""
    with TensorTransport("owner", INCARNATION, directory, segment_bytes=1 << 20) as transport:
        answer(transport.endpoint)
        for line in sys.stdin:
            _, size, fill = line.split()
            ref = transport.put(np.full(int(size), int(fill), dtype=np.uint8), "reader")
            answer(msgspec.json.encode(ref).decode())


def lend_away(directory: Path) -> None:
    """As `lend`, for readers of other hosts that have the keys in the file `keys`."""
    access = RemoteAccess("127.0.0.1", read_keys(directory / "keys"))
    with TensorTransport("owner", INCARNATION, directory, remote=access) as transport:
        answer(transport.blob_endpoint)
        for line in sys.stdin:
            _, size, fill = line.split()
            ref = transport.put(np.full(int(size), int(fill), dtype=np.uint8), "reader")
            answer(msgspec.json.encode(ref).decode())


def read(directory: Path) -> None:
    """`ENDPOINT HANDLE`: map the tensor, keep it, answer with its sum."""
    held = []
    with TensorTransport("reader", INCARNATION, directory) as transport:
        answer(transport.endpoint)
        for line in sys.stdin:
            endpoint, _, handle = line.partition(" ")
            transport.connect("owner", endpoint, INCARNATION)
            held.append(transport.get(msgspec.json.decode(handle, type=TensorRef)))
            answer(str(int(held[-1].sum())))


def listen(directory: Path) -> None:
    """`take COUNT`: wait for that many messages, answer with the numbers they begin with."""
    with (
        zmq.Context() as context,
        Mailbox(context, mailbox_endpoint(directory, "peer", INCARNATION), RawCodec(), queue_messages=2) as mailbox,
    ):
        answer(mailbox.endpoint)
        for line in sys.stdin:
            numbers: list[int] = []
            while len(numbers) < int(line.split()[1]) and mailbox.wait(60.0):
                numbers += [int(bytes(message)[:6]) for message in mailbox.drain() if isinstance(message, bytes)]
            answer(",".join(map(str, numbers)))


def answer(line: str) -> None:
    print(line, flush=True)


ROLES = {"lend": lend, "lend_away": lend_away, "read": read, "listen": listen}

if __name__ == "__main__":
    signal.alarm(300)  # whatever happens to the test, this process ends
    ROLES[sys.argv[1]](Path(sys.argv[2]))
