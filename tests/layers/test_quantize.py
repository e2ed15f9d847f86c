"""Float8 weights: errors, sizes, and refused models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mstar_core.errors import StartError
from mstar_core.layers import (
    Attention,
    AttentionSpec,
    GatedMLP,
    Head,
    MoESpec,
    QuantizableLayer,
    SparseMoE,
    TokenEmbedding,
)
from mstar_core.layers.float8 import round_rows
from mstar_core.layers.linear import (
    LinearWeight,
    QuantizedLinear,
    concatenate_weights,
    concatenate_with_biases,
    library_gemm,
    project,
    project_partial,
    sum_partials,
    weight_of,
)
from mstar_core.layers.quantize import quantize, quantize_onto, to_float8

SPEC = AttentionSpec(width=32, heads=4, kv_heads=2, head_dim=8)
NAMES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


class Model(nn.Module):
    def __init__(self, *, ties: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed = TokenEmbedding(11, 32)
        self.attention = Attention(AttentionSpec(width=32, heads=4, kv_heads=2, head_dim=8, bias=bias), 0)
        self.mlp = GatedMLP(32, 48)
        self.other = nn.Linear(32, 32)
        self.head = Head(32, 11, tied_to=self.embed if ties else None)
        self.requires_grad_(False)


class EveryToken:
    """A cache in which each token attends only to itself."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def quantized(owner: nn.Module, name: str) -> QuantizedLinear:
    layer = owner.get_submodule(name)
    assert isinstance(layer, QuantizedLinear)
    return layer


def still(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.ones(tokens, 1, 8), torch.zeros(tokens, 1, 8)


def test_each_output_uses_the_whole_range() -> None:
    weight = torch.randn(5, 64) * torch.tensor([1e-6, 0.01, 1.0, 50.0, 1e6])[:, None]
    actual = to_float8(weight)
    assert (
        actual.values.dtype == torch.float8_e4m3fn and actual.scale is not None and actual.scale.dtype == torch.float32
    )
    assert actual.values.float().abs().amax(dim=1).tolist() == [448.0] * 5
    # Three mantissa bits: half a step of 1/8, relative to the power of two below.
    off = (actual.dequantized(torch.float32) - weight).abs()
    assert (off <= weight.abs() / 16 + actual.scale[:, None] * 2**-10 * 1.01).all()


def test_an_output_of_zeros_stays_zero() -> None:
    weight = torch.randn(3, 16)
    weight[1] = 0
    assert to_float8(weight).dequantized(torch.float32)[1].tolist() == [0.0] * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_compute_with_the_dequantized_weights(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    quantize(model, "fp8")
    x = torch.randn(3, 32).to(dtype)
    gate, up, down, value, out = (
        (layer.weight.float() * layer.scale[:, None]).to(dtype)
        for layer in (
            *(quantized(model.mlp, name) for name in ("gate_proj", "up_proj", "down_proj")),
            *(quantized(model.attention, name) for name in ("v_proj", "o_proj")),
        )
    )
    assert torch.equal(model.mlp(x), (silu(x @ gate.T) * (x @ up.T)) @ down.T)
    mixed = (x @ value.T).view(3, 2, 8).repeat_interleave(2, dim=1).reshape(3, 32)
    assert torch.equal(model.attention(x, EveryToken(), still(3)), mixed @ out.T)


def test_the_report_gives_errors_and_sizes_by_kind() -> None:
    model = Model().to(torch.bfloat16)
    before = {name: layer.weight.clone() for name, layer in model.mlp.named_children() if isinstance(layer, nn.Linear)}
    report = quantize(model, "fp8")
    assert set(report.kinds) == NAMES and report.method == "fp8"
    up = report.kinds["up_proj"]
    assert (up.layers, up.before_bytes, up.after_bytes) == (1, 48 * 32 * 2, 48 * 32 + 48 * 4)
    now = quantized(model.mlp, "up_proj")
    expected = (now.weight.float() * now.scale[:, None] - before["up_proj"].float()).norm() / before["up_proj"].norm()
    assert 0.005 < float(expected) < 0.04
    assert 0.005 < up.output_error_mean <= up.output_error_worst < 0.06
    assert report.after_bytes < 0.6 * report.before_bytes


def test_only_projections_change() -> None:
    model = Model()
    quantize(model, "fp8")
    assert isinstance(model.other, nn.Linear) and isinstance(model.embed.weight, nn.Parameter)
    assert model.head.weight.dtype == torch.float32
    assert not [name for name, _ in model.named_parameters() if "proj" in name]


def test_named_submodules_keep_their_weights() -> None:
    """Moved layer by layer or in place, with the same result."""
    models = [nn.ModuleDict({"first": Model(), "second": Model()}) for _ in range(2)]
    cpu = torch.device("cpu")
    reports = quantize(models[0], "fp8", kept=("second",)), quantize_onto(cpu, models[1], "fp8", kept=("second",))
    for model, report in zip(models, reports, strict=True):
        first, second = model["first"], model["second"]
        assert isinstance(first, Model) and isinstance(second, Model)
        assert {kind.layers for kind in report.kinds.values()} == {1}
        assert isinstance(first.mlp.up_proj, QuantizedLinear) and isinstance(second.mlp.up_proj, nn.Linear)
        assert isinstance(second.attention.q_proj, nn.Linear)


class Named(QuantizableLayer):
    """A layer of a plugin, with a linear layer of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(32, 32)
        self.net = nn.ModuleList([nn.Linear(32, 16), nn.LayerNorm(16)])
        self.requires_grad_(False)


def test_layers_that_a_plugin_names_are_quantized_with_their_children() -> None:
    other, named, x = Model(), Named(), torch.randn(3, 32)
    before = [layer(x) for layer in (named.to_q, named.net[0])]
    report = quantize(nn.ModuleList([other, named]), "fp8", (QuantizableLayer,))
    assert set(report.kinds) == {"to_q", "net.0"}
    assert isinstance(other.mlp.up_proj, nn.Linear), "layers of other kinds stay"
    for layer, expected in zip((named.to_q, named.net[0]), before, strict=True):
        assert isinstance(layer, QuantizedLinear)
        assert 0 < float((layer(x) - expected).norm() / expected.norm()) < 0.05


def test_a_fused_layer_stays_fused() -> None:
    model = Model()
    assert model.attention.fuse_projections() and model.mlp.fuse_projections()
    quantize(model, "fp8")
    fused = model.mlp.fused_weight
    assert fused is not None and fused.scale is not None and fused.values.shape == (96, 32)
    up = quantized(model.mlp, "up_proj")
    assert up.weight.data_ptr() == fused.values[48:].data_ptr() and torch.equal(up.scale, fused.scale[48:])
    assert torch.equal(up.weight.float(), fused.values[48:].float())


def test_inputs_are_rounded_token_by_token_where_a_node_allows_it() -> None:
    torch.manual_seed(0)
    models = [Model(bias=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    reports = [
        quantize(model, "fp8", rounds_inputs=rounds) for model, rounds in zip(models, (False, True), strict=True)
    ]
    layer = quantized(models[1].attention, "q_proj")
    x = torch.randn(5, 32) * torch.tensor([1e-3, 1.0, 30.0, 1e3, 0.0])[:, None]
    rounded, scale = round_rows(x)
    assert rounded.dtype == torch.float8_e4m3fn and rounded.float().abs().amax(1).tolist() == [448.0] * 4 + [0.0]
    wide = layer.weight.float() * layer.scale[:, None]
    assert layer.bias is not None
    assert torch.equal(layer(x), (rounded.float() * scale[:, None]) @ wide.T + layer.bias)
    assert not torch.equal(layer(x), quantized(models[0].attention, "q_proj")(x))
    for row in range(len(x)):
        torch.testing.assert_close(layer(x[row : row + 1])[0], layer(x)[row])
    plain, both = (report.kinds["q_proj"].output_error_mean for report in reports)
    assert plain < both < 0.06


@pytest.mark.parametrize("rounds", [False, True])
def test_experts_are_quantized_one_by_one(rounds: bool) -> None:
    torch.manual_seed(0)
    spec = MoESpec(width=32, inner=16, experts=5, experts_per_token=2, shared_inner=32)
    moe, x = SparseMoE(spec).requires_grad_(False).bfloat16(), torch.randn(9, 32).bfloat16()
    exact, router = moe(x).float(), moe.gate.weight.clone()
    before = moe.experts.gate_up_proj.detach().clone()
    report = quantize(moe, "fp8", rounds_inputs=rounds)
    experts = moe.experts
    assert set(report.kinds) == {"gate_up_proj", "down_proj", "gate_proj", "up_proj"}
    assert report.kinds["gate_up_proj"].after_bytes == 5 * (32 * 32 + 32 * 4)
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == torch.float8_e4m3fn
    for expert in range(5):
        alone = to_float8(before[expert])
        assert torch.equal(experts.gate_up(expert).dequantized(torch.float32), alone.dequantized(torch.float32))
    assert torch.equal(moe.gate.weight, router) and moe.gate.weight.dtype == torch.bfloat16, "the router stays"
    assert moe.shared_expert_gate.weight.dtype == torch.bfloat16
    assert 0 < float((moe(x).float() - exact).norm() / exact.norm()) < 0.1
    for row in range(len(x)):
        torch.testing.assert_close(moe(x[row : row + 1])[0], moe(x)[row], atol=2e-2, rtol=2e-2)


def test_joined_projections_with_biases_are_quantized_and_joined_again() -> None:
    layers = [nn.Linear(32, 8, bias=True).requires_grad_(False) for _ in range(3)]
    x, plain = torch.randn(4, 32), torch.cat([layer(torch.zeros(1, 32)) for layer in layers], dim=1)
    weight, bias = concatenate_with_biases(layers)
    assert weight.scale is None and torch.equal(bias[None], plain)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], dim=1), library_gemm(x, weight, bias))
    owner = Named()
    owner.net = nn.ModuleList(layers)
    quantize(owner, "fp8", rounds_inputs=True)
    halved = [module for module in owner.net if isinstance(module, QuantizedLinear)]
    weight, bias = concatenate_with_biases(halved)
    assert weight.scale is not None and weight.rounds_inputs and torch.equal(bias[None], plain)
    assert halved[1].weight.data_ptr() == weight.values[8:].data_ptr()
    torch.testing.assert_close(torch.cat([layer(x) for layer in halved], dim=1), library_gemm(x, weight, bias))


def test_layers_moved_one_by_one_equal_a_module_quantized_in_place() -> None:
    torch.manual_seed(0)
    spec = MoESpec(width=32, inner=16, experts=5, experts_per_token=2, shared_inner=32)
    first = nn.ModuleList([Model(bias=True), SparseMoE(spec)]).requires_grad_(False)
    second = copy.deepcopy(first)
    reports = quantize(first, "fp8"), quantize_onto(torch.device("cpu"), second, "fp8")
    assert reports[0] == reports[1]
    one, two = first.state_dict(), second.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(value.float(), two[name].float()) for name, value in one.items())


def test_a_second_fusion_keeps_the_address_that_captured_graphs_read() -> None:
    model = Model()
    actual = []
    for _ in range(2):
        assert model.attention.fuse_projections() and model.mlp.fuse_projections()
        assert model.attention.fused_weight is not None and model.mlp.fused_weight is not None
        actual.append((model.attention.fused_weight.values.data_ptr(), model.mlp.fused_weight.values.data_ptr()))
    assert actual[0] == actual[1]


def test_a_bias_is_kept_and_added() -> None:
    model = Model(bias=True)
    bias = model.attention.q_proj.bias.clone()
    quantize(model, "fp8")
    now = quantized(model.attention, "q_proj")
    assert now.bias is not None and weight_of(now) is None
    assert torch.equal(now(torch.zeros(2, 32)), bias.expand(2, 32))
    assert concatenate_weights([model.attention.q_proj, model.attention.k_proj]) is None


def test_unknown_methods_and_dtypes_are_refused_before_anything_changes() -> None:
    model = Model().to(torch.float64)
    with pytest.raises(StartError, match="fp9") as unknown:
        quantize(model, "fp9")
    with pytest.raises(StartError, match="float64") as wrong:
        quantize(model, "fp8")
    assert unknown.value.facts["phase"] == wrong.value.facts["phase"] == "weights"
    assert all(not isinstance(module, QuantizedLinear) for module in model.modules())


def test_weights_that_are_not_loaded_are_refused() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(StartError, match="meta"):
        quantize(model, "fp8")


def test_partial_sums_are_reduced_and_full_results_unchanged() -> None:
    x, weights = torch.randn(3, 16), LinearWeight(torch.randn(5, 16))
    assert torch.equal(sum_partials(project_partial(x, weights), x), project(x, weights))
    assert torch.equal(sum_partials(torch.ones(4, 3, 5), x.bfloat16()), torch.full((3, 5), 4.0, dtype=torch.bfloat16))
