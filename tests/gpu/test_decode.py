"""Decode attention (rotation, append and attention in one kernel) against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mstar_core.layers import Rotary, RotarySpec, rotate
from mstar_core.layers.kv_view import HeadNorms

pytestmark = pytest.mark.gpu

PAGE, WIDTH = 16, 128


class Rows:
    """Random rows of these lengths (with the new token) in a pool whose unused slots contain NaN."""

    def __init__(self, device: torch.device, lengths: list[int], heads: int, kv_heads: int, parts: int) -> None:
        self.lengths, self.heads, self.kv_heads = lengths, heads, kv_heads
        counts = [-(-length // PAGE) for length in lengths]
        self.pages = torch.randperm(sum(counts) + 3, device=device)[: sum(counts)].int()
        self.starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
        self.pool = torch.full((sum(counts) + 3, 2, PAGE, kv_heads, WIDTH), float("nan"), device=device).bfloat16()
        for row, length in enumerate(lengths):
            for at in range(0, length - 1, PAGE):
                held = min(PAGE, length - 1 - at)
                page = self.pages[self.starts[row] + at // PAGE]
                self.pool[page, :, :held] = torch.randn(2, held, kv_heads, WIDTH, device=device).bfloat16()
        size = (parts, len(lengths), (heads + 2 * kv_heads) * WIDTH)
        sliced = torch.randn(size, device=device)
        self.packed = sliced if parts > 1 else sliced[0].bfloat16()
        self.rotation = Rotary(RotarySpec(width=WIDTH)).to(device)(torch.tensor(lengths, device=device) - 1)
        last = torch.tensor([(length - 1) % PAGE for length in lengths], device=device)
        ends = self.pages[torch.tensor(self.starts[1:], device=device) - 1].long()
        self.fields = {
            "starts": torch.tensor(self.starts, dtype=torch.int32, device=device),
            "pages": self.pages,
            "last": (last + 1).int(),
            "places": ends * (2 * PAGE) + last,
        }

    def norms(self) -> HeadNorms:
        """Return weights of head norms."""
        query, key = (torch.rand(2, WIDTH, device=self.packed.device) + 0.5).bfloat16()
        return query, key, 1e-6

    def expected(self, norms: HeadNorms | None = None) -> tuple[Tensor, Tensor]:
        """Return outputs in float64, and the pool with the new tokens."""
        whole = (self.packed.sum(0) if self.packed.dim() == 3 else self.packed).bfloat16()
        split = [self.heads, self.kv_heads, self.kv_heads]
        query, key, value = whole.view(len(self.lengths), -1, WIDTH).split(split, dim=1)
        if norms is not None:
            query, key = normalized(query, norms[0], norms[2]), normalized(key, norms[1], norms[2])
        query, key = (rotate(each.float(), *self.rotation).bfloat16() for each in (query, key))
        pool, found = self.pool.clone(), []
        flat = pool.view(-1, self.kv_heads, WIDTH)
        flat[self.fields["places"]], flat[self.fields["places"] + PAGE] = key, value
        for row, length in enumerate(self.lengths):
            pages = self.pages[self.starts[row] : self.starts[row + 1]].long()
            keys, values = (pool[pages, at].reshape(-1, self.kv_heads, WIDTH)[:length].double() for at in (0, 1))
            grouped = query[row].double().view(self.kv_heads, -1, WIDTH)
            share = (torch.einsum("hgd,shd->hgs", grouped, keys) * WIDTH**-0.5).softmax(-1)
            found.append(torch.einsum("hgs,shd->hgd", share, values).reshape(self.heads, WIDTH))
        return torch.stack(found), pool


def normalized(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each head, rounded as the layer does."""
    wide = heads.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).bfloat16()


@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 8), (32, 4), (6, 2), (4, 4)])
@pytest.mark.parametrize(
    "lengths",
    [[1], [16], [17], [338], [2000], [1, 2, 15, 16, 33, 338, 5, 700], [40 + 11 * row for row in range(64)]],
    ids=str,
)
def test_one_kernel_equals_float64(
    cuda: torch.device, lengths: list[int], heads: int, kv_heads: int, parts: int, is_normed: bool
) -> None:
    from mstar_core.engine.attention.kernels.decode import DecodeAttention

    rows = Rows(cuda, lengths, heads, kv_heads, parts)
    norms = rows.norms() if is_normed else None
    expected, pool = rows.expected(norms)
    kernel = DecodeAttention(len(lengths), heads, rows.pool)
    first = None
    for _ in range(3):
        found = kernel.attend(rows.pool, rows.packed, rows.rotation, rows.fields, WIDTH**-0.5, norms)
        assert found.isfinite().all()
        assert float((found.double() - expected).norm() / expected.norm()) < 6e-3
        assert first is None or torch.equal(found, first)
        first = found
    assert torch.allclose(rows.pool.float(), pool.float(), rtol=1e-2, atol=1e-3, equal_nan=True)


def test_layers_share_the_scratch_in_one_graph(cuda: torch.device) -> None:
    """Kernels of a graph overlap, so a race on the shared scratch memory would change the results."""
    from mstar_core.engine.attention.kernels.decode import DecodeAttention

    layers = [Rows(cuda, [338, 60, 1], 24, 8, 3) for _ in range(12)]
    kernel = DecodeAttention(3, 24, layers[0].pool)

    def run() -> list[Tensor]:
        return [kernel.attend(each.pool, each.packed, each.rotation, each.fields, WIDTH**-0.5) for each in layers]

    expected = [value.clone() for value in run()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(30):
        for value in found:
            value.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
