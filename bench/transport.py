"""Benchmark of mailboxes and the shared-memory transport between two processes. Prints one JSON object.

Run: python bench/transport.py [--rounds 2000] [--messages 100000] [--tensor-mib 64]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a checkout that is not installed

from mstar_core.errors import PeerStalled
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport import Courier, Mailbox, loan_of, mailbox_endpoint
from mstar_core.transport.shm import TensorTransport

WAIT_S = 60.0
CONTROL = b"e" + bytes(199)  # the size of a usual control message


class Raw:
    def encode(self, message: bytes, /) -> bytes:
        return message

    def decode(self, data: bytes, /) -> bytes:
        return data


class End:
    """One process's mailbox, courier and tensors, connected to the other's."""

    def __init__(self, name: str, other: str, directory: Path) -> None:
        self.other = other
        self.directory = directory
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.mailbox = Mailbox(self.context, mailbox_endpoint(directory, name, 1), Raw())
        self.courier = Courier(self.context, Raw())
        self.tensors = TensorTransport(name, 1, directory)
        self.courier.connect(other, mailbox_endpoint(directory, other, 1), 1)
        self.tensors.connect(other, self.tensors.endpoint.replace(f"{name}.1.fd", f"{other}.1.fd"), 1)

    def take(self) -> list[bytes]:
        if not self.mailbox.wait(WAIT_S):
            raise SystemExit("the other process does not respond")
        return [message for message in self.mailbox.drain() if isinstance(message, bytes)]

    def ask(self, message: bytes) -> bytes:
        self.courier.send(self.other, message)
        while not (taken := self.take()):
            pass
        return taken[0]

    def close(self) -> None:
        self.tensors.close()
        self.courier.close(linger_s=1.0)
        self.mailbox.close()
        self.context.term()


def serve(directory: Path) -> None:
    """Run the other process. Commands: e echo, f flood, o open a tensor, s open and read it, c copy it, q quit."""
    end = End("server", "client", directory)
    while True:
        for message in end.take():
            kind, body = message[:1], message[1:]
            if kind == b"q":
                end.close()
                return
            if kind == b"f":
                flood(end, int(body))
                continue
            if kind in b"osc":
                ref = msgspec.msgpack.decode(body, type=ShmTensor)
                array = end.tensors.copy(ref) if kind == b"c" else end.tensors.get(ref)
                if kind == b"s":
                    array.view(np.uint64).max()
                message = CONTROL
            end.courier.send(end.other, message)


def flood(end: End, count: int) -> None:
    sent = 0
    while sent < count:
        try:
            end.courier.send(end.other, CONTROL)
            sent += 1
        except PeerStalled:
            end.mailbox.wait(0.001)


def timed(rounds: int, act: Callable[[], object]) -> list[float]:
    """Return the seconds of each round."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return times


def microseconds(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50_us": round(statistics.median(ordered) * 1e6, 1),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6, 1),
    }


def measure_flood(end: End, count: int) -> dict[str, float]:
    end.courier.send(end.other, b"f%d" % count)
    received, begin = 0, 0.0
    while received < count:
        received += len(end.take())
        begin = begin or time.perf_counter()
    return {"messages": count, "messages_per_s": round(count / (time.perf_counter() - begin))}


def measure_tensors(end: End, size: int, rounds: int) -> dict[str, object]:
    array = np.ones(size, dtype=np.uint8)

    def lend(kind: bytes | None) -> None:
        ref = end.tensors.put(array, end.other)
        if kind is not None:
            end.ask(kind + msgspec.msgpack.encode(ref))
        give_back(ref)

    def give_back(ref: object) -> None:
        loan = loan_of(ref) if isinstance(ref, ShmTensor) else None
        if loan is not None:
            end.tensors.release(loan.slot, loan.generation)

    first = timed(1, lambda: lend(None))[0]
    lend(b"o")
    results: dict[str, object] = {"size_bytes": size, "first_put_ms": round(first * 1e3, 2)}
    for name, kind in {"put": None, "put_read": b"s", "put_copy": b"c"}.items():
        middle = statistics.median(timed(rounds, lambda kind=kind: lend(kind)))  # type: ignore[misc]
        results[name] = {"ms": round(middle * 1e3, 3), "gb_per_s": round(size / middle / 1e9, 2)}
    ref = end.tensors.put(array, end.other)
    handle = b"o" + msgspec.msgpack.encode(ref)
    results["handle_and_acknowledgement"] = microseconds(timed(rounds * 20, lambda: end.ask(handle)))
    give_back(ref)
    return results


def environment(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arguments": {name: value for name, value in vars(arguments).items() if name != "serve"},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--tensor-mib", type=int, default=64)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    result: dict[str, object] = {"environment": environment(arguments)}
    with tempfile.TemporaryDirectory(prefix="mstar-") as folder:
        server = subprocess.Popen([sys.executable, __file__, "--serve", folder])
        end = End("client", "server", Path(folder))
        try:
            end.ask(CONTROL)
            result["round_trip_200_bytes"] = microseconds(timed(arguments.rounds, lambda: end.ask(CONTROL)))
            result["one_way_200_bytes"] = measure_flood(end, arguments.messages)
            result["tensor"] = measure_tensors(end, arguments.tensor_mib << 20, 20)
            end.courier.send("server", b"q")
            server.wait(WAIT_S)
        finally:
            server.kill()
            end.close()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
