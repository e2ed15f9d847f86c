"""The talker against the reference: inputs, hidden states, logits, codes and frames; voices, ends and batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from mstar_qwen3omni.checkpoint.config import OmniConfig
from mstar_qwen3omni.params import VOICES
from mstar_qwen3omni.talker.talker import Talker

from .driver import CASES, VOICE, Case, DenseCache, greedy, open_turn, read_case, rules, speak

EMBEDDINGS, STATES = 1e-5, 2e-3
"""Tolerances of the set for embeddings and code sums, and for hidden states and logits."""


def test_vectors_of_the_prompt_equal_the_reference(talker: Talker, case: Case) -> None:
    ids = torch.cat([case.ids[:-9], torch.tensor(case.start)])
    heard = talker.project_text(ids)
    heard[: len(case.ids) - 9][case.is_media[:-9]] = talker.hidden_projection(case.states)
    voice = torch.tensor([VOICES.index(VOICE)])
    opening = talker.opening_vectors(torch.tensor(case.texts[:1]), voice)[0]
    expected = case.tensors["talker_inputs_embeds"]
    torch.testing.assert_close(torch.cat([heard, opening]), expected, atol=EMBEDDINGS, rtol=0)


def test_text_of_decode_steps_equals_the_reference(talker: Talker, case: Case) -> None:
    """Remaining ids, then tts_eos exactly once, then tts_pad for ever (section 10, pitfall 8)."""
    trailing, pad = case.tensors["talker_trailing_text_hidden"], case.tensors["talker_tts_pad_embed"][0]
    ended = torch.zeros(1, 1, dtype=torch.bool)
    inputs = [*case.texts[1:], -1, -1, -1]
    assert len(inputs) == len(trailing) + 2
    for step, text in enumerate(inputs):
        vector, ended = talker.text_vectors(torch.tensor([text]), ended)
        expected = trailing[step] if step < len(trailing) else pad
        torch.testing.assert_close(vector[0], expected, atol=EMBEDDINGS, rtol=0)
        assert bool(ended) == (text < 0)


def test_decode_inputs_equal_the_reference(talker: Talker, case: Case) -> None:
    trailing, pad = case.tensors["talker_trailing_text_hidden"], case.tensors["talker_tts_pad_embed"]
    frames = case.tensors["codes"].T
    said = torch.cat([trailing, pad.expand(max(0, len(frames) - len(trailing)), -1)])[: len(frames)]
    expected = case.tensors["talker_decode_inputs_embeds"]
    torch.testing.assert_close(talker.frame_vectors(frames) + said, expected, atol=EMBEDDINGS, rtol=0)


def test_a_greedy_answer_equals_the_reference(talker: Talker, case: Case) -> None:
    expected = case.tensors
    actual = speak(talker, case, len(expected["talker_tokens"]))
    torch.testing.assert_close(actual.prompt, expected["talker_prefill_last_hidden"], atol=STATES, rtol=0)
    torch.testing.assert_close(actual.logits[0], expected["talker_first_logits_raw"], atol=STATES, rtol=0)
    torch.testing.assert_close(torch.stack(actual.logits), expected["talker_step_logits_raw"], atol=STATES, rtol=0)
    torch.testing.assert_close(torch.stack(actual.hidden), expected["talker_last_hidden"], atol=STATES, rtol=0)
    assert actual.tokens == expected["talker_tokens"].tolist()
    assert torch.equal(torch.stack(actual.frames, dim=1), expected["codes"])


def test_positions_of_decode_follow_the_largest_of_the_prompt(case: Case) -> None:
    expected = case.tensors["talker_decode_position_ids"].float()
    steps = torch.arange(expected.shape[1]) + case.positions.max() + 1
    torch.testing.assert_close(steps.expand(3, -1), expected, atol=1e-4, rtol=0)


def forced_end(talker: Talker, case: Case, at: int) -> Talker:
    """Return a copy whose head prefers the end token at the state of one step of the greedy answer."""
    changed = copy.deepcopy(talker)
    state = case.tensors["talker_last_hidden"][at]
    best = case.tensors["talker_step_logits_raw"][at].max()
    changed.codec_head.weight[case.config.codec.eos] = state * (1.5 * best / state.square().sum())
    return changed


@pytest.mark.parametrize("step", [0, 3])
def test_the_end_token_ends_the_answer_without_a_frame(talker: Talker, case: Case, step: int) -> None:
    expected = case.tensors
    at = min(step, len(expected["talker_tokens"]) - 1)
    actual = speak(forced_end(talker, case, at), case, len(expected["talker_tokens"]))
    assert actual.tokens == [*expected["talker_tokens"][:at].tolist(), case.config.codec.eos]
    assert len(actual.frames) == at
    if at:
        assert torch.equal(torch.stack(actual.frames, dim=1), expected["codes"][:, :at])


@pytest.mark.parametrize("name", VOICES)
def test_a_voice_is_its_code_in_the_opening(talker: Talker, config: OmniConfig, name: str) -> None:
    """The fourth of the six vectors carries it; all others are the same for every voice."""
    text, plain = torch.tensor([5]), torch.tensor([VOICES.index(VOICE)])
    actual = talker.opening_vectors(text, torch.tensor([VOICES.index(name)]))[0]
    pad = talker.project_text(torch.tensor([config.ids.tts_pad]))
    expected = pad + talker.model.codec_embedding(torch.tensor([config.voices[name]]))
    torch.testing.assert_close(actual[3:4], expected)
    usual = talker.opening_vectors(text, plain)[0]
    others = torch.arange(6) != 3
    assert torch.equal(actual[others], usual[others])
    assert torch.equal(actual[3], usual[3]) == (name == VOICE)


def test_voices_give_different_answers(talker: Talker, config: OmniConfig) -> None:
    case = read_case(CASES[0], config)
    actual = [speak(talker, case, 4, voice=name) for name in VOICES]
    assert len({tuple(each.tokens) for each in actual}) == len(VOICES)


def test_a_voice_may_come_once_per_token(talker: Talker) -> None:
    text, voice = torch.tensor([7, 9]), torch.tensor([2, 1])
    each = talker.opening_vectors(text, voice.repeat_interleave(6))
    assert torch.equal(each, talker.opening_vectors(text, voice))


class Together:
    """Several requests in one batch: openings and decode steps in common."""

    def __init__(self, talker: Talker, cases: list[Case]) -> None:
        self.talker, self.cases, self.cache = talker, cases, DenseCache()
        self.config = cases[0].config
        layers = [DenseCache() for _ in cases]
        for cache, case in zip(layers, cases, strict=True):
            open_turn(talker, case, cache)
        self.cache._layers = {
            (layer, row): kept for row, cache in enumerate(layers) for (layer, _), kept in cache._layers.items()
        }

    def frames(self, steps: int, seeds: list[int], voices: list[int]) -> Tensor:
        """Return the frames of all requests: [B, steps - 1, groups]. Code 0 is greedy, residual codes are drawn."""
        rows, draw = len(self.cases), greedy(self.config)
        self.cache.lengths = [6] * rows
        made = self.talker(
            kv=self.cache,
            positions=torch.cat([case.positions[:, -6:] for case in self.cases], dim=1),
            text=torch.tensor([case.texts[0] for case in self.cases]),
            voice=torch.tensor(voices),
        )
        texts = [case.texts[1:] for case in self.cases]
        tokens: list[list[int]] = [[] for _ in self.cases]
        generators, found = [torch.Generator().manual_seed(seed) for seed in seeds], []
        self.cache.lengths = [1] * rows
        for step in range(steps - 1):
            logits = self.talker.head(made["last_hidden"])
            for row in range(rows):
                tokens[row].append(draw(logits[row], tokens[row]))
            made = self.talker(
                kv=self.cache,
                positions=torch.stack([case.positions.max() + 1 + step for case in self.cases]),
                code0=torch.tensor([token[-1] for token in tokens]),
                text=torch.tensor([[text.pop(0) if text else -1] for text in texts]),
                last_hidden=made["last_hidden"],
                text_ended=made["text_ended"],
                random=torch.stack(
                    [torch.rand(1, self.config.groups - 1, generator=generator)[0] for generator in generators]
                ),
                **rules(rows, 1.0),
            )
            found.append(made["frame"])
        return torch.stack(found, dim=1)


def test_frames_do_not_depend_on_the_batch(talker: Talker, config: OmniConfig) -> None:
    """Answers of unequal length, with text that ends at different steps."""
    cases, seeds = [read_case(name, config) for name in CASES], list(range(len(CASES)))
    voices = [row % len(VOICES) for row in range(len(CASES))]
    together = Together(talker, cases).frames(10, seeds, voices)
    for row, case in enumerate(cases):
        alone = speak(talker, case, 10, voice=VOICES[voices[row]], seed=seeds[row], choose=greedy(config))
        assert torch.equal(torch.stack(alone.frames), together[row][: len(alone.frames)]), case.name


def test_equal_seeds_give_equal_frames_and_others_do_not(talker: Talker, config: OmniConfig) -> None:
    case = read_case(CASES[0], config)
    first, second, other = (torch.stack(speak(talker, case, 6, seed=seed).frames) for seed in (3, 3, 4))
    assert torch.equal(first, second) and not torch.equal(first[:, 1:], other[:, 1:])


def test_a_frame_that_cannot_be_drawn_reaches_the_logits(talker: Talker, config: OmniConfig) -> None:
    """The engine fails a request whose logits are not finite; the frame itself stays within the codebook."""
    case = read_case(CASES[0], config)
    broken = copy.deepcopy(talker)
    torch.nn.init.constant_(broken.code_predictor.model.norm.weight, torch.nan)
    actual = speak(broken, case, 2)
    assert int(actual.frames[0].min()) >= 0
    assert not actual.logits[1].isfinite().any()
