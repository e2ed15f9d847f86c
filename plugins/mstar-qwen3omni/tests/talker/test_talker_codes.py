"""The code predictor against the reference and against its definition: logits, greedy and sampled codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softmax

from mstar_core.layers.code_predictor import CodePredictor
from mstar_core.layers.sampling import draw
from mstar_qwen3omni.checkpoint.config import OmniConfig
from mstar_qwen3omni.talker.talker import Talker, predictor_spec

from .driver import CASES, Case, read_case

LOGITS = 2e-3


def test_logits_of_every_step_equal_the_reference(talker: Talker, case: Case) -> None:
    start, codes = case.tensors["code_predictor_inputs"], case.tensors["codes"]
    seen: list[Tensor] = []

    def choose(step: int, logits: Tensor) -> Tensor:
        seen.append(logits)
        return codes[step + 1]

    actual = talker.code_predictor.unroll(start[:, 0], start[:, 1], choose)
    assert torch.equal(actual, codes[1:].T)
    expected = case.tensors["code_predictor_logits"]
    torch.testing.assert_close(torch.stack(seen, dim=1), expected, atol=LOGITS, rtol=0)


def test_inputs_of_the_reference_are_the_state_and_the_first_code(talker: Talker, case: Case) -> None:
    start, codes = case.tensors["code_predictor_inputs"], case.tensors["codes"]
    states = case.tensors["talker_last_hidden"][: len(start)]
    first = talker.model.codec_embedding(codes[0])
    torch.testing.assert_close(start, torch.stack([states, first], dim=1), atol=LOGITS, rtol=0)


def test_greedy_frames_equal_the_reference(talker: Talker, case: Case) -> None:
    codes, rows = case.tensors["codes"].T, case.tensors["codes"].shape[1]
    rule = (torch.zeros(rows), torch.full((rows,), 50), torch.full((rows,), 0.8))
    uniform = torch.rand(rows, codes.shape[1] - 1)
    actual = talker.predict(case.tensors["talker_last_hidden"][:rows], codes[:, 0], uniform, *rule)
    assert torch.equal(actual, codes)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def defined_logits(predictor: CodePredictor, vectors: Tensor, head: int) -> Tensor:
    """Return the logits of one head after all vectors of a frame, by section 11, without a cache. vectors: [n, d]."""
    sizes, state = predictor.sizes, dict(predictor.named_parameters())
    count, group = len(vectors), sizes.heads // sizes.kv_heads
    frequency = sizes.rope_base ** (-torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    angle = torch.outer(torch.arange(count).float(), frequency).repeat(1, 2)[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()

    x = vectors
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}."
        h = norm(x, state[at + "input_layernorm.weight"], sizes.norm_eps)
        q, k, v = ((h @ state[f"{at}self_attn.{name}_proj.weight"].T).view(count, -1, sizes.head_dim) for name in "qkv")
        q = turned(norm(q, state[at + "self_attn.q_norm.weight"], sizes.norm_eps))
        k = turned(norm(k, state[at + "self_attn.k_norm.weight"], sizes.norm_eps))
        mixed = torch.empty_like(q)
        for which in range(sizes.heads):
            scores = q[:, which] @ k[:, which // group].T / math.sqrt(sizes.head_dim)
            scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
            mixed[:, which] = softmax(scores, dim=-1) @ v[:, which // group]
        x = x + mixed.flatten(1) @ state[at + "self_attn.o_proj.weight"].T
        h = norm(x, state[at + "post_attention_layernorm.weight"], sizes.norm_eps)
        gate, up = (h @ state[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ state[at + "mlp.down_proj.weight"].T
    return norm(x[-1], state["model.norm.weight"], sizes.norm_eps) @ state[f"lm_head.{head}.weight"].T


@pytest.mark.parametrize("rule", [(1.0, 50, 0.8), (0.6, 7, 1.0), (1.3, 0, 0.9), (1.0, 0, 1.0)])
def test_sampled_frames_equal_the_definition(
    talker: Talker, config: OmniConfig, rule: tuple[float, int, float]
) -> None:
    case, rows, predictor = read_case(CASES[0], config), 4, talker.code_predictor
    states, code0 = case.tensors["talker_last_hidden"][:rows], case.tensors["codes"][0, :rows]
    uniform = torch.rand(rows, config.groups - 1, generator=torch.Generator().manual_seed(9))
    heat, count, mass = (torch.full((1,), each) for each in rule)
    actual = talker.predict(states, code0, uniform, heat.expand(rows), count.expand(rows), mass.expand(rows))
    for row in range(rows):
        vectors, codes = [states[row], talker.model.codec_embedding(code0[row])], [int(code0[row])]
        for step in range(config.groups - 1):
            logits = defined_logits(predictor, torch.stack(vectors), step)
            codes.append(int(draw(logits[None], uniform[row : row + 1, step], heat, count, mass)))
            vectors.append(predictor.model.codec_embedding[step].weight[codes[-1]])
        assert actual[row].tolist() == codes


def test_each_group_reads_its_own_uniform(talker: Talker, config: OmniConfig) -> None:
    """A changed number changes no earlier group of its row, and no other row."""
    case, rows = read_case(CASES[0], config), 5
    states, code0 = case.tensors["talker_last_hidden"][:rows], case.tensors["codes"][0, :rows]
    rule = (torch.full((rows,), 1.5), torch.zeros(rows, dtype=torch.int64), torch.ones(rows))
    uniform = torch.full((rows, config.groups - 1), 0.01)
    before = talker.predict(states, code0, uniform, *rule)
    uniform[2, 1] = 0.99
    after = talker.predict(states, code0, uniform, *rule)
    others = torch.arange(rows) != 2
    assert torch.equal(before[others], after[others])
    assert torch.equal(before[2, :2], after[2, :2]) and before[2, 2] != after[2, 2]


def test_fused_embeddings_sum_to_the_same(talker: Talker, config: OmniConfig) -> None:
    model = CodePredictor(predictor_spec(config.predictor, config.groups)).requires_grad_(False).model
    codes = torch.randint(0, config.predictor.vocab, (3, config.groups - 1))
    apart = model.sum_embeddings(codes)
    assert model.fuse_projections() and model.fuse_projections()
    torch.testing.assert_close(model.sum_embeddings(codes), apart)
