"""Tensor parallelism on two GPUs: collectives inside CUDA graphs, and Orpheus over HTTP against one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from mstar_core.config.resolved import KVCacheConfig
from tests.parallel.test_served import TP2, serves
from tests.runtime.deployment import REPO, Deployment, one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.timeout(500)
def test_sums_in_a_graph_equal_those_of_nccl_and_two_gpus_decode(tmp_path: Path) -> None:
    out = tmp_path / "tp.json"
    command = [sys.executable, "-m", "bench.gpu_tp", "--steps", "60", "--batches", "1,8", "--out", str(out)]
    subprocess.run(command, cwd=REPO, check=True, timeout=480)
    found = json.loads(out.read_text())
    assert all(each["equals_nccl"] for each in found["two_gpus"]["all_reduce"].values())
    assert all(each["graph_misses"] == 0 and each["graph_hits"] > 0 for each in found["two_gpus"]["decode"])


async def test_two_gpus_speak_as_one_does_in_float32() -> None:
    settings = {"dtype": "float32", "attention": "torch", "kv_cache": KVCacheConfig(pages=1024, prefix_cache=False)}
    devices = [msgspec.structs.replace(rank, device=f"cuda:{rank.rank}") for rank in TP2.ranks]
    alone = [msgspec.structs.replace(rank, device="cuda:0") for rank in one_rank().ranks]
    with Deployment(where=msgspec.structs.replace(one_rank(), ranks=tuple(alone)), **settings) as one:
        wanted = await serves(one)
    with Deployment(where=msgspec.structs.replace(TP2, ranks=tuple(devices)), **settings) as two:
        assert await serves(two) == wanted
