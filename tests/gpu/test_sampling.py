"""The one-block sampling kernel draws what the sorting path draws, eager and captured."""

from __future__ import annotations

import pytest
import torch

from mstar_core.layers import sampling

pytestmark = pytest.mark.gpu

RULES = [(0.0, 50, 0.8), (1.0, 50, 0.8), (0.7, 64, 1.0), (1.3, 65, 0.5), (1.0, 0, 0.9), (1.0, 0, 1.0), (0.9, 1, 1.0)]


def arguments(device: torch.device, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(vocab)
    rules = RULES * 5
    logits = (torch.randn(len(rules), vocab, generator=generator) * 3).to(dtype)
    uniform = torch.rand(len(rules), generator=generator)
    heat, count, mass = zip(*rules, strict=True)
    given = (logits, uniform, torch.tensor(heat), torch.tensor(count), torch.tensor(mass))
    return tuple(each.to(device) for each in given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 53, 64, 2048, 3072, 4096])
def test_ids_equal_the_sorting_path(cuda: torch.device, vocab: int, dtype: torch.dtype) -> None:
    given = arguments(cuda, vocab, dtype)
    expected = sampling.draw(*(each.cpu() for each in given))
    assert sampling.draw(*given).tolist() == expected.tolist()


def test_a_captured_draw_reads_its_buffers_anew(cuda: torch.device) -> None:
    given = arguments(cuda, 2048, torch.bfloat16)
    sampling.draw(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sampling.draw(*given)
    for turn in range(3):
        given[1].copy_(torch.rand(len(given[1]), generator=torch.Generator().manual_seed(turn)))
        graph.replay()
        assert drawn.tolist() == sampling.draw(*(each.cpu() for each in given)).tolist()
