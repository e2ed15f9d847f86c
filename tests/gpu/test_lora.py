"""The kernels of LoRA adapters against their CPU twin, and captured steps with adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.engine.steps.adapters import adapter_blocks
from mstar_core.layers.lora import AdaptedProjections, AdapterBank, AdapterBlocks, AdapterLimits

pytestmark = pytest.mark.gpu
pytest.importorskip("mstar_core.layers.kernels.lora", reason="runs where triton is installed")

OUTPUTS = {"q": (4096, 1024, 1024), "o": (4096,), "gate": (1536, 1536), "odd": (200, 72)}
INPUTS = {"q": 4096, "o": 4096, "gate": 640, "odd": 88}


def projections(name: str, limits: AdapterLimits, dtype: torch.dtype, device: torch.device) -> AdaptedProjections:
    generator = torch.Generator(device).manual_seed(3)
    names, inputs, outputs = tuple("abc"[: len(OUTPUTS[name])]), INPUTS[name], OUTPUTS[name]
    made = AdapterBank(limits).adapted(names, outputs, inputs, {}, torch.empty(0, dtype=dtype, device=device))
    made.down.copy_(torch.randn(made.down.shape, generator=generator, device=device) / inputs**0.5)
    made.up.copy_(torch.randn(made.up.shape, generator=generator, device=device) / limits.rank**0.5)
    return made


def on_host(made: AdaptedProjections) -> AdaptedProjections:
    bank = AdapterBank(made.bank.limits)
    return AdaptedProjections(bank, made.names, made.outputs, made.down.cpu().double(), made.up.cpu().double(), {})


def blocks(rows: Tensor, device: torch.device) -> AdapterBlocks:
    order, spans = adapter_blocks(rows.numpy().astype(np.int64))
    return AdapterBlocks(torch.from_numpy(order).to(device), torch.from_numpy(spans).to(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("name", OUTPUTS)
def test_kernels_equal_their_twin(name: str, rank: int, tokens: int, dtype: torch.dtype, cuda: torch.device) -> None:
    made = projections(name, AdapterLimits(count=5, rank=rank), dtype, cuda)
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randint(-1, 5, (tokens,), generator=generator)
    x = torch.randn(tokens, INPUTS[name], generator=generator).to(cuda, dtype)
    plain = torch.randn(tokens, sum(OUTPUTS[name]), generator=generator).to(cuda, dtype)
    twin = on_host(made)
    expected, out = plain.cpu().double(), plain.clone()
    with twin.bank.applied(blocks(rows, torch.device("cpu"))), made.bank.applied(blocks(rows, cuda)):
        twin.add(x.cpu().double(), expected)
        made.add(x, out)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(out[rows < 0], plain[rows < 0])


def test_one_projection_and_partial_sums(cuda: torch.device) -> None:
    made = projections("q", AdapterLimits(count=2, rank=16), torch.bfloat16, cuda)
    rows, x = torch.tensor([0, 1, -1, 1]), torch.randn(4, 4096, device=cuda, dtype=torch.bfloat16)
    whole = torch.zeros(3, 4, 6144, device=cuda)
    part = torch.zeros(4, 1024, device=cuda)
    with made.bank.applied(blocks(rows, cuda)):
        made.add(x, whole)
        made.add(x, part, "b")
    assert not whole[1:].any() and whole[0].any()
    torch.testing.assert_close(part, whole[0, :, 4096:5120], atol=0, rtol=0)


def test_a_captured_product_takes_other_adapters_in_each_replay(cuda: torch.device) -> None:
    made = projections("o", AdapterLimits(count=3, rank=16), torch.bfloat16, cuda)
    x = torch.randn(8, 4096, device=cuda, dtype=torch.bfloat16)
    order = torch.zeros(8, dtype=torch.int32, device=cuda)
    spans = torch.zeros(3, 3, dtype=torch.int32, device=cuda)
    out = torch.zeros(8, 4096, device=cuda, dtype=torch.bfloat16)
    with made.bank.applied(AdapterBlocks(order, spans)):
        made.add(x, out)
        torch.cuda.synchronize(cuda)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.zero_()
            made.add(x, out)
    for rows in (torch.tensor([0, 2, -1, 2, 1, 0, -1, 0]), torch.full((8,), -1), torch.full((8,), 1)):
        current = blocks(rows, cuda)
        order.zero_()[: len(current.order)].copy_(current.order)
        spans.zero_()[: len(current.blocks)].copy_(current.blocks)
        graph.replay()
        expected = torch.zeros_like(out)
        with made.bank.applied(current):
            made.add(x, expected)
        assert torch.equal(out, expected)
