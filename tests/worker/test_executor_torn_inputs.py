"""Inputs whose loan ends while a worker copies them: the request fails, and nothing is cached under their content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from mstar_core.engine.base import Handle
from mstar_core.messages.flow import StreamTensor
from mstar_core.messages.work import WorkFailed
from mstar_core.transport.dtypes import Array
from mstar_core.transport.shm import TensorTransport
from mstar_core.worker import executor as module
from mstar_core.worker.arrays import to_tensor
from tests.worker.test_executor import Bench


@pytest.fixture
def ends() -> Iterator[tuple[TensorTransport, TensorTransport]]:
    with (
        TemporaryDirectory(prefix="mstar-") as folder,
        TensorTransport("api", 1, Path(folder), inline_bytes=-1) as owner,
        TensorTransport("worker-0", 1, Path(folder)) as reader,
    ):
        reader.connect("api", owner.endpoint, 1)
        yield owner, reader


@pytest.fixture
def torn(ends: tuple[TensorTransport, TensorTransport], monkeypatch: pytest.MonkeyPatch) -> TensorTransport:
    """The owner of tensors whose loans all end, and whose memory is used again, while they are copied."""
    owner, _ = ends

    def copied(array: Array, dtype: str) -> torch.Tensor:
        for slot, loan in list(owner.arena._loans.items()):
            owner.release(slot, loan.generation)
        owner.put(np.full(array.shape, 7), "worker-0")
        return to_tensor(array, dtype)

    monkeypatch.setattr(module, "to_tensor", copied)
    return owner


def bench_of(reader: TensorTransport) -> Bench:
    bench = Bench({1: [1, 2]})
    bench.executor._transport = reader
    bench.open(1)
    return bench


def test_a_torn_input_fails_its_request_before_any_job(
    ends: tuple[TensorTransport, TensorTransport], torn: TensorTransport
) -> None:
    bench = bench_of(ends[1])
    ref = torn.put(np.arange(100), "conductor")
    bench.walk(1, "LLM", 1, "prefill", inputs={"tokens": ref}, contents={"tokens": b"key"})
    bench.turns()
    [failed] = bench.post.of(WorkFailed)
    assert failed.handle == 1 and "loan of a tensor ended" in failed.error.message
    assert not bench.lm.seen and Handle(1) not in bench.executor.requests


def test_a_torn_item_of_a_stream_fails_its_request(
    ends: tuple[TensorTransport, TensorTransport], torn: TensorTransport
) -> None:
    bench = bench_of(ends[1])
    ref = torn.put(np.arange(100), "worker-0")
    bench.executor.stream_tensor(StreamTensor(stream="audio_ids", handle=1, index=0, ref=ref))
    bench.outbox.flush()
    assert [failed.handle for failed in bench.post.of(WorkFailed)] == [1]
