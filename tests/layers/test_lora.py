"""LoRA adapters of layers against weights that they are merged into."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mstar_core.engine.steps.adapters import adapter_blocks
from mstar_core.errors import WeightsError
from mstar_core.layers.lora import AdapterBank, AdapterBlocks, AdapterLimits
from mstar_core.layers.transformer import GatedMLP, adapt_layers
from mstar_core.parallel.shards import Shard, module_slices
from mstar_core.weights.adapter import Adapter
from tests.engine.tiny_engine import fill_part
from tests.fakes.adapters import merge, write_adapter

ROWS = [1, -1, 0, 1, 1, -1, 0]


class Stack(nn.Module):
    """One gated MLP, as a model nests it."""

    def __init__(self, shard: Shard | None = None, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mlp = GatedMLP(24, 40, bias=bias) if shard is None else GatedMLP(24, 40, shard=shard)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x)
        return out


def blocks(rows: list[int]) -> AdapterBlocks:
    order, spans = adapter_blocks(np.array(rows))
    return AdapterBlocks(torch.from_numpy(order), torch.from_numpy(spans))


def banked(module: nn.Module, folders: list[Path], rank: int = 16) -> AdapterBank:
    bank = adapt_layers(module, AdapterLimits.of(len(folders), rank))
    for row, folder in enumerate(folders):
        bank.load(row, Adapter.read(folder))
    return bank


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("changes", "scale"), [({}, 4.0), ({"use_rslora": True}, 8.0)], ids=["alpha / r", "rslora"])
def test_each_token_has_the_outputs_of_its_merged_adapter(
    tmp_path: Path, changes: dict[str, bool], scale: float, bias: bool
) -> None:
    folders = [write_adapter(tmp_path / str(n), Stack(), n, config=changes) for n in range(2)]
    module, x = Stack(bias=bias), torch.randn(len(ROWS), 24)
    bank = banked(module, folders)
    with bank.applied(blocks(ROWS)):
        together = module(x)
    plain = module(x)
    for row in (-1, 0, 1):
        merged = Stack(bias=bias)
        if row >= 0:
            merge(merged, folders[row], scale)
        chosen = torch.tensor([each == row for each in ROWS])
        torch.testing.assert_close(together[chosen], merged(x)[chosen], atol=1e-4, rtol=1e-4)
    assert torch.equal(together[[1, 5]], plain[[1, 5]]), "tokens without an adapter keep their bits"
    assert not torch.allclose(together[[0, 2]], plain[[0, 2]], atol=0.1)


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_a_group_sum_to_the_whole(tmp_path: Path, size: int) -> None:
    whole, x = Stack(), torch.randn(len(ROWS), 24)
    folders = [write_adapter(tmp_path / str(n), Stack(), n) for n in range(2)]
    with banked(whole, folders).applied(blocks(ROWS)):
        expected = whole(x)
    total = torch.zeros_like(x)
    for index in range(size):
        part = Stack(Shard(index=index, size=size, collectives=Alone()))
        assert module_slices(part)
        fill_part(part, whole)
        with banked(part, folders).applied(blocks(ROWS)):
            total += part(x)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


class Alone:
    """Collectives that leave the sum to the test."""

    def all_reduce(self, value: Tensor) -> Tensor:
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        return value


def test_a_row_can_be_replaced_and_cleared(tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", Stack(), 1, rank=9)
    narrow = write_adapter(tmp_path / "narrow", Stack(), 2, rank=2, targets=["up_proj"])
    module, x = Stack(), torch.randn(3, 24)
    bank = banked(module, [wide])
    bank.load(0, Adapter.read(narrow))
    with bank.applied(blocks([0, 0, 0])):
        merged = Stack()
        merge(merged, narrow, 8.0)
        torch.testing.assert_close(module(x), merged(x), atol=1e-4, rtol=1e-4)
        bank.clear(0)
        assert torch.equal(module(x), Stack()(x))


@pytest.mark.parametrize(
    ("width", "rank", "title", "detail"),
    [
        (25, 4, "the adapter bad does not fit this model", "its mlp.down_proj is 25 x 40, the model's is 24 x 40"),
        (24, 17, "the adapter bad has rank 17", "this deployment has room for rank 16"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(tmp_path: Path, width: int, rank: int, title: str, detail: str) -> None:
    other = nn.ModuleDict({"mlp": GatedMLP(width, 40)})
    folder = write_adapter(tmp_path / "bad", other, 1, rank=rank, targets=["down_proj"])
    with pytest.raises(WeightsError, match=title) as raised:
        banked(Stack(), [folder])
    assert detail in raised.value.detail


def test_an_adapter_of_another_model_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "other", nn.ModuleDict({"mlps": GatedMLP(24, 40)}), 1)
    with pytest.raises(WeightsError, match="does not fit this model") as raised:
        banked(Stack(), [folder])
    assert "mlps." in raised.value.detail and "mlp." in raised.value.hint


def test_blocks_are_sorted_spans_of_at_most_sixteen_tokens() -> None:
    rows = [2] * 20 + [-1] * 3 + [0] + [2] * 13
    order, spans = adapter_blocks(np.array(rows))
    assert order.tolist() == [23, *range(20), *range(24, 37)]
    assert spans.tolist() == [[0, 0, 1], [2, 1, 17], [2, 17, 33], [2, 33, 34]]
    found = {row: tokens.tolist() for row, tokens in blocks(rows).segments()}
    assert found == {0: [23], 2: [*range(20), *range(24, 37)]}


def test_tokens_without_an_adapter_have_no_blocks() -> None:
    order, spans = adapter_blocks(np.array([-1, -1]))
    assert order.shape == (0,) and spans.shape == (0, 3)
