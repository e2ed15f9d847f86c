"""Tensors between two network namespaces, which stand for two hosts, by TCP."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from mstar_core.messages.tensors import PeerTensor
from tests.fakes.commands import output_of
from tests.fakes.mooncake import needs_mooncake
from tests.fakes.namespaces import ADDRESSES, inside, two_hosts
from tests.worker.test_peer_memory_transports import other_process

PORT = 8080

READER = """
import sys, time, msgspec, torch
from mstar_core.config.resolved import TransportConfig
from mstar_core.messages.tensors import TensorRef
from mstar_core.worker.peer_memory.mooncake import MooncakeMemory, open_engine
from mstar_core.worker.peer_memory.transport import PeerMemory
ref = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=TensorRef)
engine, session = open_engine(TransportConfig(protocol="TCP"), 1, 1, sys.argv[2])
memory = PeerMemory("worker-1", 1, MooncakeMemory(engine, session, torch.device("cpu")), [])
start = time.monotonic()
memory.begin(ref)
begun_s = time.monotonic() - start
while not memory.is_ready(ref):
    time.sleep(1e-3)
failure = memory.failure(ref)
waited_s = time.monotonic() - start
print("OUT", begun_s / waited_s, failure.detail if failure else int(memory.take(ref).sum()), flush=True)
memory.close()
"""


def read(host: int, ref: PeerTensor, address: str) -> tuple[float, str]:
    """Read in a namespace. Returns the share of the wait in which the call blocked, and the sum or the failure."""
    words = inside(host, sys.executable, "-c", READER, msgspec.msgpack.encode(ref).hex(), address)
    root = Path(__file__).parents[2]
    told = output_of(words, cwd=root, timeout=300)
    _, blocked, found = next(line for line in told.splitlines() if line.startswith("OUT ")).split(" ", 2)
    return float(blocked), found


@needs_mooncake
def test_ranks_in_two_network_namespaces_exchange_tensors() -> None:
    count = 1_000_000
    with (
        two_hosts() as hosts,
        other_process(PORT, device="v1", count=count, inside=tuple(inside(hosts[1]))) as (_, ref),
    ):
        assert ref.memory.startswith(ADDRESSES[1].encode())
        assert read(hosts[0], ref, ADDRESSES[0])[1] == str(count * (count - 1) // 2)
        output_of(inside(hosts[1], "ip", "link", "set", "v1", "down"))
        blocked, failure = read(hosts[0], ref, ADDRESSES[0])
        assert blocked < 0.5, "the wait for a host that does not answer is not in the call"
        assert f"{ADDRESSES[1]}:" in failure and "cannot be reached" in failure
