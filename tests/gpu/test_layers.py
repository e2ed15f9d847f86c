"""Linear layers of few rows, and the elementwise kernels, against float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import gelu, silu

from mstar_core.layers import Head, float8, linear
from mstar_core.layers.linear import LinearWeight, fuse_projections, gated, library_gemm, project, weight_of

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 5, 8, 13, 16, 33, 64)
SHAPES = ((5120, 3072), (3072, 8192), (200, 256), (3001, 384))
"""Outputs and inputs: two of Orpheus', one of less than four blocks, one whose last block is not full."""


def drawn(device: torch.device, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(size, device=device).to(dtype)


def random_weight(device: torch.device, outputs: int, inputs: int, kind: str) -> LinearWeight:
    values = torch.randn(outputs, inputs, device=device) * 0.05
    if kind == "fp8":
        return LinearWeight((values * 100).to(torch.float8_e4m3fn), torch.rand(outputs, device=device) / 50 + 0.001)
    return LinearWeight(values.to(torch.float16 if kind == "float16" else torch.bfloat16))


def exact(x: Tensor, weights: LinearWeight) -> Tensor:
    return x.double() @ weights.dequantized(torch.float64).T


def error(found: Tensor, expected: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double() - expected).norm() / expected.norm())


def poison(device: torch.device) -> None:
    """Fill the memory of the next outputs with NaN."""
    blocks = [torch.full((1 << size,), float("nan"), device=device) for size in range(8, 22)]
    del blocks


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "fp8"])
@pytest.mark.parametrize("rows", ROWS)
def test_products_equal_float64(cuda: torch.device, rows: int, kind: str) -> None:
    for outputs, inputs in SHAPES:
        weights = random_weight(cuda, outputs, inputs, kind)
        x = drawn(cuda, rows, inputs, dtype=torch.float16 if kind == "float16" else torch.bfloat16)
        assert linear.uses_small_m(x, weights)
        expected = exact(x, weights)
        poison(cuda)
        whole = linear.project(x, weights)
        sliced = linear.project_partial(x, weights)
        assert whole.shape == (rows, outputs) and whole.dtype == x.dtype
        assert error(whole, expected) < 4e-3
        assert error(linear.sum_partials(sliced, x), expected) < 4e-3
        if sliced.dim() == 3:
            assert error(sliced.sum(0), expected) < 1e-5


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up_in_one_kernel_equal_float64(cuda: torch.device, rows: int, kind: str) -> None:
    for inner, inputs in ((8192, 3072), (100, 256), (1501, 384)):
        weights, x = random_weight(cuda, 2 * inner, inputs, kind), drawn(cuda, rows, inputs)
        poison(cuda)
        gate, up = exact(x, weights).chunk(2, dim=1)
        assert error(linear.project_gated(x, weights), silu(gate) * up) < 8e-3
        poison(cuda)
        assert error(linear.project_gated(x, weights, "gelu_tanh"), gelu(gate, approximate="tanh") * up) < 8e-3


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_gates_of_many_rows_equal_float64(cuda: torch.device, kind: str) -> None:
    weights = random_weight(cuda, 2 * 1501, 384, kind)
    x = drawn(cuda, 200, 384, dtype=weights.values.dtype)
    assert not linear.uses_small_m(x, weights)
    gate, up = exact(x, weights).chunk(2, dim=1)
    poison(cuda)
    assert error(linear.project_gated(x, weights), silu(gate) * up) < 8e-3
    assert error(linear.project_gated(x, weights, "gelu_tanh"), gelu(gate, approximate="tanh") * up) < 8e-3


def test_the_bits_of_a_row_do_not_depend_on_its_batch(cuda: torch.device) -> None:
    for kind in ("bfloat16", "fp8"):
        weights, x = random_weight(cuda, 3072, 3072, kind), drawn(cuda, 64, 3072)
        alone = linear.project_partial(x[:1].contiguous(), weights)
        for rows in ROWS[1:]:
            together = linear.project_partial(x[:rows].contiguous(), weights)
            assert torch.equal(together[:, :1], alone), rows


def test_replays_give_the_same_bits(cuda: torch.device) -> None:
    weights = [random_weight(cuda, 3072, 3072, kind) for kind in ("bfloat16", "fp8")]
    for rows in (1, 8, 33):
        x = drawn(cuda, rows, 3072)
        linear.project_partial(x, weights[0])
        eager = [linear.project_partial(x, each) for each in weights]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [linear.project_partial(x, each) for each in weights]
        for _ in range(20):
            for each in captured:
                each.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(one, two) for one, two in zip(eager, captured, strict=True))


@pytest.mark.parametrize("rows", [1, 64, 72, 128])
def test_a_padded_head_equals_float64(cuda: torch.device, rows: int) -> None:
    head = Head(128, 1001).to(cuda, torch.bfloat16)
    hidden = torch.randn(rows, 128, device=cuda, dtype=torch.bfloat16)
    wanted = hidden.double() @ head.weight.double().T
    assert fuse_projections(head) == 1
    assert (head(hidden).double() - wanted).norm() < 0.01 * wanted.norm()


def test_unsupported_products_use_the_library(cuda: torch.device) -> None:
    narrow, weights = random_weight(cuda, 96, 100, "bfloat16"), random_weight(cuda, 96, 256, "bfloat16")
    assert not linear.uses_small_m(drawn(cuda, 2, 100), narrow)
    assert not linear.uses_small_m(drawn(cuda, linear.SMALL_M + 1, 256), weights)
    assert not linear.uses_small_m(drawn(cuda, 2, 256, dtype=torch.float16), weights)
    x = drawn(cuda, 2, 100)
    assert error(linear.project(x, narrow), exact(x, narrow)) < 4e-3


def test_many_rows_of_float8_weights_equal_float64(cuda: torch.device) -> None:
    for rows in (linear.SMALL_M + 1, 300):
        weights, x = random_weight(cuda, 3001, 384, "fp8"), drawn(cuda, rows, 384)
        poison(cuda)
        assert not linear.uses_small_m(x, weights)
        # One more rounding than above, of the dequantized weights.
        assert error(linear.project(x, weights), exact(x, weights)) < 6e-3


def test_a_quantized_model_on_a_gpu_computes_as_on_a_cpu(cuda: torch.device) -> None:
    from mstar_core.layers import GatedMLP
    from mstar_core.layers.quantize import quantize

    one = GatedMLP(256, 384).bfloat16().requires_grad_(False)
    two = GatedMLP(256, 384).bfloat16().requires_grad_(False)
    two.load_state_dict(one.state_dict())
    two.to(cuda)
    assert fuse_projections(two) == 1
    quantize(one, "fp8")
    quantize(two, "fp8")
    for rows in (1, 9, 100):
        x = torch.randn(rows, 256).bfloat16()
        assert error(two(x.to(cuda)).cpu(), one(x.clone()).double()) < 1e-2


@pytest.mark.parametrize("rows", [1, 70, 4098])
def test_rows_are_rounded_as_on_a_cpu(cuda: torch.device, rows: int) -> None:
    for width in (384, 3000, 18944):
        x = drawn(cuda, rows, width) * torch.logspace(-3, 3, rows, device=cuda, dtype=torch.bfloat16)[:, None]
        x[0] = 0
        poison(cuda)
        values, scale = float8.round_rows(x)
        expected, scales = float8.round_rows(x.cpu())
        torch.testing.assert_close(scale.cpu(), scales, atol=0, rtol=1e-6)
        # The division may round otherwise on a tie.
        same = (values.cpu().float() == expected.float()).double().mean()
        assert float(same) > 0.999


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("width", [384, 3000, 16384, 18944])
def test_gated_values_rounded_in_one_kernel_have_the_bits_of_two(cuda: torch.device, width: int, is_gelu: bool) -> None:
    from mstar_core.layers.kernels import elementwise

    pair = drawn(cuda, 70, 2 * width)
    pair[0] = 0
    poison(cuda)
    values, scales = elementwise.gated_rounded(pair, is_gelu=is_gelu)
    expected = elementwise.round_rows(elementwise.gated_activation(pair, is_gelu=is_gelu))
    assert torch.equal(scales, expected[1])
    assert torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8))


def test_a_float8_mlp_of_many_tokens_rounds_its_inner_values(cuda: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda) < float8.CAPABILITY:
        pytest.skip("runs on GPUs of compute capability 9.0 or newer, whose GEMM has scales of rows")
    from mstar_core.layers import GatedMLP
    from mstar_core.layers.quantize import quantize

    mlp = GatedMLP(256, 384, activation="gelu_tanh").bfloat16().requires_grad_(False).to(cuda)
    fuse_projections(mlp)
    quantize(mlp, "fp8", rounds_inputs=True)
    fused, down = mlp.fused_weight, weight_of(mlp.down_proj)
    assert fused is not None and down is not None
    x = drawn(cuda, 70, 256)
    inner = gated(library_gemm(x, fused), "gelu_tanh")
    assert torch.equal(mlp(x), project(inner, down))


@pytest.mark.parametrize("rows", [65, 257, 4098])
def test_products_of_rounded_inputs_equal_float64(cuda: torch.device, rows: int) -> None:
    if torch.cuda.get_device_capability(cuda) < float8.CAPABILITY:
        pytest.skip("runs on GPUs of compute capability 9.0 or newer, whose GEMM has scales of rows")
    for outputs, inputs in ((4608, 3584), (3584, 18944), (4096, 2048)):
        weights = replace(random_weight(cuda, outputs, inputs, "fp8"), rounds_inputs=True)
        x, bias = drawn(cuda, rows, inputs), drawn(cuda, outputs)
        values, scale = float8.round_rows(x)
        expected = exact(values.double() * scale.double()[:, None], weights)
        poison(cuda)
        assert error(linear.project(x, weights), expected) < 6e-3
        assert error(library_gemm(x, weights, bias), expected + bias.double()) < 6e-3
        torch.cuda.synchronize()
        graph, eager = torch.cuda.CUDAGraph(), linear.project(x, weights)
        with torch.cuda.graph(graph):
            captured = linear.project(x, weights)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)


def test_a_module_quantized_layer_by_layer_on_its_way_to_a_gpu_equals_one_quantized_there(cuda: torch.device) -> None:
    from mstar_core.layers import GatedMLP, MoESpec, SparseMoE
    from mstar_core.layers.quantize import quantize, quantize_onto

    spec = MoESpec(width=256, inner=64, experts=8, experts_per_token=2, shared_inner=128)
    first = torch.nn.ModuleList([GatedMLP(256, 384), SparseMoE(spec)]).bfloat16().requires_grad_(False)
    second = copy.deepcopy(first).to(cuda)
    linear.fuse_projections(second)
    reports = quantize_onto(cuda, first, "fp8", rounds_inputs=True), quantize(second, "fp8", rounds_inputs=True)
    assert reports[0].kinds.keys() == reports[1].kinds.keys()
    for rows in (1, 65):
        x = drawn(cuda, rows, 256)
        assert all(torch.equal(one(x), two(x)) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("rows", [1, 5, 16, 200])
@pytest.mark.parametrize("parts", [1, 4])
def test_norm_of_partial_sums_equals_float64(cuda: torch.device, rows: int, parts: int) -> None:
    from mstar_core.layers.kernels import elementwise

    for width in (512, 3072, 3000):
        x, gain = drawn(cuda, rows, width), drawn(cuda, width)
        branch = drawn(cuda, parts, rows, width, dtype=torch.float32) if parts > 1 else drawn(cuda, rows, width)
        poison(cuda)
        total, normed = elementwise.add_rms_norm(x, branch, gain, 1e-5)
        added = x.double() + (branch.double().sum(0) if parts > 1 else branch.double())
        assert error(total, added) < 4e-3
        scaled = added * torch.rsqrt(added.square().mean(-1, keepdim=True) + 1e-5)
        assert error(normed, scaled * gain.double()) < 6e-3
        poison(cuda)
        total, normed = elementwise.add_rms_norm(x, branch, gain, 1e-5, is_offset=True)
        assert error(total, added) < 4e-3 and error(normed, scaled * (1.0 + gain.double())) < 6e-3
        alone = elementwise.rms_norm(total, gain.float(), 1e-5, is_offset=True)
        assert error(alone, normed.double()) < 6e-3


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rotation_of_partial_sums_equals_float64(cuda: torch.device, rows: int, parts: int) -> None:
    from mstar_core.layers import Rotary, RotarySpec, rotate
    from mstar_core.layers.kernels import elementwise

    heads, kv_heads, width = 6, 2, 128
    across = (heads + 2 * kv_heads) * width
    packed = drawn(cuda, parts, rows, across, dtype=torch.float32) if parts > 1 else drawn(cuda, rows, across)
    cosine, sine = Rotary(RotarySpec(width=width)).to(cuda)(torch.arange(rows, device=cuda) * 7)
    poison(cuda)
    found = elementwise.rotate_qkv(packed, heads, kv_heads, cosine, sine, torch.bfloat16)
    whole = packed.double().sum(0) if parts > 1 else packed.double()
    query, key, value = whole.view(rows, -1, width).split([heads, kv_heads, kv_heads], dim=1)
    turned = [rotate(each, cosine.double(), sine.double()) for each in (query, key)]
    for got, expected in zip(found, [*turned, value], strict=True):
        assert error(got, expected) < 6e-3
