"""GQA-packed prefix attention on Hopper against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.static import LOG2E, AttentionBuffers
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu

ENDS = [828, 0, 64, 968, 1, 63, 65, 1024]


class Case:
    """Rows with prefixes of different lengths in random pages; unused memory contains NaN.

    spare: unused rows. heads: query and KV heads.
    """

    def __init__(
        self,
        cuda: torch.device,
        ends: list[int],
        tokens: int = 50,
        *,
        page: int = 64,
        spare: int = 0,
        heads: tuple[int, int] = (8, 1),
        width: int = 256,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        from mstar_core.engine.attention.kernels.prefix import PagedPrefixAttention

        rows, most = len(ends), 1024 // page
        self.ends, self.tokens, self.page = [*ends, *[0] * spare], tokens, page
        self.tables = np.random.default_rng(tokens).permutation(rows * most).reshape(rows, most).astype(np.int32)
        generator = torch.Generator(cuda).manual_seed(tokens + page + rows)
        self.pool = torch.full((rows * most + 1, 2, page, heads[1], width), float("nan"), device=cuda, dtype=dtype)
        for row, end in enumerate(ends):
            for place in range(0, end, page):
                room = (2, min(page, end - place), heads[1], width)
                written = torch.randn(room, device=cuda, generator=generator).to(dtype)
                self.pool[self.tables[row, place // page], :, : room[1]] = written
        self.shape = AttentionShape(sequences=rows + spare, tokens=tokens, pages=most, writes=False)
        self.attention = AttentionBuffers(PagedPrefixAttention([self.pool], page, self.shape), cuda)
        cached = np.array(ends, dtype=np.int64)
        passes = AttentionMetadata.of(np.arange(rows), cached, self.tables, tokens, causal=False, writes=False)
        self.attention.prepare(passes)
        # Views of a wider tensor, as after a fused projection.
        count, together = (rows + spare) * tokens, heads[0] + 2 * heads[1]
        packed = torch.randn(count, together, width, device=cuda, generator=generator).to(dtype)
        self.given = packed.split([heads[0], heads[1], heads[1]], dim=1)

    def found(self, splits: int | None = None) -> Tensor:
        """Return the kernel\'s output: [rows, tokens, heads, width]."""
        from mstar_core.engine.attention.kernels import gqa_packed

        assert gqa_packed.supports(self.given[0], self.pool)
        made = gqa_packed.attend(
            self.given,
            self.pool,
            gqa_packed.descriptor_of(self.pool),
            self.attention.device,
            self.given[0].shape[2] ** -0.5 * LOG2E,
            self.shape,
            splits,
        )
        return made.view(self.shape.sequences, self.tokens, *made.shape[1:])

    def wanted(self, row: int) -> Tensor:
        """Return the reference of one row, in float64: [tokens, heads, width]."""
        query, key, value = (each.reshape(-1, self.tokens, *each.shape[1:])[row].double() for each in self.given)
        if self.ends[row]:
            pages = torch.from_numpy(self.tables[row].astype(np.int64)).to(self.pool.device)
            both = self.pool[pages].transpose(0, 1).flatten(1, 2)[:, : self.ends[row]].double()
            key, value = torch.cat([both[0], key]), torch.cat([both[1], value])
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        score = torch.einsum("qhw,khw->hqk", query, key) * query.shape[2] ** -0.5
        return torch.einsum("hqk,khw->qhw", score.softmax(-1), value)

    def check(self, splits: int | None = None, rows: list[int] | None = None) -> None:
        """Compare every token and head of these rows, or of all rows."""
        found = self.found(splits)
        for row in range(len(self.ends)) if rows is None else rows:
            wanted = self.wanted(row)
            away = (found[row].double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert away.max() < 2e-2, (row, int(away.amax(-1).argmax()), float(away.max()))
            assert away.mean() < 6e-3, (row, float(away.mean()))


@pytest.mark.parametrize("tokens", [50, 15, 10, 70, 1, 64, 129])
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8])
def test_rows_of_different_lengths(rows: int, tokens: int, cuda: torch.device) -> None:
    Case(cuda, ENDS[-rows:], tokens).check()


@pytest.mark.parametrize("end", [0, 1, 63, 64, 65, 127, 128, 828, 968, 1024])
def test_prefixes_of_any_length(end: int, cuda: torch.device) -> None:
    Case(cuda, [end, end], dtype=torch.float16).check()


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16])
def test_any_number_of_splits(splits: int, cuda: torch.device) -> None:
    """Includes more splits than a row has blocks of keys."""
    Case(cuda, [828, 0, 65]).check(splits)


@pytest.mark.parametrize("page", [64, 128, 256])
@pytest.mark.parametrize(("heads", "width"), [((8, 1), 256), ((8, 2), 256), ((6, 2), 128), ((4, 4), 64)])
def test_heads_and_pages_of_any_size(heads: tuple[int, int], width: int, page: int, cuda: torch.device) -> None:
    Case(cuda, [828, 100, 1], 33, page=page, heads=heads, width=width).check()


def test_unused_rows_attend_to_their_own_tokens(cuda: torch.device) -> None:
    Case(cuda, [828, 3], spare=3).check()


def test_a_row_of_nan_does_not_affect_other_rows(cuda: torch.device) -> None:
    case = Case(cuda, [828, 3, 500])
    for each in case.given:
        each[50:100] = float("nan")
    case.check(rows=[0, 2])
    assert case.found()[1].isnan().all()


def test_the_same_inputs_give_the_same_bits(cuda: torch.device) -> None:
    case = Case(cuda, ENDS)
    first = case.found()
    assert all(torch.equal(first, case.found()) for _ in range(20))


def test_the_kernel_runs_for_passes_of_several_rows_only(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a CUDA graph, as it is used. One row uses the single-block kernel, and pages of 16 the split-KV kernel."""
    from mstar_core.engine.attention.kernels import gqa_packed
    from mstar_core.engine.cuda_graphs.cache import GraphCache

    calls: list[Case] = []
    attend = gqa_packed.attend
    for case, is_used in (
        (Case(cuda, [828]), False),
        (Case(cuda, [828, 4], page=16), False),
        (Case(cuda, ENDS), True),
    ):

        def recorded(*given: object, case: Case = case) -> Tensor:
            calls.append(case)
            return attend(*given)

        monkeypatch.setattr(gqa_packed, "attend", recorded)
        with torch.inference_mode():
            graph, out = GraphCache(cuda).capture(lambda case=case: case.attention.view.attend(0, *case.given))
            graph.replay()
        assert (case in calls) == is_used
        if is_used:
            monkeypatch.undo()
            assert out is not None and torch.equal(out.view(len(ENDS), 50, 8, 256), case.found())
