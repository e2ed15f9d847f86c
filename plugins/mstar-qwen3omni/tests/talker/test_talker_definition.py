"""A small talker with the expert counts of the released model, against its definition in plain float32."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softmax

from mstar_core.errors import WeightsError
from mstar_qwen3omni.checkpoint.config import DecoderSizes, OmniConfig, TextIds
from mstar_qwen3omni.talker.talker import Talker

from .driver import Case, DenseCache, rules, speak
from .test_talker_engine import Wish, answers

SIZES = DecoderSizes(
    vocab=1100,
    width=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=16,
    mlp=20,
    experts=128,
    experts_per_token=6,
    shared_mlp=40,
    mrope=(4, 2, 2),
)
CONFIG = OmniConfig(
    talker=SIZES,
    thinker=replace(SIZES, vocab=1500, width=40),
    predictor=DecoderSizes(vocab=60, width=48, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=64),
    ids=TextIds(tts_pad=150, tts_bos=151, tts_eos=152),
    codec=replace(OmniConfig().codec, pad=1001, bos=1002, eos=1003, nothink=1004, think_bos=1005, think_eos=1006),
    voices={"chelsie": 1010, "ethan": 1011, "aiden": 1012},
    groups=5,
    projection=32,
)


@pytest.fixture(scope="module")
def small() -> Talker:
    """Random weights, norms included."""
    torch.manual_seed(12)
    talker = Talker(CONFIG).eval().requires_grad_(False)
    for name, parameter in talker.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.2)
        elif "mlp.gate.weight" in name:
            parameter.normal_(0.0, 0.3)
        elif "embedding" in name:
            parameter.normal_(0.0, 0.5)
    return talker


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SIZES.norm_eps) * weight


def angles(positions: Tensor) -> Tensor:
    """Return the angle of each frequency by the rule of section 4: [T, head_dim]. positions: [3, T]."""
    made = torch.empty(positions.shape[1], SIZES.head_dim // 2)
    for i in range(SIZES.head_dim // 2):
        axis = 0
        if i % 3 == 1 and i < 3 * SIZES.mrope[1]:
            axis = 1
        if i % 3 == 2 and i < 3 * SIZES.mrope[2]:
            axis = 2
        made[:, i] = positions[axis] * SIZES.rope_base ** (-2 * i / SIZES.head_dim)
    return made.repeat(1, 2)


def mixture(state: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    """Return the expert layer of one token after another."""
    out = torch.zeros_like(x)
    for token, h in enumerate(x):
        p = softmax(h @ state[at + "gate.weight"].T, dim=-1)
        chosen = sorted(range(SIZES.experts), key=lambda expert: -float(p[expert]))[: SIZES.experts_per_token]
        for expert in chosen:
            gate_up, down = state[at + "experts.gate_up_proj"][expert], state[at + "experts.down_proj"][expert]
            gate, up = gate_up[: SIZES.mlp] @ h, gate_up[SIZES.mlp :] @ h
            out[token] += p[expert] / p[chosen].sum() * (down @ (silu(gate) * up))
        gate, up, down = (state[f"{at}shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
        share = torch.sigmoid(state[at + "shared_expert_gate.weight"] @ h)
        out[token] += share * (down @ (silu(gate @ h) * (up @ h)))
    return out


def defined(talker: Talker, x: Tensor, positions: Tensor) -> Tensor:
    """Return the normalized hidden states of a whole sequence by section 4. x: [T, width]; positions: [3, T]."""
    state, count, group = dict(talker.named_parameters()), len(x), SIZES.heads // SIZES.kv_heads
    angle = angles(positions)[:, None]

    def turned(v: Tensor) -> Tensor:
        first, second = v.chunk(2, dim=-1)
        return v * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()

    for layer in range(SIZES.layers):
        at = f"model.layers.{layer}."
        h = norm(x, state[at + "input_layernorm.weight"])
        q, k, v = ((h @ state[f"{at}self_attn.{n}_proj.weight"].T).view(count, -1, SIZES.head_dim) for n in "qkv")
        q = turned(norm(q, state[at + "self_attn.q_norm.weight"]))
        k = turned(norm(k, state[at + "self_attn.k_norm.weight"]))
        mixed = torch.empty_like(q)
        for head in range(SIZES.heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(SIZES.head_dim)
            scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
            mixed[:, head] = softmax(scores, dim=-1) @ v[:, head // group]
        x = x + mixed.flatten(1) @ state[at + "self_attn.o_proj.weight"].T
        x = x + mixture(state, at + "mlp.", norm(x, state[at + "post_attention_layernorm.weight"]))
    return norm(x, state["model.norm.weight"])


def test_a_prompt_with_fractional_positions_equals_the_definition(small: Talker) -> None:
    states, positions = torch.randn(11, CONFIG.thinker.width), torch.rand(3, 11).cumsum(1) * 1.7
    cache = DenseCache()
    cache.lengths = [11]
    actual = small(kv=cache, positions=positions, states=states)["hidden"]
    hidden = small.hidden_projection
    x = silu(states @ hidden.linear_fc1.weight.T + hidden.linear_fc1.bias)
    x = x @ hidden.linear_fc2.weight.T + hidden.linear_fc2.bias
    torch.testing.assert_close(actual, defined(small, x, positions), atol=2e-4, rtol=1e-4)


def test_sampled_steps_equal_the_definition(small: Talker) -> None:
    """Prompt, opening and steps of two sequences: each step against a whole pass over everything before it."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 150, (2, 5), generator=generator)
    cache, positions = DenseCache(), torch.arange(5.0).repeat(2)
    cache.lengths = [5, 5]
    small(kv=cache, positions=positions, tokens=tokens.flatten())
    cache.lengths = [6, 6]
    texts, voice = torch.tensor([9, 11]), torch.tensor([1, 2])
    actual = small(kv=cache, positions=torch.arange(5.0, 11.0).repeat(2), text=texts, voice=voice)
    vectors = [
        torch.cat([small.project_text(tokens[row]), small.opening_vectors(texts, voice)[row]]) for row in range(2)
    ]
    cache.lengths = [1, 1]
    ended = [False, False]
    for step, said in enumerate([(20, 30), (21, -1), (-1, -1), (-1, -1)]):
        place = torch.arange(11.0 + step).expand(3, -1)
        for row in range(2):
            expected = defined(small, vectors[row], place)[-1]
            torch.testing.assert_close(actual["last_hidden"][row], expected, atol=5e-4, rtol=1e-4)
        code0 = small.head(actual["last_hidden"])[:, :60].argmax(dim=-1)
        actual = small(
            kv=cache,
            positions=torch.full((2,), 11.0 + step),
            code0=code0,
            text=torch.tensor(said),
            last_hidden=actual["last_hidden"],
            text_ended=actual["text_ended"],
            random=torch.rand(2, CONFIG.groups - 1, generator=generator),
            **rules(2, 1.0),
        )
        for row in range(2):
            codes = actual["frame"][row]
            tables = [small.model.codec_embedding, *small.code_predictor.model.codec_embedding]
            x = torch.stack([table.weight[code] for table, code in zip(tables, codes, strict=True)]).sum(dim=0)
            tail = CONFIG.ids.tts_pad if ended[row] else CONFIG.ids.tts_eos
            text = said[row] if said[row] >= 0 else tail
            ended[row] |= said[row] < 0
            assert bool(actual["text_ended"][row]) == ended[row] and codes[0] == code0[row]
            vectors[row] = torch.cat([vectors[row], (x + small.project_text(torch.tensor([text]))[0])[None]])


def test_a_checkpoint_needs_one_known_voice() -> None:
    Talker(replace(CONFIG, voices={"aiden": 1012}))
    with pytest.raises(WeightsError, match="no known voice"):
        Talker(replace(CONFIG, voices={"unlisted": 1012}))


def test_half_precision_stays_near_float32(small: Talker) -> None:
    """Measured by the median over tokens: near-ties of the router give a few tokens another expert (pitfall 15)."""
    half = copy.deepcopy(small).to(torch.bfloat16)
    half.model.rotary, half.code_predictor.model.rotation = small.model.rotary, small.code_predictor.model.rotation
    tokens, codes = torch.arange(40, 60), torch.arange(20).view(5, 4)
    actual = []
    for talker in (small, half):
        cache, logits = DenseCache(), list[Tensor]()
        cache.lengths = [20]
        hidden = talker(kv=cache, positions=torch.arange(20.0), tokens=tokens)["hidden"]

        def choose(step: int, scores: Tensor, logits: list[Tensor] = logits) -> Tensor:
            logits.append(scores.float())
            return codes[:, step]

        states, first = hidden[:5], talker.model.codec_embedding(torch.arange(5))
        talker.code_predictor.unroll(states, first, choose)
        actual.append((hidden.float(), talker.head(hidden).float(), torch.stack(logits, dim=1)))
    for wide, narrow in zip(*actual, strict=True):
        error = (narrow - wide).norm(dim=-1) / wide.norm(dim=-1)
        assert 0 < float(error.median()) < 0.03, float(error.median())


def test_the_engine_takes_text_ids_above_the_talkers_vocabulary(small: Talker) -> None:
    """The released model reads ids below 152064 and draws codes below 3072."""
    ids = torch.tensor([3, 1499, 1200])
    tensors = {
        "in.input_ids": ids,
        "talker_input_ids": torch.cat([ids, torch.full((9,), CONFIG.ids.tts_pad)]),
        "talker_position_ids": torch.arange(len(ids) + 9.0).expand(3, -1),
        "thinker_tokens": torch.tensor([1498, 7, 1300, 2]),
    }
    case = Case("made", replace(CONFIG, ids=replace(CONFIG.ids, im_start=160, assistant=1400)), tensors)
    plain, (actual,) = speak(small, case, 6), answers(small, [Wish(case, 6)])
    assert (actual.tokens, actual.frames) == (plain.tokens, [frame.tolist() for frame in plain.frames])


@pytest.mark.parametrize("has_ended", [False, True])
def test_known_frames_in_one_pass_equal_decode_steps(small: Talker, has_ended: bool) -> None:
    """Text ids, then tts_eos once, then tts_pad, whether or not the text has ended before the first known frame."""
    frames = torch.tensor([[5, 1, 2, 3, 4], [9, 8, 7, 6, 5], [1010, 0, 59, 1, 30], [3, 3, 3, 3, 3], [700, 9, 8, 7, 6]])
    text = torch.full((5,), -1) if has_ended else torch.tensor([7, 1400, -1, -1, -1])
    opening = {"text": torch.tensor([[3]]), "voice": torch.tensor([0]), "positions": torch.arange(6.0)}
    stepped, packed = DenseCache(), DenseCache()
    for cache in (stepped, packed):
        cache.lengths = [6]
        small(kv=cache, **opening)
    ended = torch.full((1, 1), has_ended)
    hidden, flags = [], []
    stepped.lengths = [1]
    for step, frame in enumerate(frames):
        said, next_ended = small.text_vectors(text[step : step + 1], ended)
        hidden.append(small.model(small.frame_vectors(frame[None]) + said, torch.tensor([6.0 + step]), stepped))
        ended = next_ended
        flags.append(ended)
    packed.lengths = [5]
    before = torch.full((1, 1), has_ended)
    actual = small(kv=packed, positions=torch.arange(6.0, 11.0), known=frames, text=text, text_ended=before)
    torch.testing.assert_close(actual["last_hidden"], torch.cat(hidden), atol=1e-4, rtol=0)
    assert torch.equal(actual["text_ended"], torch.cat(flags)) and torch.equal(actual["frame"], frames)
