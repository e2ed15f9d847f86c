"""Tensors of a GPU that go to other ranks through registered host memory, with a fake transfer engine."""

from __future__ import annotations

import time

import pytest
import torch

from mstar_core.worker.peer_memory.transport import PeerMemory
from tests.fakes.mooncake import network_memory

pytestmark = pytest.mark.gpu


def test_a_tensor_of_a_gpu_is_staged_behind_the_work_of_its_stream(cuda: torch.device) -> None:
    ends = [
        PeerMemory(f"worker-{i}", 1, network_memory(i, str(cuda), is_fake=True), [f"worker-{1 - i}"], least_bytes=0)
        for i in (0, 1)
    ]
    value = torch.zeros(4 << 20, dtype=torch.bfloat16, device=cuda)
    value += 1  # loads the kernel, which waits for the device
    torch.cuda._sleep(100_000_000)
    value += 2
    sent = ends[0].send(value, "worker-1")
    assert not sent.is_done, "the sender does not wait for the GPU"
    while not sent.is_done:
        time.sleep(1e-4)
    ends[1].begin(sent.ref)
    while not ends[1].is_ready(sent.ref):
        time.sleep(1e-4)
    found = ends[1].take(sent.ref)
    assert not found.is_cuda and torch.equal(found, value.cpu())
    for end in ends:
        end.close()
