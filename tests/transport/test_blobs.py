"""Tensors of other hosts: fetched without blocking, each with one outcome, and nothing for strangers.

`test_tensors.py` holds them to the contract of shared memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from mstar_core.errors import TransportError
from mstar_core.messages.tensors import InlineTensor, ShmTensor
from mstar_core.transport import CurveKeys, Mailbox, RemoteAccess, mailbox_endpoint
from mstar_core.transport.blobs import transfers
from mstar_core.transport.blobs.client import Fetch
from mstar_core.transport.blobs.pieces import PIECE_BYTES, WINDOW, Piece
from mstar_core.transport.blobs.server import BlobServer
from mstar_core.transport.curve import connect_curve, make_keys, serve_curve, write_keys
from mstar_core.transport.shm import TensorTransport
from mstar_core.transport.zap import Authenticator
from tests.transport.relay import Relay

MIB = 1 << 20
WAIT_S = 60.0
HOST = "127.0.0.1"


@pytest.fixture
def keys() -> CurveKeys:
    return make_keys()


@pytest.fixture
def open_end(directory, keys) -> Iterator[Callable[..., TensorTransport]]:
    opened: list[TensorTransport] = []

    def begin(name: str, incarnation: int = 1) -> TensorTransport:
        opened.append(TensorTransport(name, incarnation, directory, remote=RemoteAccess(HOST, keys)))
        return opened[-1]

    yield begin
    for end in opened:
        end.close()
    assert list(directory.iterdir()) == []


@pytest.fixture
def owner(open_end) -> TensorTransport:
    return open_end("owner")


@pytest.fixture
def reader(open_end, owner) -> TensorTransport:
    end = open_end("reader")
    end.connect("owner", "", 1, owner.blob_endpoint)
    return end


@pytest.fixture
def relayed(open_end, owner) -> Iterator[tuple[TensorTransport, Relay]]:
    """A reader whose connection to the owner can be held and broken."""
    relay = Relay(owner.blob_endpoint)
    end = open_end("reader")
    end.connect("owner", "", 1, relay.endpoint)
    yield end, relay
    end.close()
    relay.close()


def lend(owner: TensorTransport, size: int, seed: int = 0) -> tuple[np.ndarray, ShmTensor]:
    """Lend random bytes, also small ones, in shared memory."""
    array = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return array, owner.arena.put(array, "reader")


def wait(reader: TensorTransport, *fetches: Fetch) -> None:
    end = time.monotonic() + WAIT_S
    while not all(fetch.is_done for fetch in fetches):
        assert time.monotonic() < end, "a fetch has no outcome"
        time.sleep(0.001)
        reader.deliver()


def passes(relay: Relay, size: int = 0) -> None:
    """Wait until more than `size` bytes have come to a relay since its last `hold`."""
    end = time.monotonic() + WAIT_S
    while relay.held <= size:
        assert time.monotonic() < end, "too few bytes came"
        time.sleep(0.001)


def fetched(reader: TensorTransport, ref: ShmTensor) -> np.ndarray:
    fetch = reader.fetch(ref)
    wait(reader, fetch)
    return fetch.result()


@pytest.mark.parametrize(
    "size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, (2 * WINDOW + 3) * PIECE_BYTES + 5]
)
def test_tensors_of_any_number_of_pieces_arrive(owner, reader, size):
    array, ref = lend(owner, size)
    np.testing.assert_array_equal(fetched(reader, ref), array)
    assert owner.live == 1, "the loan lasts until it is returned"


def test_many_fetches_at_once_arrive_each_with_its_own_bytes(owner, reader):
    lent = [lend(owner, size, seed) for seed, size in enumerate([5 * MIB, 7, 3 * MIB + 1, 0, 300_000] * 4)]
    fetches = [reader.fetch(ref) for _, ref in lent]
    wait(reader, *fetches)
    for (array, _), fetch in zip(lent, fetches, strict=True):
        np.testing.assert_array_equal(fetch.result(), array)


def test_a_small_tensor_does_not_wait_for_a_large_one(relayed, owner):
    reader, relay = relayed
    order: list[str] = []
    _, large = lend(owner, 64 * MIB)
    array, small = lend(owner, 100_000)
    fetched(reader, small)
    relay.hold()
    first = reader.fetch(large, lambda fetch: order.append("large"))
    passes(relay)
    second = reader.fetch(small, lambda fetch: order.append("small"))
    relay.resume()
    wait(reader, first, second)
    assert order == ["small", "large"]
    np.testing.assert_array_equal(second.result(), array)


def test_a_fetch_never_runs_its_callback_inside_the_call_or_on_another_thread(owner, reader):
    threads: list[threading.Thread] = []
    refs = [lend(owner, 10)[1], ShmTensor(**{**msgspec.structs.asdict(lend(owner, 10)[1]), "owner": "stranger"})]
    for ref in refs:
        fetch = reader.fetch(ref, lambda fetch: threads.append(threading.current_thread()))
        time.sleep(0.1)
        assert not fetch.is_done
        wait(reader, fetch)
    assert threads == [threading.main_thread()] * 2


def test_a_result_before_the_end_is_an_error_and_a_tensor_has_one(relayed, owner):
    reader, relay = relayed
    relay.hold()
    fetch = reader.fetch(lend(owner, 10)[1])
    with pytest.raises(TransportError, match="has not arrived"):
        fetch.result()
    relay.resume()
    wait(reader, fetch)
    assert fetch.result() is fetch.result()


def test_a_callback_that_raises_costs_only_itself(owner, reader, caplog):
    def raise_error(fetch: Fetch) -> None:
        raise RuntimeError("a bug in a handler")

    fetches = [reader.fetch(lend(owner, 10)[1], raise_error), reader.fetch(lend(owner, 10)[1])]
    wait(reader, *fetches)
    assert "a bug in a handler" in caplog.text


def test_an_event_loop_and_a_waiting_loop_are_woken(context, codec, directory, owner, reader):
    with Mailbox(context, mailbox_endpoint(directory, "reader", 1), codec) as mailbox:
        reader.deliver_in(mailbox)
        array, ref = lend(owner, MIB)
        fetch = reader.fetch(ref)
        while not fetch.is_done:
            assert mailbox.wait(WAIT_S)
            assert mailbox.drain() == []
        np.testing.assert_array_equal(fetch.result(), array)
        assert not mailbox.wait(0.01)

        async def receive() -> np.ndarray:
            loop = asyncio.get_running_loop()
            mailbox.attach(loop, lambda batch: pytest.fail(f"called with {batch}"))
            future = loop.create_future()
            reader.fetch(ref, future.set_result)
            done = await asyncio.wait_for(future, WAIT_S)
            mailbox.detach()
            return done.result()

        np.testing.assert_array_equal(asyncio.run(receive()), array)


def test_a_loan_that_ended_before_or_during_the_fetch_is_an_error(relayed, owner):
    reader, relay = relayed
    _, ref = lend(owner, 40 * MIB)
    fetched(reader, ref)
    relay.hold()
    fetch = reader.fetch(ref)
    passes(relay)
    assert not fetch.is_done
    owner.release(ref.slot, ref.generation)
    lend(owner, 40 * MIB, seed=1)  # overwrites it
    relay.resume()
    wait(reader, fetch)
    for each in (fetch, reader.fetch(ref)):
        wait(reader, each)
        with pytest.raises(TransportError, match="loan of a tensor ended") as error:
            each.result()
        assert error.value.facts["peer"] == "owner"


def test_a_loan_that_ends_while_a_piece_is_copied_is_an_error(owner, reader, monkeypatch):
    _, ref = lend(owner, 1000)

    class ReleasingFrame(zmq.Frame):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            owner.release(ref.slot, ref.generation)

    monkeypatch.setattr(zmq, "Frame", ReleasingFrame)
    with pytest.raises(TransportError, match="loan of a tensor ended"):
        fetched(reader, ref)


def test_a_piece_that_cannot_be_read_fails_its_tensor(owner, reader, monkeypatch, caplog):
    _, ref = lend(owner, 1000)
    monkeypatch.setattr(BlobServer, "_is_lent", None)  # raises TypeError
    with pytest.raises(TransportError, match="could not be read by its owner"):
        fetched(reader, ref)


def test_a_cancelled_fetch_calls_nothing_and_disturbs_no_other(owner, reader):
    _, large = lend(owner, 64 * MIB)
    array, other = lend(owner, 3 * MIB)
    cancelled = reader.fetch(large, lambda fetch: pytest.fail("called"))
    kept = reader.fetch(other)
    cancelled.cancel()
    cancelled.cancel()
    wait(reader, kept)
    np.testing.assert_array_equal(kept.result(), array)
    np.testing.assert_array_equal(fetched(reader, other), array)


def test_a_broken_connection_is_made_again_and_the_tensor_arrives(relayed, owner, monkeypatch):
    monkeypatch.setattr(transfers, "REDIAL_S", 0.5)
    reader, relay = relayed
    array, ref = lend(owner, 32 * MIB)
    fetch = reader.fetch(ref)
    for _ in range(3):
        time.sleep(0.03)
        relay.cut()
    wait(reader, fetch)
    np.testing.assert_array_equal(fetch.result(), array)


def test_a_silent_owner_is_an_error_and_its_next_tensor_arrives(relayed, owner, monkeypatch):
    monkeypatch.setattr(transfers, "REDIAL_S", 30.0)
    reader, relay = relayed
    array, ref = lend(owner, 20 * MIB)
    fetched(reader, ref)
    relay.hold()
    with monkeypatch.context() as short:
        short.setattr(transfers, "SILENCE_S", 1.0)
        begun = time.monotonic()
        fetch = reader.fetch(ref)
        wait(reader, fetch)
    assert time.monotonic() - begun > 0.9
    with pytest.raises(TransportError, match="does not arrive.*owner at .*silent"):
        fetch.result()
    relay.cut()  # the answers on the way never come
    relay.resume()
    np.testing.assert_array_equal(fetched(reader, ref), array)


def test_a_dead_owners_fetches_fail_without_a_silence(relayed, owner):
    reader, relay = relayed
    relay.hold()
    fetch = reader.fetch(lend(owner, MIB)[1])
    reader.reclaim("owner", 1)
    wait(reader, fetch)
    with pytest.raises(TransportError, match="owner of a tensor is gone"):
        fetch.result()


def test_a_late_announcement_of_a_death_leaves_the_successor(open_end, owner, reader):
    owner.close()
    successor = open_end("owner", 2)
    reader.connect("owner", "", 2, successor.blob_endpoint)
    reader.reclaim("owner", 1)
    array, ref = lend(successor, MIB)
    np.testing.assert_array_equal(fetched(reader, ref), array)


def test_a_killed_owner_is_an_error_within_its_limit(directory, keys, open_end, monkeypatch):
    monkeypatch.setattr(transfers, "SILENCE_S", 1.0)
    write_keys(directory / "keys", keys)
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("peer.py")), "lend_away", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        reader, relay = open_end("reader"), Relay(process.stdout.readline().strip())
        reader.connect("owner", "", 1, relay.endpoint)
        process.stdin.write(f"put {256 * MIB} 7\n")
        process.stdin.flush()
        ref = msgspec.json.decode(process.stdout.readline(), type=ShmTensor)
        fetch = reader.fetch(ref)
        passes(relay, MIB)
        relay.hold()
        process.send_signal(signal.SIGKILL)
        relay.resume()
        wait(reader, fetch)
        with pytest.raises(TransportError, match="does not arrive"):
            fetch.result()
        relay.close()
    for left in ("keys", "owner.1.fd"):
        (directory / left).unlink()


@pytest.fixture
def raw(owner, keys) -> Iterator[zmq.Socket[bytes]]:
    """A client with the right key that speaks the protocol as it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        connect_curve(socket, owner.blob_endpoint, keys, keys.public)
        yield socket


def piece_of(ref: ShmTensor, **changed: int) -> bytes:
    piece = Piece(1, ref.generation, ref.offset, min(ref.size_bytes, PIECE_BYTES), ref.slot)
    return piece._replace(**changed).pack()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"slot": 1 << 31}, b"outside"),
        ({"slot": 7}, b"ended"),
        ({"generation": 5}, b"ended"),
        ({"offset": 0}, b"outside"),
        ({"offset": (1 << 64) - 1}, b"outside"),
        ({"size_bytes": 1 << 60}, b"outside"),
        ({"size_bytes": PIECE_BYTES + 1}, b"too large"),
    ],
)
def test_a_piece_that_is_not_lent_is_answered_with_the_reason(owner, raw, changed, reason):
    _, ref = lend(owner, MIB)
    request = piece_of(ref, **changed)
    raw.send(request)
    assert raw.poll(10_000)
    echo, data, why = raw.recv_multipart()
    assert (echo, data) == (request, b"")
    assert reason in why


def test_malformed_requests_are_ignored(owner, reader, raw):
    noise = random.Random(1)
    array, ref = lend(owner, MIB)
    for _ in range(200):
        frames = [noise.randbytes(noise.choice([0, 1, 35, 36, 37, 4000])) for _ in range(noise.randint(1, 4))]
        raw.send_multipart(frames)
    raw.send(piece_of(ref))
    np.testing.assert_array_equal(fetched(reader, ref), array)


def test_a_reader_that_takes_nothing_costs_bounded_memory_and_delays_no_other(owner, reader, raw):
    array, ref = lend(owner, 2 * MIB)
    before = resident_bytes()
    for _ in range(4000):  # 1 GB of answers
        raw.send(piece_of(ref))
    time.sleep(1.0)
    np.testing.assert_array_equal(fetched(reader, ref), array)
    assert resident_bytes() - before < 200 * MIB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("is_plain", [True, False])
def test_strangers_get_nothing(owner, reader, keys, is_plain):
    array, ref = lend(owner, MIB)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if is_plain:
            socket.connect(owner.blob_endpoint)
        else:
            connect_curve(socket, owner.blob_endpoint, make_keys(), keys.public)
        socket.send(piece_of(ref))
        assert not socket.poll(500)
    np.testing.assert_array_equal(fetched(reader, ref), array)


class Liar:
    """A blob server that answers as a test wants."""

    def __init__(self, keys: CurveKeys, answer: Callable[[bytes], list[bytes]]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, keys.public)
        self._socket = self._context.socket(zmq.ROUTER)
        serve_curve(self._socket, keys)
        self._socket.bind(f"tcp://{HOST}:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._context.term()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                reader, request = self._socket.recv_multipart()
                self._socket.send_multipart([reader, *self._answer(request)])
        except zmq.ContextTerminated:
            self._socket.close(0)


ANSWERS: dict[str, Callable[[bytes], list[bytes]]] = {
    "short": lambda request: [request, b"short"],
    "long": lambda request: [request, bytes(2 * PIECE_BYTES)],
    "no elements": lambda request: [request],
    "reason in other bytes": lambda request: [request, b"", b"\xff\xfe"],
    "many frames": lambda request: [request, bytes(PIECE_BYTES), b"why", b"and"],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_torn_answers_fail_their_tensor(open_end, keys, owner, answer):
    liar = Liar(keys, ANSWERS[answer])
    reader = open_end("reader")
    reader.connect("owner", "", 1, liar.endpoint)
    with pytest.raises(TransportError):
        fetched(reader, lend(owner, MIB)[1])
    reader.close()
    liar.close()


def test_answers_to_no_request_are_ignored(open_end, keys, owner, monkeypatch):
    monkeypatch.setattr(transfers, "SILENCE_S", 1.0)
    liar = Liar(keys, lambda request: [b"?" * 36, b"data"])
    reader = open_end("reader")
    reader.connect("owner", "", 1, liar.endpoint)
    with pytest.raises(TransportError, match="does not arrive"):
        fetched(reader, lend(owner, MIB)[1])
    reader.close()
    liar.close()


def test_handles_that_contradict_themselves_fail(owner, reader):
    _, ref = lend(owner, MIB)
    huge = {"shape": (1 << 62,), "size_bytes": 1 << 62}
    outside = ({"offset": -1}, {"offset": 1 << 70}, {"slot": -1}, {"slot": 1 << 32})
    for changed in ({"shape": (5,)}, {"shape": (-1,)}, {"dtype": "pickle"}, {"generation": 5}, huge, *outside):
        with pytest.raises(TransportError):
            fetched(reader, ShmTensor(**{**msgspec.structs.asdict(ref), **changed}))


def test_an_unforeseen_error_fails_what_is_fetched_and_nothing_later(owner, reader, monkeypatch, caplog):
    array, ref = lend(owner, MIB)

    receive = transfers.Transfers.receive

    def fail(self: transfers.Transfers) -> None:
        if not self.is_busy:
            return receive(self)
        monkeypatch.undo()
        raise RuntimeError("a bug")

    fetched(reader, ref)
    monkeypatch.setattr(transfers.Transfers, "receive", fail)
    with pytest.raises(TransportError, match="fetching failed"):
        fetched(reader, ref)
    assert "a bug" in caplog.text
    np.testing.assert_array_equal(fetched(reader, ref), array)


def test_reading_before_fetching_is_an_error_and_only_such_tensors_are_remote(owner, reader):
    _, ref = lend(owner, MIB)
    assert reader.is_remote(ref)
    assert not owner.is_remote(ref)
    for read in (reader.get, reader.copy):
        with pytest.raises(TransportError, match="before it was fetched"):
            read(ref)


def test_inline_limits_differ_for_peers_of_other_hosts(owner, reader):
    array = np.zeros(200_000, dtype=np.uint8)
    away = reader.put(array, "owner")
    near = reader.put(array, "neighbour")
    assert isinstance(away, InlineTensor)
    assert isinstance(near, ShmTensor)
    assert not reader.is_remote(away)


def test_a_transport_without_access_fetches_nothing_and_says_so(directory, owner):
    with TensorTransport("local", 1, directory) as local:
        assert local.blob_endpoint == ""
        with pytest.raises(TransportError, match="fetches no tensors"):
            local.fetch(lend(owner, 10)[1])


def test_closing_with_fetches_on_the_way_calls_nothing(owner, reader):
    for _ in range(5):
        reader.fetch(lend(owner, 20 * MIB)[1], lambda fetch: pytest.fail("called"))
    time.sleep(0.05)
    reader.close()
    reader.close()


def test_ends_leave_no_thread(threads_before, owner, reader):
    fetched(reader, lend(owner, 10)[1])
    assert own_threads(threads_before)
    for end in (owner, reader):
        end.close()
    assert own_threads(threads_before) == []


@pytest.fixture
def threads_before():
    """Threads that ran before the transports of the test: those of other tests may still end."""
    return set(threading.enumerate())


def own_threads(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("mstar-")]
