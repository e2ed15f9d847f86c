"""Contract of tensors in shared memory, of this host and of another one.

`tests/worker/test_peer_memory_transports.py` covers the transports of workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mstar_core.errors import ArenaFull, TransportError
from mstar_core.messages.tensors import InlineTensor, ShmTensor, TensorRef
from mstar_core.transport import RemoteAccess, make_keys
from mstar_core.transport.dtypes import Array
from mstar_core.transport.shm import INLINE_BYTES, TensorTransport
from mstar_core.transport.tensors import loan_of
from tests.fakes.commands import output_of

MIB = 1 << 20
WAIT_S = 60.0

KEYS = make_keys()


class AwayEnd(TensorTransport):
    """An end whose peers are all on other hosts: it fetches what it gets."""

    def __init__(self, name: str, incarnation: int, directory: Path) -> None:
        access = RemoteAccess("127.0.0.1", KEYS)
        super().__init__(
            name, incarnation, directory, max_bytes=4 * MIB, inline_bytes=-1, remote=access, remote_inline_bytes=-1
        )

    @property
    def endpoint(self) -> str:
        return self.blob_endpoint

    def connect(self, peer: str, endpoint: str, incarnation: int, blob_endpoint: str = "") -> None:
        super().connect(peer, "", incarnation, blob_endpoint or endpoint)

    def get(self, ref: TensorRef) -> Array:
        array = self.copy(ref)
        array.flags.writeable = False
        return array

    def copy(self, ref: TensorRef) -> Array:
        if not isinstance(ref, ShmTensor):
            return super().copy(ref)
        fetch = self.fetch(ref)
        end = time.monotonic() + WAIT_S
        while not fetch.is_done:
            assert time.monotonic() < end
            time.sleep(0.002)
            self.deliver()
        return fetch.result()


# Each entry opens the end of one process.
ENDS: dict[str, Callable[[str, int, Path], TensorTransport]] = {
    "SHM": lambda name, incarnation, directory: TensorTransport(name, incarnation, directory, max_bytes=4 * MIB),
    "SHM, nothing inline": lambda name, incarnation, directory: TensorTransport(
        name, incarnation, directory, max_bytes=4 * MIB, inline_bytes=-1
    ),
    "another host": AwayEnd,
}
SIZES = [0, 1, INLINE_BYTES, INLINE_BYTES + 1, MIB]


@pytest.fixture(params=ENDS)
def open_end(request, directory) -> Iterator[Callable[[str, int], TensorTransport]]:
    opened: list[TensorTransport] = []

    def begin(name: str, incarnation: int = 1) -> TensorTransport:
        opened.append(ENDS[request.param](name, incarnation, directory))
        return opened[-1]

    yield begin
    for end in opened:
        end.close()
    assert list(directory.iterdir()) == []


@pytest.fixture
def ends(open_end) -> tuple[TensorTransport, TensorTransport]:
    owner, reader = open_end("owner"), open_end("reader")
    reader.connect("owner", owner.endpoint, 1)
    return owner, reader


def over_the_wire(ref: TensorRef) -> TensorRef:
    decoded: TensorRef = msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=TensorRef)  # type: ignore[call-overload]
    assert decoded == ref
    return decoded


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("read", ["get", "copy"])
def test_bytes_arrive(ends, size, read):
    owner, reader = ends
    array = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    ref = over_the_wire(owner.put(array, "reader"))
    np.testing.assert_array_equal(reader.get(ref) if read == "get" else reader.copy(ref), array)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint16", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (40, 3, 100)])
def test_types_and_shapes_arrive(ends, dtype, shape):
    owner, reader = ends
    array = np.ones(shape, dtype=dtype)
    out = reader.get(over_the_wire(owner.put(array, "reader")))
    assert (out.dtype, out.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(out, array)


@pytest.mark.parametrize("rows", [4, 400])
def test_strided_and_foreign_arrays_arrive_as_their_values(ends, rows):
    owner, reader = ends
    array = np.arange(rows * 600, dtype=">i4").reshape(rows, 600)[::-2, 1::3].T
    np.testing.assert_array_equal(reader.get(owner.put(array, "reader")), array)


@pytest.mark.parametrize("count", [4, 40_000])
def test_a_type_that_numpy_cannot_say_keeps_its_name(ends, count):
    owner, reader = ends
    bits = np.arange(count, dtype=np.uint16)
    ref = over_the_wire(owner.put(bits, "reader", dtype="bfloat16"))
    assert ref.dtype == "bfloat16"
    np.testing.assert_array_equal(reader.get(ref), bits)
    with pytest.raises(TransportError, match="not bfloat16"):
        owner.put(bits.astype(np.int64), "reader", dtype="bfloat16")


@pytest.mark.parametrize("count", [4, 40_000])
def test_got_is_read_only_and_a_copy_is_the_readers_own(ends, count):
    owner, reader = ends
    ref = owner.put(np.zeros(count), "reader")
    assert not reader.get(ref).flags.writeable
    copied = reader.copy(ref)
    copied[:] = 1
    np.testing.assert_array_equal(reader.get(ref), np.zeros(count))


@pytest.mark.parametrize("size", SIZES)
def test_each_loan_ends_once(ends, size):
    owner, reader = ends
    ref = owner.put(np.zeros(size, dtype=np.uint8), "reader")
    reader.get(ref)
    loan = loan_of(ref)
    assert owner.live == (loan is not None)
    if loan is not None:
        assert loan.owner == "owner"
        assert owner.release(loan.slot, loan.generation)
        assert not owner.release(loan.slot, loan.generation)
        with pytest.raises(TransportError, match="loan of a tensor ended"):
            reader.get(ref)
    assert (owner.live, owner.used_bytes) == (0, 0)


def test_a_dead_readers_loans_come_back_and_others_stay(ends):
    owner, _ = ends
    for to in ("reader", "reader", "other"):
        owner.put(np.zeros(MIB, dtype=np.uint8), to)
    assert owner.reclaim("reader") == 2
    assert owner.live == 1
    assert owner.reclaim("reader") == 0


def test_a_full_transport_refuses_one_tensor_and_goes_on(ends):
    owner, reader = ends
    ref = owner.put(np.ones(3 * MIB, dtype=np.uint8), "reader")
    with pytest.raises(ArenaFull):
        owner.put(np.zeros(2 * MIB, dtype=np.uint8), "reader")
    assert int(reader.get(ref)[-1]) == 1
    loan = loan_of(ref)
    assert loan is not None
    owner.release(loan.slot, loan.generation)
    owner.put(np.zeros(2 * MIB, dtype=np.uint8), "reader")


def test_a_gone_owner_is_an_error(ends):
    owner, reader = ends
    ref = owner.put(np.zeros(MIB // 8), "reader")
    reader.get(ref)
    reader.reclaim("owner")
    with pytest.raises(TransportError, match="gone") as gone:
        reader.get(ref)
    assert gone.value.facts["peer"] == "owner"


def test_handles_of_an_earlier_life_do_not_read_the_successor(ends, open_end):
    owner, reader = ends
    stale = owner.put(np.zeros(MIB // 8), "reader")
    owner.close()
    successor = open_end("owner", 2)
    reader.connect("owner", successor.endpoint, 2)
    reader.connect("owner", owner.endpoint, 1)  # a late announcement of the first life
    fresh = successor.put(np.ones(MIB // 8), "reader")
    with pytest.raises(TransportError):
        reader.get(stale)
    assert float(reader.get(fresh)[0]) == 1.0


def test_closing_twice_is_harmless(ends):
    for end in ends:
        end.close()
        end.close()


@pytest.mark.parametrize(
    "ref",
    [
        InlineTensor(dtype="float32", shape=(2,), data=b"1234"),
        InlineTensor(dtype="float32", shape=(-1,), data=b"1234"),
        InlineTensor(dtype="pickle", shape=(1,), data=b"1234"),
        ShmTensor(dtype="uint8", shape=(1,), owner="stranger", offset=0, size_bytes=1, slot=0, generation=1),
    ],
    ids=["short", "negative", "type", "stranger"],
)
def test_a_handle_that_makes_no_sense_is_an_error(ends, ref):
    with pytest.raises(TransportError):
        ends[1].get(ref)


def test_transport_loads_neither_torch_nor_any_transport_engine():
    script = "import sys, mstar_core.transport.shm; print({'torch', 'mooncake'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    assert output_of([sys.executable, "-c", script], cwd=root).strip() == "set()"
