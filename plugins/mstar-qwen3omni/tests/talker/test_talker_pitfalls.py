"""One mutation per pitfall of section 17 that concerns the talker: each changes the answer, so the vectors see it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mstar_core.layers import SparseMoE
from mstar_qwen3omni.checkpoint.config import OmniConfig
from mstar_qwen3omni.talker.talker import Talker

from .driver import CASES, SPECIAL_CODES, Case, Choose, Spoken, greedy, read_case, speak

Mutation = Callable[[Talker], None]


@pytest.fixture
def media(config: OmniConfig) -> Case:
    """A case with media in the prompt."""
    found = next((case for case in (read_case(name, config) for name in CASES) if case.is_media.any()), None)
    if found is None:
        pytest.skip("needs a case with media")
    return found


def equals_reference(found: Spoken, case: Case) -> bool:
    """Whether an answer passes the golden test of logits, codes and frames."""
    expected = case.tensors
    if found.tokens != expected["talker_tokens"].tolist():
        return False
    if not torch.equal(torch.stack(found.frames, dim=1), expected["codes"]):
        return False
    return torch.allclose(torch.stack(found.logits), expected["talker_step_logits_raw"], atol=2e-3, rtol=0)


def swap_projections(talker: Talker) -> None:
    talker.text_projection, talker.hidden_projection = talker.hidden_projection, talker.text_projection


def project_media_as_text(talker: Talker) -> None:
    talker.hidden_projection = talker.text_projection


def experts(talker: Talker) -> list[SparseMoE]:
    return [module for module in talker.modules() if isinstance(module, SparseMoE)]


def take_one_more_expert(talker: Talker) -> None:
    for moe in experts(talker):
        moe.spec = replace(moe.spec, experts_per_token=moe.spec.experts_per_token + 1)


def keep_weights_as_they_are(talker: Talker) -> None:
    for moe in experts(talker):
        moe.spec = replace(moe.spec, normalizes=False)


def leave_out_the_shared_expert(talker: Talker) -> None:
    for moe in experts(talker):
        moe.spec = replace(moe.spec, shared_inner=0)


def open_the_shared_gate(talker: Talker) -> None:
    for moe in experts(talker):
        moe.shared_expert_gate = AlwaysOpen()


class AlwaysOpen(torch.nn.Module):
    """A gate whose sigmoid is 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x[:, :1], 100.0)


def predict_before_the_norm(talker: Talker) -> None:
    """The state that the predictor reads is divided by the norm's weight, as before the norm."""
    plain = talker.predict
    weight = talker.model.norm.weight
    talker.predict = lambda hidden, *rest: plain(hidden / weight, *rest)  # type: ignore[method-assign]


def embed_code0_by_the_predictor(talker: Talker) -> None:
    table = talker.code_predictor.model.codec_embedding[0]

    def predict(hidden: Tensor, code0: Tensor, *rest: Tensor) -> Tensor:
        found = talker.code_predictor.predict(hidden, table(code0), *rest)
        return torch.cat([code0[:, None], found], dim=1)

    talker.predict = predict  # type: ignore[method-assign]


def sum_code0_by_the_predictor(talker: Talker) -> None:
    model = talker.code_predictor.model
    table = model.codec_embedding[0]
    talker.frame_vectors = lambda frame: table(frame[:, 0]) + model.sum_embeddings(frame[:, 1:])  # type: ignore[method-assign]


def feed_the_end_for_ever(talker: Talker) -> None:
    plain = talker.text_vectors
    talker.text_vectors = lambda text, ended: (plain(text, torch.zeros_like(ended))[0], ended)  # type: ignore[method-assign]


def feed_no_end(talker: Talker) -> None:
    plain = talker.text_vectors
    talker.text_vectors = lambda text, ended: plain(text, torch.ones_like(ended))  # type: ignore[method-assign]


MUTATIONS: dict[str, Mutation] = {
    f"{number}-{change.__name__}": change
    for number, change in [
        (2, swap_projections),
        (2, project_media_as_text),
        (5, take_one_more_expert),
        (5, keep_weights_as_they_are),
        (5, leave_out_the_shared_expert),
        (5, open_the_shared_gate),
        (7, predict_before_the_norm),
        (7, embed_code0_by_the_predictor),
        (7, sum_code0_by_the_predictor),
    ]
}


def changed(talker: Talker, mutate: Mutation) -> Talker:
    made = copy.deepcopy(talker)
    mutate(made)
    return made


def test_the_unchanged_talker_passes(talker: Talker, media: Case) -> None:
    assert equals_reference(speak(copy.deepcopy(talker), media, len(media.tensors["talker_tokens"])), media)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_module_is_seen(talker: Talker, media: Case, name: str) -> None:
    wrong = changed(talker, MUTATIONS[name])
    assert not equals_reference(speak(wrong, media, len(media.tensors["talker_tokens"])), media)


def short(config: OmniConfig) -> Case:
    """A case whose text ends two steps or more before its sound."""
    cases = (read_case(name, config) for name in CASES)
    found = next((case for case in cases if len(case.texts) + 1 < case.tensors["codes"].shape[1]), None)
    if found is None:
        pytest.skip("needs a case that stops early")
    return found


@pytest.mark.parametrize("mutate", [feed_the_end_for_ever, feed_no_end])
def test_another_end_of_text_is_seen(talker: Talker, config: OmniConfig, mutate: Mutation) -> None:
    """Pitfall 8: tts_eos exactly once."""
    case = short(config)
    steps = len(case.tensors["talker_tokens"])
    assert equals_reference(speak(talker, case, steps), case)
    assert not equals_reference(speak(changed(talker, mutate), case, steps), case)


class WithTexts(Case):
    """A case with other text ids."""

    given: tuple[int, ...] = ()

    @property
    def texts(self) -> list[int]:
        return list(self.given)


def retold(case: Case, texts: list[int]) -> Case:
    made = WithTexts(case.name, case.config, case.tensors)
    object.__setattr__(made, "given", tuple(texts))
    return made


def test_text_that_is_late_or_lost_is_seen(talker: Talker, media: Case) -> None:
    """Pitfall 8: one id per frame, aligned."""
    texts, steps = media.texts, len(media.tensors["talker_tokens"])
    late, lost = [*texts[:3], media.config.ids.tts_pad, *texts[3:]], [*texts[:3], *texts[4:]]
    for wrong in (late, lost):
        assert not equals_reference(speak(talker, retold(media, wrong), steps), media)


def test_speaking_the_stop_token_is_seen(talker: Talker, config: OmniConfig) -> None:
    """Pitfall 9."""
    case = short(config)
    spoken = retold(case, [*case.texts, int(case.tensors["thinker_tokens"][-1])])
    assert not equals_reference(speak(talker, spoken, len(case.tensors["talker_tokens"])), case)


def unsuppressed(config: OmniConfig) -> Choose:
    """Greedy with the penalty alone."""

    def choose(logits: Tensor, before: list[int]) -> int:
        scores = logits.clone()
        for code in set(before):
            scores[code] = scores[code] / 1.05 if scores[code] > 0 else scores[code] * 1.05
        return int(scores.argmax())

    return choose


def test_a_missing_penalty_or_suppression_is_seen(talker: Talker, config: OmniConfig) -> None:
    """Pitfall 6: over all cases, because not every answer repeats itself."""
    seen = {"penalty": False, "suppression": False}
    for name in CASES:
        case = read_case(name, config)
        steps = len(case.tensors["talker_tokens"])
        for kind, choose in (("penalty", greedy(config, penalty=1.0)), ("suppression", unsuppressed(config))):
            seen[kind] |= not equals_reference(speak(talker, case, steps, choose=choose), case)
    assert all(seen.values()), seen


def test_suppressing_the_end_token_is_seen(talker: Talker, media: Case) -> None:
    """Pitfall 6: the end token is one of the upper ids, and stays."""
    config, at = media.config, 2
    state, best = media.tensors["talker_last_hidden"][at], media.tensors["talker_step_logits_raw"][at].max()
    ends = copy.deepcopy(talker)
    ends.codec_head.weight[config.codec.eos] = state * (1.5 * best / state.square().sum())

    def suppress_all(logits: Tensor, before: list[int]) -> int:
        scores = logits.clone()
        scores[config.talker.vocab - SPECIAL_CODES :] = -torch.inf
        return int(scores.argmax())

    assert speak(ends, media, 6).tokens[-1] == config.codec.eos
    assert len(speak(ends, media, 6, choose=suppress_all).tokens) == 6


def test_penalized_residual_codes_are_seen(talker: Talker, config: OmniConfig) -> None:
    """Pitfall 6: the repetition penalty never applies to the predictor."""
    differs = False
    for name in CASES:
        case = read_case(name, config)
        start, codes = case.tensors["code_predictor_inputs"], case.tensors["codes"]
        drawn: list[Tensor] = []

        def choose(step: int, logits: Tensor, drawn: list[Tensor] = drawn) -> Tensor:
            for before in drawn:
                old = logits.gather(1, before[:, None])
                logits = logits.scatter(1, before[:, None], torch.where(old > 0, old / 1.5, old * 1.5))
            drawn.append(logits.argmax(dim=-1))
            return drawn[-1]

        actual = talker.code_predictor.unroll(start[:, 0], start[:, 1], choose)
        differs |= not torch.equal(actual, codes[1:].T)
    assert differs
