"""Tensors and caches between GPU workers of one host: CUDA IPC, and a deployment whose caches move."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch

from mstar_core.config.resolved import KVCacheConfig
from mstar_core.messages.tensors import CudaTensor
from mstar_core.worker.peer_memory.memory import CudaMemory
from mstar_core.worker.peer_memory.transport import PeerMemory
from tests.runtime.client import SURE, new_client, request, speak
from tests.runtime.deployment import Deployment, one_rank
from tests.runtime.golden import PROMPTS, Golden
from tests.runtime.test_moves import PREFILL_APART

pytestmark = pytest.mark.gpu
DEVICES = [0, pytest.param(1, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="runs with two GPUs"))]
COUNT = 1 << 22


def lend(device: int, pipe: Connection) -> None:
    """Lend tensors from another process until the pipe brings None."""
    memory = PeerMemory("worker-0", 1, CudaMemory(torch.device("cuda", device)), ["worker-1"], least_bytes=0)
    while (seed := pipe.recv()) is not None:
        generator = torch.Generator(f"cuda:{device}").manual_seed(seed)
        tensor = torch.randn(COUNT, generator=generator, device=f"cuda:{device}").to(torch.bfloat16)
        outgoing = memory.send(tensor, "worker-1")
        while not outgoing.is_done:
            pass
        pipe.send((msgspec.msgpack.encode(outgoing.ref), tensor.float().sum().item()))
        slot, generation = pipe.recv()
        assert memory.release(slot, generation)
    memory.close()


@pytest.fixture(params=DEVICES)
def lender(request: pytest.FixtureRequest, cuda: torch.device) -> Iterator[Connection]:
    """A process that lends tensors of a GPU: this one's, or another."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=lend, args=(request.param, there))
    process.start()
    yield here
    here.send(None)
    process.join(30)
    assert process.exitcode == 0


def read(memory: PeerMemory, ref: CudaTensor) -> torch.Tensor:
    memory.begin(ref)
    while not memory.is_ready(ref):
        pass
    return memory.take(ref)


def test_a_tensor_of_another_process_arrives_without_the_host(lender: Connection, cuda: torch.device) -> None:
    memory = PeerMemory("worker-1", 1, CudaMemory(cuda), ["worker-0"])
    for seed in range(3):
        lender.send(seed)
        data, total = lender.recv()
        ref = msgspec.msgpack.decode(data, type=CudaTensor)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            found = read(memory, ref)
            torch.cuda.synchronize()
        assert found.float().sum().item() == total
        copies = [event.key for event in profile.key_averages() if "memcpy" in event.key.lower()]
        assert copies, [event.key for event in profile.key_averages()]
        assert not any("HtoD" in name or "DtoH" in name for name in copies), copies
        lender.send((ref.slot, ref.generation))
    memory.close()


def test_a_bad_handle_leaves_the_device_usable(cuda: torch.device) -> None:
    memory = PeerMemory("worker-1", 1, CudaMemory(cuda), ["worker-0"])
    ref = CudaTensor(
        dtype="uint8",
        shape=(4,),
        owner="worker-0",
        memory=bytes(64),
        offset=0,
        size_bytes=4,
        slot=1 << 20,
        generation=1,
    )
    with pytest.raises(Exception, match="cudaIpcOpenMemHandle"):
        memory.begin(ref)
    assert torch.ones(3, device=cuda).sum().item() == 3


@pytest.mark.parametrize("devices", [(0, 0), (0, 1)], ids=["one GPU", "two GPUs"])
def test_speech_of_a_cache_that_moved_equals_that_of_one_rank(
    devices: tuple[int, int], cuda: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if max(devices) >= torch.cuda.device_count():
        pytest.skip("runs with two GPUs")
    golden = Golden.find()
    folder = golden.lay_out(tmp_path_factory.mktemp("golden") / "checkpoint")
    sounds = []
    for where in (one_rank(), PREFILL_APART):
        ranks = tuple(
            msgspec.structs.replace(rank, device=f"cuda:{devices[rank.rank]}", memory_fraction=0.3)
            for rank in where.ranks
        )
        with OnGpus(folder, msgspec.structs.replace(where, ranks=ranks)) as deployment:
            sounds.append([asyncio.run(hear(deployment, golden, index)) for index in PROMPTS])
            deployment.assert_clean()
            values = deployment.snapshot()["values"]
    assert sounds[0] == sounds[1]
    assert values["worker-0.moves_sent"] == values["worker-1.moves_received"] == len(PROMPTS)
    assert values["worker-0.peer_sent_bytes"] > 0, "the pages of a cache go through GPU memory"


class OnGpus(Deployment):
    """A deployment in float32, whose speech is the same on each GPU."""

    def __init__(self, folder: Path, where: object) -> None:
        memory = KVCacheConfig(pages=1024, prefix_cache=False)
        given = {"dtype": "float32", "attention": "torch", "max_seq_len": 1024, "kv_cache": memory}
        super().__init__(folder=folder, where=where, **given)  # type: ignore[arg-type]


async def hear(deployment: Deployment, golden: Golden, index: int) -> bytes:
    body = request(prompt_token_ids=golden.prompt(index) * 5, **{**SURE, "max_output_tokens": 64})
    async with new_client(deployment.url) as client:
        heard = await speak(client, body)
    assert heard.is_whole, heard.body or heard.errors
    return heard.pcm
