"""Blocks with LayerNorm against those of torch, with norms in front and behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.layers import Attention, AttentionSpec, BlockSpec, CausalBlock, CrossBlock, EncoderBlock

WIDTH, HEADS, INNER, TOKENS, STATES = 16, 4, 24, 5, 7


class OneSequence:
    """The view of one sequence without a cache: causal over itself, whole over what it keeps."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        heads = (part.transpose(0, 1) for part in (query, key, value))
        return scaled_dot_product_attention(*heads, is_causal=True, scale=scale).transpose(0, 1)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.kept[layer] = key, value

    def attend_cross(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        heads = (part.transpose(0, 1) for part in (query, *self.kept[layer]))
        return scaled_dot_product_attention(*heads, scale=scale).transpose(0, 1)


def copy_attention(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
    parts = zip(
        theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), ("q_proj", "k_proj", "v_proj"), strict=True
    )
    for weight, bias, name in parts:
        ours.get_submodule(name).load_state_dict({"weight": weight, "bias": bias})
    ours.get_submodule("out_proj").load_state_dict(theirs.out_proj.state_dict())


def copy(theirs: nn.Module, ours: nn.Module, names: dict[str, str]) -> None:
    for name, own in names.items():
        ours.get_submodule(own).load_state_dict(theirs.get_submodule(name).state_dict())


def spec(norm_first: bool) -> BlockSpec:
    return BlockSpec(width=WIDTH, heads=HEADS, inner=INNER, norm_first=norm_first)


def torch_options(norm_first: bool) -> dict[str, object]:
    return {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": norm_first}


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_block_is_that_of_torch(norm_first: bool) -> None:
    torch.manual_seed(1)
    theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, **torch_options(norm_first)).eval()  # type: ignore[arg-type]
    ours = EncoderBlock(spec(norm_first))
    copy_attention(theirs.self_attn, ours.self_attn)
    names = {"linear1": "fc1", "linear2": "fc2", "norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"}
    copy(theirs, ours, names)
    x = torch.randn(2, TOKENS, WIDTH)
    is_seen = torch.tensor([[True] * TOKENS, [True, True, False, False, False]])
    with torch.no_grad():
        expected = theirs(x, src_key_padding_mask=~is_seen)
        actual = ours(x, is_seen[:, None, None])
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1, :2], expected[1, :2])


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_block_with_a_memory_is_the_decoder_of_torch(norm_first: bool) -> None:
    torch.manual_seed(2)
    theirs = nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, **torch_options(norm_first)).eval()  # type: ignore[arg-type]
    ours, view = CrossBlock(spec(norm_first), 3), OneSequence()
    copy_attention(theirs.self_attn, ours.self_attn)
    copy_attention(theirs.multihead_attn, ours.encoder_attn)
    norms = {"norm1": "self_attn_layer_norm", "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"}
    copy(theirs, ours, {"linear1": "fc1", "linear2": "fc2", **norms})
    x, states = torch.randn(TOKENS, WIDTH), torch.randn(STATES, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    with torch.no_grad():
        ours.remember(states, view)
        expected = theirs(x[None], states[None], tgt_mask=mask)[0]
        torch.testing.assert_close(ours(x, view), expected)


def test_keys_without_a_bias_and_a_causal_block_without_a_memory() -> None:
    block = CausalBlock(BlockSpec(width=WIDTH, heads=HEADS, inner=INNER, key_bias=False), 0)
    assert "self_attn.k_proj.bias" not in block.state_dict() and "self_attn.v_proj.bias" in block.state_dict()
    x = torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        whole, part = block(x, OneSequence()), block(x[:2], OneSequence())
    torch.testing.assert_close(whole[:2], part)


def test_joined_projections_change_no_output_and_no_name() -> None:
    block = EncoderBlock(BlockSpec(width=WIDTH, heads=HEADS, inner=INNER, key_bias=False))
    x = torch.randn(2, TOKENS, WIDTH)
    with torch.no_grad():
        expected, names = block(x), set(block.state_dict())
        block.self_attn.join()
        torch.testing.assert_close(block(x), expected)
        assert set(block.state_dict()) == names
        block.self_attn.k_proj.weight.zero_()
        assert not block(x).allclose(expected), "the own weights are views of the joined one"


def test_attention_without_rotary_does_not_see_positions() -> None:
    layer = Attention(AttentionSpec(width=WIDTH, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH // HEADS), 0)
    x = torch.randn(TOKENS, WIDTH)
    swapped = x[[1, 0, 2, 3, 4]]
    with torch.no_grad():
        first, second = layer(x, OneSequence(), None), layer(swapped, OneSequence(), None)
    torch.testing.assert_close(first[2:], second[2:])
