"""Weights on their way to a GPU, and pools that share one: what is there afterwards, and that it fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mstar_core.engine.attention import make_pools
from mstar_core.engine.cache.sizing import PoolRequest, node_shares, plan_pool, rank_budget
from mstar_core.errors import StartError
from mstar_core.graph.declare.nodes import KVSpec
from mstar_core.layers import Checkpoint, load_weights
from mstar_core.weights.checkpoint import UploadTarget, stored_tensors, upload

pytestmark = pytest.mark.gpu

SPEC = KVSpec(layers=4, kv_heads=8, head_dim=128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_arrives_is_what_the_file_holds(tmp_path: Path, cuda: torch.device, dtype: torch.dtype) -> None:
    values = {"a": torch.randn(3001, 2003).to(torch.bfloat16), "b": torch.randn(17), "c": torch.randn(5000, 1025)}
    save_file(values, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path / "model.safetensors")
    wide = torch.zeros(5000, 2048, device=cuda, dtype=dtype)
    for _ in range(3):  # a buffer that is filled too early shows as a wrong value now and then
        places = {each.name: torch.full(each.shape, 9, dtype=dtype, device=cuda) for each in stored}
        places["c"] = wide[:, 7 : 7 + 1025]
        upload([UploadTarget(stored=each, tensor=places[each.name]) for each in stored], chunk_bytes=1 << 16)
        for name, value in values.items():
            assert torch.equal(places[name].cpu(), value.to(dtype)), name


def test_a_module_on_a_gpu_is_filled_and_wrong_shapes_are_refused_before_anything_changed(
    tmp_path: Path, cuda: torch.device
) -> None:
    source = nn.Linear(64, 32)
    save_file({name: value.detach() for name, value in source.named_parameters()}, tmp_path / "model.safetensors")
    module = nn.Linear(64, 32, device=cuda, dtype=torch.bfloat16)
    seen: list[int] = []
    load_weights(module, Checkpoint.find(tmp_path), progress=lambda done, total, _: seen.append(total - done))
    assert torch.equal(module.weight.cpu(), source.weight.to(torch.bfloat16)) and seen[-1] == 0


def test_two_engines_of_one_process_divide_its_share(cuda: torch.device) -> None:
    held = torch.empty(256 << 20, dtype=torch.uint8, device=cuda)
    budget = rank_budget(cuda, 0.3, 1 << 30).check()
    assert budget.weights_bytes >= held.numel()
    pools = []
    for node, share in node_shares(["thinker", "talker"], {"thinker": 0.75}).items():
        plan = plan_pool(
            SPEC, PoolRequest(), node=node, dtype=torch.bfloat16, free_bytes=int(budget.pool_bytes * share), longest=64
        )
        pools.append(make_pools(SPEC, plan.pages, plan.page_size, torch.bfloat16, cuda))
    sizes = [sum(pool.numel() * pool.element_size() for pool in each) for each in pools]
    assert sizes[0] == pytest.approx(3 * sizes[1], rel=0.01)
    assert torch.cuda.memory_reserved(cuda) <= 0.3 * budget.total_bytes - budget.reserve_bytes + (64 << 20)


def test_memory_that_another_process_uses_is_not_counted_on(cuda: torch.device) -> None:
    torch.cuda.empty_cache()  # what this process keeps for itself would be given back in between, and count as free
    free, total = torch.cuda.mem_get_info(cuda)
    held = torch.empty(int(free - 0.2 * total), dtype=torch.uint8, device=cuda)
    with pytest.raises(StartError, match="other processes use"):
        rank_budget(cuda, 0.5, 0).check_free(int(0.4 * total))
    del held


CHILD = """
import sys, torch
from mstar_core.engine.attention import make_pools
from mstar_core.engine.cache.sizing import rank_budget
from mstar_core.engine.cache.sizing import PoolRequest, plan_pool
from mstar_core.graph.declare.nodes import KVSpec
spec, device = KVSpec(layers=4, kv_heads=8, head_dim=128), torch.device("cuda", 0)
weights = torch.empty(512 << 20, dtype=torch.uint8, device=device)
budget = rank_budget(device, 0.4, 1 << 30).check()
plan = plan_pool(spec, PoolRequest(), node="LLM", dtype=torch.bfloat16, free_bytes=budget.pool_bytes, longest=64)
pools = make_pools(spec, plan.pages, plan.page_size, torch.bfloat16, device)
for pool in pools:
    pool.fill_(1)
torch.cuda.synchronize()
print("holds", plan.size_bytes, flush=True)
sys.stdin.read()
"""


def test_two_processes_on_one_gpu_hold_their_pools_at_once(cuda: torch.device) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(cuda)
    assert free > 0.85 * total, "this test needs the GPU to itself"
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        lines = [child.stdout.readline() if child.stdout else "" for child in children]
        sizes = [int(line.split()[1]) for line in lines if line.startswith("holds")]
        assert len(sizes) == 2 and abs(sizes[0] - sizes[1]) <= 64 << 20, lines
        assert torch.cuda.mem_get_info(cuda)[0] > 0.15 * total, "each keeps within its share, reserve included"
    finally:
        for child in children:
            child.communicate("", timeout=60)
