"""F7 and F12 between real processes: stopped and killed peers leave no hang, no memory, no file in /dev/shm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mstar_core.errors import PeerStalled, TransportError
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport import Courier, Mailbox, mailbox_endpoint
from mstar_core.transport.arena import ArenaReader
from mstar_core.transport.shm import TensorTransport

ROOT = Path(__file__).parents[2]
PEER = Path(__file__).with_name("peer.py")
WAIT_S = 60.0
MIB = 1 << 20


class Peer:
    """A child process that answers lines."""

    def __init__(self, role: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), role, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self.endpoint = self.answer()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def lend(self, size: int, fill: int) -> ShmTensor:
        return msgspec.json.decode(self.ask(f"put {size} {fill}"), type=ShmTensor)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has taken effect."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[[str], Peer]]:
    started: list[Peer] = []

    def begin(role: str) -> Peer:
        started.append(Peer(role, directory))
        return started[-1]

    shared = set(os.listdir("/dev/shm"))
    yield begin
    for peer in started:
        peer.end()
    # Others on this host make files there as well: only names that could be of this package are ours to judge.
    made = set(os.listdir("/dev/shm")) - shared
    assert {name for name in made if "owner" in name or "reader" in name or directory.name in name} == set()
    assert mappings() == 0


def mappings() -> int:
    """Return the number of this process's mappings of a peer's arena."""
    with open("/proc/self/maps") as lines:
        return sum("mstar-owner" in line for line in lines)


def test_a_tensor_crosses_to_another_process_and_back_comes_its_slot(start, directory):
    reader = start("read")
    with TensorTransport("owner", 1, directory) as owner:
        ref = owner.put(np.full(MIB, 3, dtype=np.uint8), "reader")
        assert isinstance(ref, ShmTensor)
        assert reader.ask(f"{owner.endpoint} {msgspec.json.encode(ref).decode()}") == str(3 * MIB)
        assert owner.release(ref.slot, ref.generation)
        assert owner.live == 0


def test_a_killed_reader_gives_everything_back(start, directory):
    reader = start("read")
    with TensorTransport("owner", 1, directory, segment_bytes=MIB, max_bytes=2 * MIB) as owner:
        for fill in (1, 2):
            ref = owner.put(np.full(MIB - 64, fill, dtype=np.uint8), "reader")
            reader.ask(f"{owner.endpoint} {msgspec.json.encode(ref).decode()}")
        assert owner.live == 2
        reader.kill()
        assert owner.reclaim("reader") == 2
        assert (owner.live, owner.used_bytes) == (0, 0)
        again = owner.put(np.full(2 * MIB, 9, dtype=np.uint8), "api")  # all of it is usable again
        assert isinstance(again, ShmTensor)


def test_a_killed_owner_leaves_its_readers_what_they_hold_and_nothing_else(start, directory):
    owner = start("lend")
    with TensorTransport("reader", 1, directory) as reader:
        reader.connect("owner", owner.endpoint, 1)
        held = reader.get(owner.lend(MIB, 5))
        unread = owner.lend(MIB, 6)
        owner.kill()
        assert int(held.sum()) == 5 * MIB
        np.testing.assert_array_equal(reader.get(unread), np.full(MIB, 6, dtype=np.uint8))
        reader.reclaim("owner")
        assert int(held.sum()) == 5 * MIB
        with pytest.raises(TransportError, match="owner of a tensor is gone"):
            reader.get(unread)
        assert mappings() == 1
        del held
        assert mappings() == 0


def test_an_owner_killed_before_its_first_tensor_was_read_is_an_error_at_once(start, directory):
    owner = start("lend")
    with TensorTransport("reader", 1, directory) as reader:
        reader.connect("owner", owner.endpoint, 1)
        ref = owner.lend(MIB, 5)
        owner.kill()
        with pytest.raises(TransportError, match="cannot be mapped"):
            reader.get(ref)


def test_a_stopped_owner_is_an_error_after_the_time_limit_and_harmless_afterwards(start):
    owner = start("lend")
    ref = owner.lend(MIB, 7)
    reader = ArenaReader(timeout_s=0.05)
    reader.connect("owner", Path(owner.endpoint), 1)
    owner.stop()
    with pytest.raises(TransportError, match="timed out"):
        reader.open(ref)
    owner.go_on()
    assert owner.lend(MIB, 8).generation > ref.generation  # it runs again
    patient = ArenaReader(timeout_s=WAIT_S)
    patient.connect("owner", Path(owner.endpoint), 1)
    assert int(patient.open(ref)[0]) == 7


def send_until_stalled(courier: Courier) -> int:
    for number in range(10_000):
        try:
            courier.send("peer", b"%06d" % number + bytes(64 * 1024))
        except PeerStalled:
            return number
    raise AssertionError("a stopped peer took ten thousand messages")


QUEUE = 30


def test_a_stopped_peer_costs_its_own_messages_only_and_loses_none_of_them(start, context, codec, directory):
    peer = start("listen")
    with (
        Courier(context, codec, queue_messages=QUEUE) as courier,
        Mailbox(context, mailbox_endpoint(directory, "other", 1), codec) as other,
    ):
        courier.connect("peer", peer.endpoint, 1)
        courier.connect("other", other.endpoint, 1)
        peer.stop()
        accepted = send_until_stalled(courier)
        courier.send("other", b"unharmed")
        assert other.wait(WAIT_S)
        assert other.drain() == [b"unharmed"]
        peer.go_on()
        assert peer.process.stdin is not None
        peer.process.stdin.write(f"take {accepted}\n")
        peer.process.stdin.flush()
        assert peer.answer() == ",".join(map(str, range(accepted)))


def test_a_killed_peer_never_blocks_its_senders(start, context, codec):
    peer = start("listen")
    with Courier(context, codec, queue_messages=QUEUE) as courier:
        courier.connect("peer", peer.endpoint, 1)
        courier.send("peer", b"000000")
        assert peer.ask("take 1") == "0"
        peer.kill()
        assert send_until_stalled(courier) >= QUEUE // 2, "the high-water mark of ZMQ is not exact"
        courier.disconnect("peer")
        assert courier.send("peer", b"x") is False


def test_descriptors_are_handed_out_again_after_they_ran_out(directory):
    """An owner at its descriptor limit must not lose the thread that serves its readers."""
    script = """
import resource, socket, sys
from pathlib import Path
from mstar_core.transport.shm import TensorTransport

with TensorTransport("owner", 1, Path(sys.argv[1])) as owner:
    first, second = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no new descriptor can be had
    first.connect(owner.endpoint)  # may be answered: an accept that waits already has its descriptor
    second.connect(owner.endpoint)
    second.settimeout(0.2)
    try:
        raise SystemExit(f"served without a descriptor: {second.recv(64)}")
    except TimeoutError:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    second.settimeout(60.0)
    print(len(second.recv(64)))
    first.close()
    second.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.stdout.strip(), done.stderr) == ("16", "")
