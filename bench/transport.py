"""Benchmark of mailboxes and tensor transports between two processes. Prints one JSON object.

Compares processes of one host (Unix sockets, shared memory) with those of two (TCP with CURVE, blobs), all on loopback.

Run: python bench/transport.py [--rounds 2000] [--messages 100000] [--tensor-mib 64] [--blob-rounds 20]
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
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a checkout that is not installed

from mstar_core.errors import PeerStalled
from mstar_core.messages.tensors import ShmTensor, TensorRef
from mstar_core.transport import (
    Courier,
    CurveKeys,
    Mailbox,
    RemoteAccess,
    mailbox_endpoint,
    make_keys,
    read_keys,
    write_keys,
)
from mstar_core.transport.shm import TensorTransport
from mstar_core.transport.tensors import loan_of

WAIT_S = 60.0
HOST = "127.0.0.1"
KEYS = "curve.json"
AWAY = "away"
INLINE_MOST = 1 << 20
BUSY_S_PER_GB = 0.02
BLOB_BYTES = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
CONTROL = b"e" + bytes(199)  # the size of a usual control message
REMOTE_CONTROL = b"E" + CONTROL[1:]


class Raw:
    sender, incarnation = "bench", 1

    def encode(self, message: bytes, /) -> bytes:
        return message

    def decode(self, data: bytes | memoryview, /) -> bytes:
        return bytes(data)


class End:
    """One process's mailbox, courier and tensors, connected to the other's."""

    def __init__(self, name: str, other: str, directory: Path) -> None:
        self.name = name
        self.other = other
        self.directory = directory
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = read_keys(directory / KEYS)
        access = RemoteAccess(HOST, keys)
        self.mailbox = Mailbox(self.context, mailbox_endpoint(directory, name, 1), Raw(), remote=access)
        self.courier = Courier(self.context, Raw(), keys=keys)
        self.tensors = TensorTransport(name, 1, directory, remote=access, remote_inline_bytes=-1)
        self.tensors.deliver_in(self.mailbox)
        self.courier.connect(other, mailbox_endpoint(directory, other, 1), 1)
        self.tensors.connect(other, self.tensors.endpoint.replace(f"{name}.1.fd", f"{other}.1.fd"), 1)
        self._meet(keys)

    def _meet(self, keys: CurveKeys) -> None:
        """Exchange the endpoints for other hosts by files, and name the other process AWAY there."""
        mine = self.directory / f"{self.name}.endpoints"
        mine.with_suffix(".part").write_text(f"{self.mailbox.remote_endpoint} {self.tensors.blob_endpoint}")
        mine.with_suffix(".part").rename(mine)
        other = self.directory / f"{self.other}.endpoints"
        end = time.monotonic() + WAIT_S
        while not other.exists():
            if time.monotonic() > end:
                raise SystemExit("the other process does not start")
            time.sleep(0.01)
        mailbox, blobs = other.read_text().split()
        self.courier.connect(AWAY, mailbox, 1)
        self.tensors.connect(AWAY, "", 1, blobs)

    def take(self) -> list[bytes]:
        if not self.mailbox.wait(WAIT_S):
            raise SystemExit("the other process does not respond")
        return [message for message in self.mailbox.drain() if isinstance(message, bytes)]

    def ask(self, message: bytes, to: str = "") -> bytes:
        self.courier.send(to or self.other, message)
        while not (taken := self.take()):
            pass
        return taken[0]

    def close(self) -> None:
        self.tensors.close()
        self.courier.close(linger_s=1.0)
        self.mailbox.close()
        self.context.term()


def serve(directory: Path) -> None:
    """Run the other process.

    Commands: e echo, E echo by TCP, f flood, F flood by TCP, o open a tensor, s open and read it, c copy it, b lend a
    blob of so many bytes, r return it, i send so many bytes inside a message by TCP, q quit.
    """
    end = End("server", "client", directory)
    lent: TensorRef | None = None
    while True:
        for message in end.take():
            kind, body = message[:1], message[1:]
            to = AWAY if kind in b"EFi" else end.other
            if kind == b"q":
                end.close()
                return
            if kind in b"fF":
                flood(end, int(body), to)
                continue
            if kind in b"osc":
                ref = msgspec.msgpack.decode(body, type=ShmTensor)
                array = end.tensors.copy(ref) if kind == b"c" else end.tensors.get(ref)
                if kind == b"s":
                    array.view(np.uint64).max()
                message = CONTROL
            if kind == b"b":
                lent = end.tensors.put(np.ones(int(body), dtype=np.uint8), AWAY)
                message = msgspec.msgpack.encode(msgspec.structs.replace(lent, owner=AWAY))
            if kind == b"r" and isinstance(lent, ShmTensor):
                end.tensors.release(lent.slot, lent.generation)
            if kind == b"i":
                message = bytes(int(body))
            end.courier.send(to, message)


def flood(end: End, count: int, to: str) -> None:
    sent = 0
    while sent < count:
        try:
            end.courier.send(to, CONTROL)
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


def measure_hops(end: End, rounds: int) -> dict[str, object]:
    """Alternate round trips by both ways, so that the load of the machine is the same for them."""
    near, far = [], []
    for _ in range(rounds):
        near += timed(1, lambda: end.ask(CONTROL))
        far += timed(1, lambda: end.ask(REMOTE_CONTROL, AWAY))
    added = (statistics.median(far) - statistics.median(near)) / 2
    return {"ipc": microseconds(near), "tcp_curve": microseconds(far), "added_one_way_p50_us": round(added * 1e6, 1)}


def thread_cpu_s(pid: int) -> dict[str, float]:
    """Return the CPU seconds so far of each thread of a process, by id and name. Source: Linux, schedstat."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            name = (task / "comm").read_text().strip()
            found[f"{task.name} {name}"] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def busy_threads(before: dict[str, float], pid: int, size_bytes: int) -> dict[str, float]:
    """Return the CPU seconds per GB of the threads of a process that used a core, by name, since `before`."""
    spent = {key: value - before.get(key, 0.0) for key, value in thread_cpu_s(pid).items()}
    rates = {key.partition(" ")[2]: round(1e9 * value / size_bytes, 3) for key, value in spent.items()}
    return {name: rate for name, rate in rates.items() if rate >= BUSY_S_PER_GB}


def measure_blobs(end: End, size: int, rounds: int, owner: int) -> dict[str, object]:
    """Fetch a lent tensor, and receive as many bytes inside a message. owner: process id of the other end."""
    ref = msgspec.msgpack.decode(end.ask(b"b%d" % size), type=ShmTensor)

    def fetch() -> None:
        fetched = end.tensors.fetch(ref)
        while not fetched.is_done:
            end.mailbox.wait(WAIT_S)
            end.mailbox.drain()
        if fetched.result().nbytes != size:
            raise SystemExit("a fetched tensor has another size")

    fetch()
    fetches: list[float] = []
    inline: list[float] = []
    before = thread_cpu_s(os.getpid()), thread_cpu_s(owner)
    for _ in range(max(5, min(rounds, BLOB_BYTES[-1] // size))):
        fetches += timed(1, fetch)
        if size <= INLINE_MOST:
            inline += timed(1, lambda: end.ask(b"i%d" % size, AWAY))
    results: dict[str, object] = {"size_bytes": size, "fetch": microseconds(fetches)}
    results["fetch_mb_per_s"] = round(size / statistics.median(fetches) / 1e6)
    results["fetch_best_mb_per_s"] = round(size / min(fetches) / 1e6)
    if size > INLINE_MOST:
        total = size * len(fetches)
        results["reader_cpu_s_per_gb"] = busy_threads(before[0], os.getpid(), total)
        results["owner_cpu_s_per_gb"] = busy_threads(before[1], owner, total)
    if inline:
        results["inline_round_trip"] = microseconds(inline)
    end.ask(b"r")
    return results


def measure_flood(end: End, count: int, kind: bytes) -> dict[str, float]:
    end.courier.send(end.other, kind + b"%d" % count)
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
    parser.add_argument("--blob-rounds", type=int, default=20)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    result: dict[str, object] = {"environment": environment(arguments)}
    with tempfile.TemporaryDirectory(prefix="mstar-") as folder:
        write_keys(Path(folder) / KEYS, make_keys())
        server = subprocess.Popen([sys.executable, __file__, "--serve", folder])
        end = End("client", "server", Path(folder))
        try:
            end.ask(CONTROL)
            end.ask(REMOTE_CONTROL, AWAY)
            result["round_trip_200_bytes"] = measure_hops(end, arguments.rounds)
            result["one_way_200_bytes"] = measure_flood(end, arguments.messages, b"f")
            result["one_way_200_bytes_tcp_curve"] = measure_flood(end, arguments.messages, b"F")
            result["tensor"] = measure_tensors(end, arguments.tensor_mib << 20, 20)
            result["blobs"] = [measure_blobs(end, size, arguments.blob_rounds, server.pid) for size in BLOB_BYTES]
            end.courier.send("server", b"q")
            server.wait(WAIT_S)
        finally:
            server.kill()
            end.close()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
