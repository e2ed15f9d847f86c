"""The mixture-of-experts kernels against float64 and against the library's grouped GEMM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import silu

from mstar_core.layers import MoESpec, SparseMoE
from mstar_core.layers.quantize import quantize

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu
kernels = pytest.importorskip("mstar_core.layers.kernels.moe", reason="runs where triton is installed")

THINKER = MoESpec(width=2048, inner=768, experts=128, experts_per_token=8)
TALKER = MoESpec(width=1024, inner=384, experts=128, experts_per_token=6, shared_inner=768)
SMALL = MoESpec(width=40, inner=24, experts=4, experts_per_token=2, shared_inner=40)
"""Widths that no full step divides, and a shared expert that cannot be divided into experts of the others' width."""

TOKENS = (1, 2, 7, 16, 64, 65, 300, 2500)


def made(spec: MoESpec, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> SparseMoE:
    torch.manual_seed(5)
    with device:
        moe = SparseMoE(spec).requires_grad_(False)
        for parameter in moe.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    moe = moe.to(dtype)
    moe.fuse_projections()
    return moe


def exact(moe: SparseMoE, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the layer's output in float64 for a routing, expert by expert."""
    spec, wide, total = moe.spec, x.double(), torch.zeros_like(x, dtype=torch.float64)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        gate, up = (wide[token] @ moe.experts.gate_up_proj[expert].double().T).split(spec.inner, dim=1)
        out = (silu(gate) * up) @ moe.experts.down_proj[expert].double().T
        total.index_add_(0, token, out * weights[token, place].double()[:, None])
    if spec.shared_inner:
        gate, up = (wide @ each.weight.double().T for each in (moe.shared_expert.gate_proj, moe.shared_expert.up_proj))
        shared = (silu(gate) * up) @ moe.shared_expert.down_proj.weight.double().T
        total += (wide @ moe.shared_expert_gate.weight.double().T).sigmoid() * shared
    return total


def routed(moe: SparseMoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kernels' own routing, [T, k] each: near-ties may differ from that of other logits."""
    spec = moe.spec
    logits = torch.nn.functional.linear(x, moe.gate.weight)
    found = kernels.route(logits, spec.experts, spec.experts_per_token, x.dtype, 16, normalizes=spec.normalizes)
    shape = (spec.experts_per_token, len(x))
    return found.experts.view(shape).T.long(), found.weights.view(shape).T


def error(found: Tensor, expected: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("spec", [THINKER, TALKER, SMALL], ids=["thinker", "talker", "small"])
def test_a_mixture_equals_float64(cuda: torch.device, spec: MoESpec, tokens: int) -> None:
    moe, x = made(spec, cuda), torch.randn(tokens, spec.width, device=cuda).bfloat16()
    found = moe(x)
    weights, chosen = moe.route(x)
    rows = error(found, exact(moe, x, chosen, weights))
    # A near-tie of two experts changes a token's output; such tokens are rare.
    same = torch.isclose(found.double(), exact(moe, x, chosen, weights), atol=0.1, rtol=0.1).all(dim=1)
    assert rows < 1e-2 or float(same.double().mean()) > 0.98


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_router_agrees_with_softmax_and_top_k(cuda: torch.device, tokens: int) -> None:
    moe, x = made(THINKER, cuda), torch.randn(tokens, THINKER.width, device=cuda).bfloat16()
    chosen, weights = routed(moe, x)
    shares = torch.softmax(torch.nn.functional.linear(x, moe.gate.weight).float(), dim=-1)
    best, _ = shares.topk(THINKER.experts_per_token, dim=-1)
    torch.testing.assert_close(shares.gather(1, chosen), best, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(weights, (best / best.sum(-1, keepdim=True)).bfloat16(), atol=0.004, rtol=0.01)


@pytest.mark.parametrize("tokens", [64, 300, 2500])
def test_tokens_of_one_expert_are_all_computed(cuda: torch.device, tokens: int) -> None:
    """All tokens choose the same experts, so that some experts have many tiles and the others none."""
    moe, x = made(THINKER, cuda), torch.randn(tokens, THINKER.width, device=cuda).bfloat16()
    logits = torch.zeros(tokens, THINKER.experts, device=cuda, dtype=torch.bfloat16)
    logits[:, 40:48] = torch.arange(8, 0, -1, device=cuda).bfloat16()
    weights = moe.experts.gate_up_proj, moe.experts.down_proj
    found = kernels.expert_terms(x, logits, *weights, THINKER.experts_per_token)
    shares = torch.arange(8, 0, -1, device=cuda).float().softmax(0).bfloat16()
    chosen = torch.arange(40, 48, device=cuda).expand(tokens, 8)
    assert error(found.float().sum(0), exact(moe, x, chosen, shares.expand(tokens, 8))) < 1e-2


@pytest.mark.parametrize("tokens", [1, 16, 64, 512, 2048])
def test_a_mixture_equals_the_grouped_gemm(cuda: torch.device, tokens: int) -> None:
    moe, x = made(THINKER, cuda), torch.randn(tokens, THINKER.width, device=cuda).bfloat16()
    logits = torch.nn.functional.linear(x, moe.gate.weight)
    found = kernels.expert_terms(x, logits, moe.experts.gate_up_proj, moe.experts.down_proj, THINKER.experts_per_token)
    chosen, weights = routed(moe, x)
    order = chosen.flatten().argsort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=THINKER.experts).cumsum(0).int()
    given = x[order // THINKER.experts_per_token]
    gate, up = torch._grouped_mm(given, moe.experts.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=1)
    out = torch._grouped_mm(silu(gate) * up, moe.experts.down_proj.transpose(1, 2), offs=ends)
    total = torch.zeros(tokens, THINKER.width, device=cuda)
    total.index_add_(0, order // THINKER.experts_per_token, out.float() * weights.flatten()[order].float()[:, None])
    assert error(found.float().sum(0), total.double()) < 1e-2


@pytest.mark.parametrize("spec", [THINKER, TALKER], ids=["thinker", "talker"])
@pytest.mark.parametrize(("most", "counts"), [(64, (1, 2, 7, 33, 64)), (1000, (100, 333, 1000))])
def test_the_bits_of_a_token_do_not_depend_on_its_batch(
    cuda: torch.device, spec: MoESpec, most: int, counts: tuple[int, ...]
) -> None:
    """Within a range of tokens. The logits are given, because the router is a linear layer with ranges of its own."""
    moe, x = made(spec, cuda), torch.randn(most, spec.width, device=cuda).bfloat16()
    columns = spec.experts + (1 if spec.shared_inner else 0)
    logits = torch.randn(most, columns, device=cuda).bfloat16()

    def terms(rows: slice) -> Tensor:
        return kernels.expert_terms(
            x[rows].contiguous(),
            logits[rows].contiguous(),
            moe.experts.gate_up_proj,
            moe.experts.down_proj,
            spec.experts_per_token,
            shared=spec.shared_parts,
        )

    whole = terms(slice(0, most))
    for count in counts:
        start = (most - count) // 2
        assert torch.equal(terms(slice(start, start + count)), whole[:, start : start + count]), count


def test_replays_with_other_tokens_equal_eager_runs(cuda: torch.device) -> None:
    """The routing of a captured step is computed on the device, so one graph serves any tokens."""
    for spec in (THINKER, TALKER):
        moe = made(spec, cuda)
        for tokens in (1, 8, 64, 300):
            given = torch.randn(tokens, spec.width, device=cuda).bfloat16()
            moe.branch(given)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = moe.branch(given)
            for _ in range(5):
                given.copy_(torch.randn(tokens, spec.width, device=cuda))
                captured.fill_(float("nan"))
                graph.replay()
                assert torch.equal(captured, moe.branch(given)), tokens


@pytest.mark.parametrize("rounds", [False, True], ids=["weights", "weights and tokens"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("spec", [THINKER, TALKER, SMALL], ids=["thinker", "talker", "small"])
def test_a_float8_mixture_equals_its_dequantized_weights(
    cuda: torch.device, spec: MoESpec, tokens: int, *, rounds: bool
) -> None:
    """Rounded tokens add their own error: 2.5 % for each of the two products."""
    moe, x = made(spec, cuda), torch.randn(tokens, spec.width, device=cuda).bfloat16()
    quantize(moe.experts, "fp8", rounds_inputs=rounds)
    experts = moe.experts
    assert experts.scales is not None and experts.gate_up_proj.element_size() == 1
    columns = spec.experts + (1 if spec.shared_parts else 0)
    logits = torch.randn(tokens, columns, device=cuda).bfloat16()
    options = {"shared": spec.shared_parts, "normalizes": spec.normalizes}
    weights = experts.gate_up_proj, experts.down_proj
    eight = {"scales": experts.scales, "rounds_inputs": experts.rounds_inputs}
    found = kernels.expert_terms(x, logits, *weights, spec.experts_per_token, **eight, **options)
    wide = [
        (values.float() * scale[..., None]).bfloat16() for values, scale in zip(weights, experts.scales, strict=True)
    ]
    expected = kernels.expert_terms(x, logits, *wide, spec.experts_per_token, **options)
    is_rounded = experts.rounds_inputs and tokens > kernels.FEW_TOKENS
    assert error(found, expected.double()) < (0.07 if is_rounded else 8e-3)


def test_replays_of_a_float8_mixture_equal_eager_runs(cuda: torch.device) -> None:
    moe = made(THINKER, cuda)
    quantize(moe, "fp8", rounds_inputs=True)
    for tokens in (1, 64, 300):
        given = torch.randn(tokens, THINKER.width, device=cuda).bfloat16()
        moe.branch(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = moe.branch(given)
        given.copy_(torch.randn(tokens, THINKER.width, device=cuda))
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, moe.branch(given)), tokens


def test_a_token_that_is_not_finite_leaves_the_others(cuda: torch.device) -> None:
    """NaN of one sequence must not select a weight out of range. 100 experts are not a power of two."""
    moe = made(MoESpec(width=256, inner=64, experts=100, experts_per_token=4), cuda)
    for tokens in (8, 200):
        x = torch.randn(tokens, 256, device=cuda).bfloat16()
        expected = moe(x)
        x[3] = float("nan")
        found = moe(x)
        assert found[3].isnan().all()
        kept = [row for row in range(tokens) if row != 3]
        assert torch.equal(found[kept], expected[kept])


def test_float32_equals_the_plain_path(cuda: torch.device) -> None:
    moe = made(MoESpec(width=256, inner=64, experts=16, experts_per_token=4, shared_inner=128), cuda, torch.float32)
    x = torch.randn(50, 256, device=cuda)
    weights, chosen = moe.route(x)
    assert error(moe(x), exact(moe, x, chosen, weights)) < 1e-4


@pytest.mark.parametrize("rows", [1, 7, 64, 500])
def test_norm_and_rotation_of_heads_in_one_kernel_equal_float64(cuda: torch.device, rows: int) -> None:
    from mstar_core.layers import RMSNorm, Rotary, RotarySpec, rotate
    from mstar_core.layers.kernels import elementwise

    heads, kv_heads, width = 32, 4, 128
    packed = torch.randn(rows, (heads + 2 * kv_heads) * width, device=cuda).bfloat16()
    norms = [RMSNorm(width, 1e-6).to(cuda, torch.bfloat16).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 2.0)
    rotary = Rotary(RotarySpec(width=width, base=1e6, sections=(24, 20, 20))).to(cuda)
    positions = torch.rand(3, rows, device=cuda) * 5000
    cosine, sine = rotary(positions)
    slow = rotary.to("cpu")(positions.cpu())
    torch.testing.assert_close(cosine.cpu(), slow[0], atol=1e-3, rtol=0)
    gains = norms[0].weight, norms[1].weight
    found = elementwise.rotate_qkv(packed, heads, kv_heads, cosine, sine, torch.bfloat16, (*gains, 1e-6))
    parts = packed.double().view(rows, -1, width).split([heads, kv_heads, kv_heads], dim=1)
    for got, part, norm in zip(found, parts, [*norms, None], strict=True):
        expected = part
        if norm is not None:
            scaled = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
            expected = rotate(scaled, cosine.double(), sine.double())
        assert error(got, expected) < 1e-2
