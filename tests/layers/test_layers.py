"""The shared layers against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from mstar_core.engine.memory.node_memory import MemoryContent, NodeMemory
from mstar_core.errors import ConfigError
from mstar_core.layers import (
    Attention,
    AttentionSpec,
    GatedMLP,
    Head,
    RMSNorm,
    Rotary,
    RotarySpec,
    TokenEmbedding,
    frequencies,
    rotate,
)
from mstar_core.layers.linear import LinearWeight, project_gated

LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def test_norm_statistics_are_float32() -> None:
    norm = RMSNorm(4, eps=1e-6).to(torch.bfloat16)
    x = torch.tensor([[300.0, -200.0, 100.0, 50.0]], dtype=torch.bfloat16)
    expected = x.float() / x.float().square().mean().add(1e-6).sqrt()
    assert norm(x).dtype == torch.bfloat16 and torch.allclose(norm(x).float(), expected, rtol=1e-2)


def test_both_config_styles_give_the_same_rotation() -> None:
    newer = {"rope_parameters": {**LLAMA3["rope_scaling"], "rope_theta": 500000.0}}  # type: ignore[dict-item]
    assert RotarySpec.from_config(LLAMA3, 16) == RotarySpec.from_config(newer, 16)
    assert RotarySpec.from_config({}, 16) == RotarySpec(width=16)


def test_llama3_scaling_follows_its_three_cases() -> None:
    actual = frequencies(RotarySpec.from_config(LLAMA3, 16)).tolist()
    for index, value in enumerate(actual):
        plain = 500000.0 ** (-2 * index / 16)
        wavelength = 2 * math.pi / plain
        if wavelength < 64 / 4:
            expected = plain
        elif wavelength > 64 / 1:
            expected = plain / 32
        else:
            share = (64 / wavelength - 1) / (4 - 1)
            expected = (1 - share) * plain / 32 + share * plain
        assert value == pytest.approx(expected, rel=1e-5)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="yarn"):
        RotarySpec.from_config({"rope_scaling": {"rope_type": "yarn"}}, 16)


def test_rotation_rotates_pairs_by_their_angle() -> None:
    x = torch.randn(3, 2, 8)
    cosine, sine = Rotary(RotarySpec(width=8))(torch.tensor([0, 1, 5]))
    turned = rotate(x, cosine, sine)
    assert torch.allclose(turned[0], x[0])
    angle = 5 * 10000 ** (-2 / 8)
    first, second = x[2, 0, 1], x[2, 0, 5]
    assert turned[2, 0, 1] == pytest.approx(float(first * math.cos(angle) - second * math.sin(angle)), abs=1e-5)
    assert turned[2, 0, 5] == pytest.approx(float(second * math.cos(angle) + first * math.sin(angle)), abs=1e-5)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)


def test_three_axes_share_the_frequencies_in_turns() -> None:
    """Sections (24, 20, 20) of Qwen3-Omni: time 0, 3, .., 57 and 60 to 63; height 1, 4, ..; width 2, 5, .."""
    spec = RotarySpec(width=128, base=1e6, sections=(24, 20, 20))
    positions = torch.tensor([[0.0, 7.5], [0.0, 3.0], [0.0, 11.0]])
    cosine, sine = Rotary(spec)(positions)
    assert cosine.dtype == torch.float32 and cosine.shape == (2, 1, 128)
    for pair, frequency in enumerate(frequencies(spec).tolist()):
        axis = pair % 3 if pair < 60 else 0
        angle = float(positions[axis, 1]) * frequency
        assert float(cosine[1, 0, pair]) == pytest.approx(math.cos(angle), abs=1e-5)
        assert float(sine[1, 0, 64 + pair]) == pytest.approx(math.sin(angle), abs=1e-5)


def test_sections_of_different_lengths() -> None:
    axes = Rotary(RotarySpec(width=32, sections=(8, 3, 5))).axes
    assert axes is not None and axes.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 2, 0, 0, 2, 0]


def test_equal_axes_rotate_as_one_axis() -> None:
    one, three = RotarySpec(width=32), RotarySpec(width=32, sections=(6, 5, 5))
    at = torch.tensor([0.0, 1.5, 40.0])
    for positions in (at, at.expand(3, 3)):
        for actual, plain in zip(Rotary(three)(positions), Rotary(one)(at), strict=True):
            torch.testing.assert_close(actual, plain)


def test_sections_must_fit_the_width() -> None:
    with pytest.raises(ConfigError, match="sections"):
        Rotary(RotarySpec(width=32, sections=(6, 5, 4)))


class Seen:
    """A KV view that keeps what it was given."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        self.query, self.key = query, key
        return query


def test_heads_are_normalized_before_rotation() -> None:
    spec = AttentionSpec(width=16, heads=4, kv_heads=2, head_dim=8, norm_eps=1e-6)
    attention, x, seen = Attention(spec, 0).requires_grad_(False), torch.randn(3, 16), Seen()
    attention.q_norm.weight.copy_(torch.rand(8) + 0.5)
    attention.k_norm.weight.copy_(torch.rand(8) + 0.5)
    rotation = Rotary(RotarySpec(width=8))(torch.tensor([0, 1, 5]))
    attention(x, seen, rotation)
    for actual, layer, norm in (
        (seen.query, attention.q_proj, attention.q_norm),
        (seen.key, attention.k_proj, attention.k_norm),
    ):
        heads = layer(x).view(3, -1, 8)
        scaled = heads / heads.square().mean(-1, keepdim=True).add(1e-6).sqrt() * norm.weight
        torch.testing.assert_close(actual, rotate(scaled, *rotation))


def test_rotation_leaves_the_other_dimensions_of_a_head() -> None:
    x = torch.randn(2, 1, 12)
    assert torch.equal(rotate(x, *Rotary(RotarySpec(width=8))(torch.tensor([1, 2])))[..., 8:], x[..., 8:])


def test_gated_mlp() -> None:
    mlp, x = GatedMLP(4, 6), torch.randn(2, 4)
    gate = x @ mlp.gate_proj.weight.T
    expected = (gate * gate.sigmoid() * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    assert torch.allclose(mlp(x), expected, atol=1e-6)


def test_gelu_gate() -> None:
    """Compare with the formula of the tanh form, and with fused weights."""
    mlp, x = GatedMLP(4, 6, activation="gelu_tanh"), torch.randn(2, 4)
    gate = x @ mlp.gate_proj.weight.T
    open_to = gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
    inner = open_to * (x @ mlp.up_proj.weight.T)
    assert torch.allclose(mlp(x), inner @ mlp.down_proj.weight.T, atol=1e-6)
    joined = LinearWeight(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert torch.allclose(project_gated(x, joined, "gelu_tanh"), inner, atol=1e-6)


def test_a_tied_head_has_no_parameter_of_its_own() -> None:
    embedding = TokenEmbedding(7, 4)
    tied, untied = Head(4, 7, tied_to=embedding), Head(4, 7)
    assert list(tied.state_dict()) == [] and list(untied.state_dict()) == ["weight"]
    with torch.no_grad():
        embedding.weight.fill_(2.0)
    assert tied(torch.ones(1, 4)).tolist() == [[8.0] * 7] and tied(torch.ones(1, 4)).dtype == torch.float32


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "own weight"])
def test_a_padded_head_gives_aligned_rows_of_the_same_logits(is_tied: bool) -> None:
    embedding = TokenEmbedding(71, 4)
    head, hidden = Head(4, 71, tied_to=embedding if is_tied else None), torch.randn(5, 4)
    weight = embedding.weight if is_tied else head.weight
    wanted = hidden @ weight.detach().T
    assert head.fuse_projections() and head.fuse_projections()
    logits = head(hidden)
    assert torch.allclose(logits, wanted, atol=1e-6) and logits.stride() == (128, 1)
    with torch.no_grad():
        weight.mul_(2)  # what the embedding reads is what the head multiplies
    assert torch.allclose(head(hidden), 2 * wanted, atol=1e-6)
    assert list(head.state_dict()) == ([] if is_tied else ["weight"]) and weight.shape == (71, 4)
    both = torch.nn.ModuleList([embedding, head] if is_tied else [head])
    held = NodeMemory(module=both).contents(torch.device("cpu"))
    assert [len(held[kind]) for kind in MemoryContent] == [1, 0, 0], "a sleep may drop the whole weight"


def test_a_head_of_aligned_rows_is_not_padded() -> None:
    assert not Head(4, 128).fuse_projections()
