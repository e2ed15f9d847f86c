"""Linear layers on the CPU: pending branches, and the selection of kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch.nn.functional import gelu

from mstar_vjepa2.nodes import linear as linear_module
from mstar_vjepa2.nodes.blocks import sum_norm
from mstar_vjepa2.nodes.linear import Branch, branch_of, is_small, linear, linear_into


def test_a_branch_is_added_whole_or_in_slices() -> None:
    layer, x, y = torch.nn.Linear(12, 5), torch.randn(2, 3, 5), torch.randn(2, 3, 12)
    slices = torch.stack([y[..., half] @ layer.weight[:, half].T for half in (slice(0, 6), slice(6, 12))])
    expected = x + layer(y)
    assert torch.allclose(branch_of(y, layer).added(x), expected, atol=1e-6)
    assert torch.allclose(Branch(slices, layer.bias).added(x), expected, atol=1e-6)


def test_a_norm_takes_the_sum_in_front_of_it() -> None:
    norm, x, values = torch.nn.LayerNorm(6), torch.randn(4, 6), torch.randn(4, 6)
    summed, normed = sum_norm(x, Branch(values), norm)
    assert torch.equal(summed, x + values) and torch.equal(normed, norm(summed))
    same, normed = sum_norm(x, None, norm)
    assert same is x and torch.equal(normed, norm(x))


def test_the_cpu_multiplies_by_the_layers_themselves() -> None:
    layer, x, out = torch.nn.Linear(8, 4), torch.randn(2, 8), torch.zeros(3, 4)
    assert not is_small(x, layer)
    assert torch.equal(linear(x, layer, gelu), gelu(layer(x)))
    with torch.inference_mode():
        linear_into(out[1:], x, layer)
        assert torch.equal(out[1:], layer(x)) and not out[0].any()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Run with an empty cache of imported kernels."""
    linear_module._multicast_kernels.cache_clear()
    yield monkeypatch
    linear_module._multicast_kernels.cache_clear()


def test_products_go_without_multicast_where_its_kernels_cannot_be_imported(fresh: pytest.MonkeyPatch) -> None:
    fresh.setitem(sys.modules, "mstar_vjepa2.kernels.multicast_gemm", None)
    assert linear_module._multicast_kernels() is None


def test_the_environment_turns_multicast_off(fresh: pytest.MonkeyPatch) -> None:
    fresh.setitem(sys.modules, "mstar_vjepa2.kernels.multicast_gemm", ModuleType("mstar_vjepa2.kernels.multicast_gemm"))
    assert linear_module._multicast_kernels() is not None
    linear_module._multicast_kernels.cache_clear()
    fresh.setenv("MSTAR_MULTICAST", "0")
    assert linear_module._multicast_kernels() is None
