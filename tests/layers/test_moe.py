"""The mixture of experts against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from mstar_core.layers import DecoderBlock, MoESpec, SparseMoE
from mstar_core.layers.transformer import AttentionSpec

WIDE = MoESpec(width=24, inner=8, experts=128, experts_per_token=8)
SHARED = MoESpec(width=24, inner=8, experts=16, experts_per_token=6, shared_inner=16)
PLAIN = MoESpec(width=24, inner=8, experts=4, experts_per_token=4, normalizes=False, shared_inner=12)


def made(spec: MoESpec, dtype: torch.dtype = torch.float32) -> SparseMoE:
    torch.manual_seed(3)
    moe = SparseMoE(spec).requires_grad_(False)
    for parameter in moe.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 2 / parameter.shape[-1] ** 0.5)
    return moe.to(dtype)


def expected(moe: SparseMoE, x: Tensor) -> Tensor:
    spec, weights = moe.spec, {name: value.double() for name, value in moe.state_dict().items()}
    rows = []
    for token in x.double():
        shares = (weights["gate.weight"] @ token).softmax(0)
        best = sorted(range(spec.experts), key=lambda expert: -float(shares[expert]))[: spec.experts_per_token]
        divisor = sum(float(shares[expert]) for expert in best) if spec.normalizes else 1.0
        total = torch.zeros_like(token)
        for expert in best:
            gate, up = (weights["experts.gate_up_proj"][expert] @ token).split(spec.inner)
            total += float(shares[expert]) / divisor * (weights["experts.down_proj"][expert] @ (silu(gate) * up))
        if spec.shared_inner:
            gate, up = (weights[f"shared_expert.{name}_proj.weight"] @ token for name in ("gate", "up"))
            shared = weights["shared_expert.down_proj.weight"] @ (silu(gate) * up)
            total += (weights["shared_expert_gate.weight"] @ token).sigmoid() * shared
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("spec", [WIDE, SHARED, PLAIN], ids=["128 experts", "shared", "all experts"])
def test_a_mixture_equals_the_loop_over_tokens(spec: MoESpec) -> None:
    moe, x = made(spec), torch.randn(37, spec.width)
    torch.testing.assert_close(moe(x).double(), expected(moe, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", [WIDE, SHARED], ids=["128 experts", "shared"])
def test_a_token_gives_the_same_alone_and_in_any_batch(spec: MoESpec) -> None:
    moe, x = made(spec), torch.randn(33, spec.width)
    together = moe(x)
    for index in (0, 16, 32):
        torch.testing.assert_close(moe(x[index : index + 1])[0], together[index], atol=2e-5, rtol=2e-5)


def test_the_router_decides_in_float32() -> None:
    """Shares that are equal in bfloat16 still choose the greater one. Weights are in the input's dtype."""
    moe = made(MoESpec(width=2, inner=4, experts=3, experts_per_token=1), torch.bfloat16)
    moe.gate.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0078125], [0.0, 0.0]]) / 128)
    weights, chosen = moe.route(torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16))
    assert moe.gate(torch.ones(1, 2, dtype=torch.bfloat16)).softmax(-1)[0, :2].unique().numel() == 1
    assert chosen.tolist() == [[1]] and weights.tolist() == [[1.0]] and weights.dtype == torch.bfloat16


def test_a_decoder_block_can_have_a_mixture() -> None:
    spec = AttentionSpec(width=24, heads=2, kv_heads=1, head_dim=12, norm_eps=1e-6)
    block = DecoderBlock(spec, SparseMoE(WIDE), 0, 1e-6)
    assert "mlp.experts.gate_up_proj" in block.state_dict() and "self_attn.q_norm.weight" in block.state_dict()
