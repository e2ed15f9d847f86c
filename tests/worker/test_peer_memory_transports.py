"""Contract of every transport of tensors between workers: SHM, CUDA IPC (with memory that needs no GPU), TCP.

RDMA is TCP with another word for the engine, and needs an adapter.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import pytest
import torch

from mstar_core.errors import ArenaFull, TransportError
from mstar_core.host.network import window
from mstar_core.messages.tensors import InlineTensor, PeerTensor, TensorRef
from mstar_core.transport.shm import TensorTransport
from mstar_core.transport.tensors import loan_of
from mstar_core.worker.arrays import to_array, to_tensor
from mstar_core.worker.peer_memory.memory import DeviceMemory
from mstar_core.worker.peer_memory.transport import OutgoingTensor, PeerMemory
from tests.fakes.mooncake import FakeEngine, needs_mooncake, network_memory, transfer_ports
from tests.fakes.shared_memory import SharedMemory

MIB = 1 << 20
LIMIT = 4 * MIB
PATIENCE_S = 20.0


class End(Protocol):
    """One worker's end of a transport. `send` waits for the copy and `read` for the tensor."""

    release: Callable[[int, int], bool]
    reclaim: Callable[[str, int], int]
    close: Callable[[], None]

    @property
    def live(self) -> int: ...

    def send(self, tensor: torch.Tensor, to: str) -> TensorRef: ...

    def read(self, ref: TensorRef) -> torch.Tensor: ...


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(1e-4)


class Shared:
    """Shared memory, as a worker on the CPU uses it: a tensor is there when its message is."""

    def __init__(self, name: str, folder: Path) -> None:
        self.transport = TensorTransport(name, 1, folder, max_bytes=LIMIT, inline_bytes=-1)
        self.release, self.reclaim, self.close = self.transport.release, self.transport.reclaim, self.transport.close

    @property
    def live(self) -> int:
        return self.transport.live

    def send(self, tensor: torch.Tensor, to: str) -> TensorRef:
        array, dtype = to_array(tensor)
        return self.transport.put(array, to, dtype=dtype)

    def read(self, ref: TensorRef) -> torch.Tensor:
        return to_tensor(self.transport.copy(ref), ref.dtype)


class Peer:
    """Memory that the reader copies from while it goes on."""

    def __init__(self, name: str, memory: DeviceMemory, peers: list[str]) -> None:
        self.memory = PeerMemory(name, 1, memory, peers, segment_bytes=MIB, most_bytes=LIMIT, least_bytes=0)
        self.release, self.reclaim, self.close = self.memory.release, self.memory.reclaim, self.memory.close

    @property
    def live(self) -> int:
        return self.memory.live

    def send(self, tensor: torch.Tensor, to: str) -> TensorRef:
        outgoing = self.memory.send(tensor, to)
        until(lambda: outgoing.is_done)
        return outgoing.ref

    def read(self, ref: TensorRef) -> torch.Tensor:
        assert isinstance(ref, PeerTensor)
        self.memory.begin(ref)
        until(lambda: self.memory.is_ready(ref))
        error = self.memory.failure(ref)
        if error is not None:
            raise error
        return self.memory.take(ref)


def shared_pair(folder: Path) -> tuple[End, End]:
    ends = Shared("worker-0", folder), Shared("worker-1", folder)
    ends[1].transport.connect("worker-0", ends[0].transport.endpoint, 1)
    return ends


def peer_pair(folder: Path) -> tuple[End, End]:
    shared = SharedMemory(polls=2)
    return Peer("worker-0", shared.end(), ["worker-1"]), Peer("worker-1", shared.end(), ["worker-0"])


def network_pair(folder: Path, *, is_fake: bool = False) -> tuple[End, End]:
    first, second = (network_memory(number, is_fake=is_fake) for number in (0, 1))
    return Peer("worker-0", first, ["worker-1"]), Peer("worker-1", second, ["worker-0"])


Pair = tuple[End, End]


@pytest.fixture(
    params=[
        pytest.param(shared_pair, id="SHM"),
        pytest.param(peer_pair, id="IPC"),
        pytest.param(network_pair, id="TCP", marks=needs_mooncake),
        pytest.param(partial(network_pair, is_fake=True), id="fake engine"),
    ]
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="mstar-") as folder:
        ends: Pair = request.param(Path(folder))
        yield ends
        for end in ends:
            end.close()
            end.close()


def over_the_wire(ref: TensorRef) -> TensorRef:
    decoded: TensorRef = msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=TensorRef)  # type: ignore[call-overload]
    assert decoded == ref
    return decoded


def give_back(owner: End, ref: TensorRef) -> bool:
    loan = loan_of(ref)
    assert loan is not None
    return owner.release(loan.slot, loan.generation)


@pytest.mark.parametrize("size", [0, 1, 4095, 32 * 1024 + 1, MIB, LIMIT])
def test_messages_of_any_size_arrive(pair: Pair, size: int) -> None:
    value = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    ref = over_the_wire(pair[0].send(value, "worker-1"))
    assert torch.equal(pair[1].read(ref), value)
    assert (give_back(pair[0], ref), give_back(pair[0], ref), pair[0].live) == (True, False, 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (40, 3, 100)])
def test_types_and_shapes_arrive(pair: Pair, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 100).to(dtype)
    found = pair[1].read(over_the_wire(pair[0].send(value, "worker-1")))
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(found, value)


def test_strided_tensors_arrive_as_their_values(pair: Pair) -> None:
    value = torch.arange(40_000).view(200, 200).t()[::2, 1::3]
    assert torch.equal(pair[1].read(pair[0].send(value, "worker-1")), value)


def test_the_senders_later_changes_do_not_arrive(pair: Pair) -> None:
    value = torch.ones(100_000)
    ref = pair[0].send(value, "worker-1")
    value.zero_()
    assert pair[1].read(ref).sum() == 100_000


def test_many_tensors_may_be_lent_at_once_and_read_in_any_order(pair: Pair) -> None:
    refs = [pair[0].send(torch.full((MIB // 64,), number, dtype=torch.int32), "worker-1") for number in range(32)]
    assert pair[0].live == 32
    for number in (31, 0, *range(30, 0, -1)):
        assert int(pair[1].read(refs[number])[-1]) == number
        assert give_back(pair[0], refs[number])
    assert pair[0].live == 0


def test_memory_is_used_again(pair: Pair) -> None:
    for number in range(40):  # ten times the limit in all
        ref = pair[0].send(torch.full((MIB // 4,), number, dtype=torch.int32), "worker-1")
        assert int(pair[1].read(ref)[-1]) == number
        give_back(pair[0], ref)


def test_a_tensor_beyond_the_limit_is_an_error_of_its_own(pair: Pair) -> None:
    with pytest.raises(ArenaFull):
        pair[0].send(torch.zeros(LIMIT + 1, dtype=torch.uint8), "worker-1")
    assert pair[1].read(pair[0].send(torch.ones(9), "worker-1")).sum() == 9


def test_loans_of_a_dead_reader_end_and_others_stay(pair: Pair) -> None:
    for to in ("worker-1", "worker-2", "worker-1"):
        pair[0].send(torch.ones(9000), to)
    assert (pair[0].reclaim("worker-1", 1), pair[0].live) == (2, 1)


def test_a_handle_that_contradicts_itself_is_refused(pair: Pair) -> None:
    ref = pair[0].send(torch.ones(9000), "worker-1")
    assert not isinstance(ref, InlineTensor)
    for changes in ({"shape": (10,)}, {"dtype": "nonsense"}, {"owner": "worker-9", "generation": 7, "memory": b"?"}):
        if "memory" in changes and not isinstance(ref, PeerTensor):
            del changes["memory"]
        with pytest.raises(TransportError):
            pair[1].read(msgspec.structs.replace(ref, **changes))
    assert pair[1].read(ref).sum() == 9000


# -- what only transports can do whose reads take time ---------------------------------------------------------------


@pytest.fixture(params=[pytest.param(False, id="TCP", marks=needs_mooncake), pytest.param(True, id="fake engine")])
def network(request: pytest.FixtureRequest) -> Iterator[tuple[PeerMemory, PeerMemory]]:
    """Two ends by TCP whose memory is counted at the end."""
    yield from network_ends(is_fake=request.param)


@pytest.fixture
def real_network() -> Iterator[tuple[PeerMemory, PeerMemory]]:
    """Two ends by TCP, for peers in other processes."""
    yield from network_ends(is_fake=False)


def network_ends(*, is_fake: bool) -> Iterator[tuple[PeerMemory, PeerMemory]]:
    memories = (
        network_memory(0, is_fake=is_fake),
        network_memory(1, is_fake=is_fake, staging_bytes=MIB, most_staging_bytes=2 * MIB),
    )
    engines = [memory.engine for memory in memories]
    ends = tuple(PeerMemory(f"worker-{i}", 1, memories[i], [f"worker-{1 - i}"], least_bytes=0) for i in (0, 1))
    yield ends[0], ends[1]
    for end in ends:
        end.close()
    assert [len(memory.registered) for memory in memories] == [0, 0]
    assert not any(engine.memory for engine in engines if isinstance(engine, FakeEngine))


Network = tuple[PeerMemory, PeerMemory]


def begin(ends: Network, value: torch.Tensor) -> PeerTensor:
    outgoing = ends[0].send(value, "worker-1")
    assert isinstance(outgoing, OutgoingTensor) and outgoing.is_done
    ends[1].begin(outgoing.ref)
    return outgoing.ref


def test_reads_beyond_the_limit_wait_for_others_and_all_arrive(network: Network) -> None:
    refs = [begin(network, torch.full((MIB,), number, dtype=torch.uint8)) for number in range(8)]
    refs.append(begin(network, torch.full((5 * MIB,), 8, dtype=torch.uint8)))
    for number in reversed(range(9)):
        until(lambda ref=refs[number]: network[1].is_ready(ref))  # type: ignore[misc]
        assert int(network[1].take(refs[number])[-1]) == number


def test_a_cancelled_read_frees_its_memory_once_the_engine_has_let_go_of_it(network: Network) -> None:
    memory = network[1]._memory
    begin(network, torch.ones(9))
    for _ in range(6):
        ref = begin(network, torch.ones(MIB // 2, dtype=torch.float32))
        network[1].drop(ref)
    assert network[1].reading == 1
    until(lambda: memory.advance() or not memory.reading)  # type: ignore[attr-defined,func-returns-value]
    assert sum(len(staging.data) for staging in memory._staging) <= 2 * MIB  # type: ignore[attr-defined]


def test_a_rank_that_cannot_be_reached_fails_the_tensor_and_names_its_address(network: Network) -> None:
    ref = msgspec.structs.replace(begin(network, torch.ones(9)), memory=b"127.0.0.1:9 4096", slot=77)
    network[1].begin(ref)
    until(lambda: network[1].is_ready(ref))
    error = network[1].failure(ref)
    assert error is not None and "127.0.0.1:9 cannot be reached" in error.detail
    network[1].drop(ref)
    assert network[1].failure(ref) is None


def test_memory_that_is_not_lent_cannot_be_read(network: Network) -> None:
    good = begin(network, torch.ones(9))
    session, _, _ = good.memory.partition(b" ")
    ref = msgspec.structs.replace(good, memory=session + b" 4096", slot=77)
    network[1].begin(ref)
    until(lambda: network[1].is_ready(ref))
    assert network[1].failure(ref) is not None


OWNER = """
import sys, time, torch
from mstar_core.config.resolved import TransportConfig
from mstar_core.worker.peer_memory.mooncake import MooncakeMemory, open_engine
from mstar_core.worker.peer_memory.transport import PeerMemory
import msgspec
port, rank, incarnation, device = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] or None
engine, session = open_engine(TransportConfig(protocol="TCP", port=port, device=device), rank, incarnation)
memory = PeerMemory(f"worker-{rank}", incarnation, MooncakeMemory(engine, session, torch.device("cpu")), ["worker-1"])
sent = memory.send(torch.arange(int(sys.argv[5]), dtype=torch.int64), "worker-1")
assert sent.is_done
print("REF", msgspec.msgpack.encode(sent.ref).hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(
    port: int, rank: int = 0, incarnation: int = 1, device: str = "", count: int = 1000, inside: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], PeerTensor]]:
    """Run an owner in a process of its own. Yields it and the handle of the tensor that it lends."""
    words = [*inside, sys.executable, "-c", OWNER, *map(str, (port, rank, incarnation, device, count))]
    root = Path(__file__).parents[2]
    with subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("REF "))
            yield process, msgspec.msgpack.decode(bytes.fromhex(line[4:]), type=TensorRef)  # type: ignore[call-overload]
        finally:
            process.kill()


@needs_mooncake
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_owner_that_ends_in_the_middle_fails_its_tensors_and_no_others(
    real_network: Network, end: signal.Signals
) -> None:
    with other_process(transfer_ports(), count=16 * MIB) as (process, ref):
        process.send_signal(end)
        real_network[1].begin(ref)
        if end is signal.SIGSTOP:  # the supervisor notices by its heartbeats
            assert not real_network[1].is_ready(ref)
            real_network[1].reclaim("worker-0", 1)
        until(lambda: real_network[1].is_ready(ref))
        assert real_network[1].failure(ref) is not None
        other = begin(real_network, torch.ones(9))
        until(lambda: real_network[1].is_ready(other))
        assert real_network[1].take(other).sum() == 9
    memory = real_network[1]._memory
    until(lambda: memory.advance() or not memory.reading)  # type: ignore[attr-defined,func-returns-value]


@needs_mooncake
def test_the_successor_of_a_dead_owner_is_read_at_ports_of_its_window(real_network: Network) -> None:
    first = transfer_ports()
    for incarnation in (1, 2):
        with other_process(first, incarnation=incarnation) as (_, ref):
            real_network[1].begin(ref)
            until(lambda ref=ref: real_network[1].is_ready(ref))  # type: ignore[misc]
            assert real_network[1].take(ref).sum() == 999 * 500
            port = int(ref.memory.partition(b" ")[0].rpartition(b":")[2])
            assert port in window(first, 0, incarnation)
        real_network[1].reclaim("worker-0", incarnation)
