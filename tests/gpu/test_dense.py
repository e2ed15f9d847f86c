"""Attention of frames on Hopper against float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu

HEADS, WIDTH = 4, 64


class Case:
    """Sequences with cached tokens in random pages, and one unused sequence."""

    def __init__(
        self, cuda: torch.device, tokens: int, page: int, cached: list[int], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention

        self.tokens, self.page, self.cached, self.sequences = tokens, page, cached, len(cached)
        most = -(-(max(cached) + tokens) // page) + 1
        generator = torch.Generator(cuda).manual_seed(tokens + page + len(cached))
        room = (self.sequences * most + 1, 2, page, HEADS, WIDTH)
        self.pool = torch.randn(room, device=cuda, generator=generator).to(dtype)
        order = np.random.default_rng(tokens).permutation(self.sequences * most)
        self.tables = order.reshape(self.sequences, most).astype(np.int32)
        self.shape = AttentionShape(sequences=self.sequences + 1, tokens=tokens, pages=most, writes=True)
        self.passes = AttentionBuffers(PagedDenseAttention([self.pool], page, self.shape), cuda)
        lengths = np.array(cached, dtype=np.int64)
        self.passes.prepare(AttentionMetadata.of(np.arange(self.sequences), lengths, self.tables, tokens, causal=False))
        packed = torch.randn(self.shape.sequences * tokens, 2 * HEADS, WIDTH, device=cuda, generator=generator).to(
            dtype
        )
        # A view of a wider tensor, as after a fused projection.
        self.query = packed[:, :HEADS]

    def output(self, splits: int | None = None) -> Tensor:
        """Return the kernel's output: [sequences + 1, tokens, heads, width]."""
        from mstar_core.engine.attention.static import LOG2E
        from mstar_vjepa2.kernels import dense

        shape = self.shape
        output = dense.attend(
            self.query,
            self.pool,
            dense.descriptor_of(self.pool),
            self.passes.device,
            WIDTH**-0.5 * LOG2E,
            tokens=self.tokens,
            max_pages=shape.pages,
            splits=splits or dense.splits_of(shape.sequences, self.tokens, HEADS),
        )
        return output.view(shape.sequences, self.tokens, HEADS, WIDTH)

    def expected(self, number: int) -> Tensor:
        """Return the reference of one sequence, in float32: [tokens, heads, width]."""
        pages = torch.from_numpy(self.tables[number].astype(np.int64)).to(self.pool.device)
        both = self.pool[pages].float().transpose(0, 1).flatten(1, 2)[:, : self.cached[number] + self.tokens]
        query = self.query.reshape(-1, self.tokens, HEADS, WIDTH)[number].float()
        score = torch.einsum("qhw,khw->hqk", query, both[0]) * WIDTH**-0.5
        return torch.einsum("hqk,khw->qhw", score.softmax(-1), both[1])

    def check(self, splits: int | None = None) -> None:
        """Compare every token of every sequence. The unused one must be zeros."""
        output = self.output(splits)
        assert not output[self.sequences].any()
        for number in range(self.sequences):
            expected = self.expected(number)
            # Per token, because an error of the few remainder tokens would vanish in a norm over all.
            error = (output[number].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error.max() < 2e-2, (number, int(error.amax(-1).argmax()), float(error.max()))


@pytest.fixture(autouse=True)
def exact() -> None:
    """Multiply in float32 in the reference."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("frames", [0, 1, 2, 9, 23, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_sequence_after_cached_frames(frames: int, dtype: torch.dtype, cuda: torch.device) -> None:
    Case(cuda, 258, 258, [258 * frames], dtype).check()


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_sequences_of_different_lengths_in_splits(rows: int, splits: int, cuda: torch.device) -> None:
    Case(cuda, 258, 258, [258 * frames for frames in (11, 0, 4)[:rows]]).check(splits)


@pytest.mark.parametrize("tokens", [64, 66, 200, 256, 257, 264, 265, 272, 273, 320, 514])
def test_remainder_tokens_after_full_tiles(tokens: int, cuda: torch.device) -> None:
    Case(cuda, tokens, 258, [258, 700]).check()


@pytest.mark.parametrize("page", [128, 130, 256, 258, 300])
def test_pages_of_any_size_and_sequences_of_any_length(page: int, cuda: torch.device) -> None:
    Case(cuda, 258, page, [0, 3 * page, 777]).check()


def test_the_same_inputs_give_the_same_bits(cuda: torch.device) -> None:
    case = Case(cuda, 258, 258, [258 * 9])
    first = case.output()
    assert all(torch.equal(first, case.output()) for _ in range(5))


def test_one_sequence_loads_its_cached_keys_before_the_previous_kernel_ends(cuda: torch.device) -> None:
    """Without an unused sequence, blocks of earlier frames are loaded early and those of this pass are not."""
    from mstar_core.engine.attention.kernels.page_copies import append
    from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention
    from mstar_vjepa2.kernels import dense

    case = Case(cuda, 258, 258, [258 * 3])
    shape = AttentionShape(sequences=1, tokens=258, pages=case.shape.pages, writes=True)
    passes = AttentionBuffers(PagedDenseAttention([case.pool], 258, shape), cuda)
    lengths = np.array(case.cached, dtype=np.int64)
    passes.prepare(AttentionMetadata.of(np.arange(1), lengths, case.tables, 258, causal=False))
    query, key, value = torch.randn(3, 258, HEADS, WIDTH, device=cuda).to(torch.bfloat16)
    case.query = torch.cat([query, query])
    append(case.pool, 258, passes.view.places(0)[1], key, value)
    output = passes.view.attend_placed(0, query, kernel=dense)
    expected = case.expected(0)
    assert torch.equal(case.pool[int(case.tables[0, 3]), 0], key)
    assert float((output.float() - expected).norm() / expected.norm()) < 1e-2


def test_the_kernel_supports_frames_only(cuda: torch.device) -> None:
    from mstar_vjepa2.kernels import dense

    def supports(
        tokens: int = 258, page: int = 258, heads: int = 16, kv_heads: int = 16, width: int = 64, rows: int = 1
    ) -> bool:
        query = torch.zeros(rows * tokens, heads, width, device=cuda, dtype=torch.bfloat16)
        pool = torch.zeros(2, 2, page, kv_heads, width, device=cuda, dtype=torch.bfloat16)
        return dense.supports(query, pool, tokens)

    assert supports(rows=2) and not supports(rows=3)
    assert supports() and supports(tokens=256) and supports(page=128) and supports(tokens=128)
    assert not supports(tokens=50) and not supports(kv_heads=8) and not supports(width=128) and not supports(page=64)


def test_programs_of_a_sequence_run_at_once(cuda: torch.device) -> None:
    from mstar_vjepa2.kernels.dense import parts_of, splits_of

    assert [splits_of(rows, 258, 16) for rows in (1, 2, 3, 4, 5)] == [4, 2, 1, 1, 1]
    assert [parts_of(tokens) for tokens in (2, 128, 130, 144, 145, 258, 272, 273, 514)] == [
        (1, 0),
        (1, 0),
        (1, 2),
        (1, 16),
        (2, 0),
        (2, 2),
        (2, 16),
        (3, 0),
        (4, 2),
    ]
