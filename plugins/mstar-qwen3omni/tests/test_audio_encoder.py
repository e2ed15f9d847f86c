"""The audio encoder against the reference, from samples and mel frames, in batches, in the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.graph import STATELESS, NodeSpec
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_qwen3omni.encoders import audio
from mstar_qwen3omni.encoders.audio import token_count

from .encoder_cases import SMALL, drawn, needs_weights, reference, small, vectors

TOLERANCE = 2e-3
"""Of the set, for encoder outputs."""

FRAMES = (57, 330, 100, 1, 261, 99, 200, 0, 480)


def mel(frames: int) -> Tensor:
    return drawn(SMALL.audio.mel_bins, frames, seed=frames + 1)


def embeds(module: Any, *clips: Tensor) -> list[Tensor]:
    return list(module(audio=list(clips))["embeds"])


@pytest.mark.parametrize(("frames", "tokens"), [(0, 0), (1, 1), (57, 8), (99, 13), (100, 13), (101, 14), (261, 34)])
def test_tokens_of_a_clip(frames: int, tokens: int) -> None:
    assert token_count(frames, 100) == tokens
    assert len(embeds(small("audio_encoder"), mel(frames))[0]) == tokens


@needs_weights
@pytest.mark.parametrize("name", ["audio", "mixed", "audio_in_video"])
def test_a_case_equals_the_reference(name: str) -> None:
    golden = vectors(f"case_{name}")
    heard = golden["in.feature_attention_mask"][0] > 0
    (actual,) = embeds(reference("audio_encoder"), golden["in.input_features"][0][:, heard])
    torch.testing.assert_close(actual, golden["audio_embeds"], atol=TOLERANCE, rtol=0)


@needs_weights
def test_clips_in_one_call_equal_the_reference_of_each_alone() -> None:
    golden, module = vectors("audio_encoder_packing"), reference("audio_encoder")
    inputs = [golden["in.mel_short"], golden["in.mel_long"]]
    for actual in (embeds(module, *inputs), module._encoded([each.T for each in inputs])):
        for own, name in zip(actual, ("short_alone", "long_alone"), strict=True):
            torch.testing.assert_close(own, golden[name], atol=TOLERANCE, rtol=0)
    apart = golden["packed_short_then_long"][: len(golden["short_alone"])] - embeds(module, *inputs)[0]
    assert apart.abs().max() > TOLERANCE


def test_clips_of_any_batch_equal_clips_alone() -> None:
    module, clips = small("audio_encoder"), [mel(frames) for frames in FRAMES]
    for own, clip in zip(embeds(module, *clips), clips, strict=True):
        assert torch.equal(own, embeds(module, clip)[0])


@pytest.mark.parametrize("most", [2, 64])
def test_one_pass_over_unequal_clips_equals_clips_alone(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MOST_WINDOWS", most)
    module, clips = small("audio_encoder"), [mel(frames) for frames in FRAMES]
    for own, alone in zip(module._encoded([clip.T for clip in clips]), embeds(module, *clips), strict=True):
        torch.testing.assert_close(own, alone, atol=1e-4, rtol=0)


def test_a_token_does_not_depend_on_other_windows() -> None:
    module, clip = small("audio_encoder"), mel(480)
    changed = clip.clone()
    changed[:, 250:] = 0
    before, after = embeds(module, clip)[0], embeds(module, changed)[0]
    window = token_count(SMALL.audio.window, SMALL.audio.chunk)
    torch.testing.assert_close(before[:window], after[:window], atol=1e-5, rtol=0)
    assert (before[window:] - after[window:]).abs().max() > 0.1


def test_samples_and_their_mel_frames_give_the_same() -> None:
    module, sound = small("audio_encoder"), drawn(1, 21_234) * 0.1
    frames = module.log_mel([sound[0]])[0].T
    assert torch.equal(embeds(module, sound, frames, sound)[1], embeds(module, sound)[0])


def test_a_clip_shorter_than_a_mel_frame_has_no_tokens() -> None:
    actual = embeds(small("audio_encoder"), torch.zeros(1, 159), torch.zeros(1, 0))
    assert [each.shape for each in actual] == [(0, SMALL.audio.output)] * 2


def test_captured_windows_equal_uncaptured_ones() -> None:
    module, clips = small("audio_encoder"), [mel(frames) for frames in FRAMES]
    expected = module._encoded([clip.T for clip in clips])
    module.capture(GraphCache(torch.device("cpu")))
    for _ in range(2):
        for own, plain in zip(module._encoded([clip.T for clip in clips]), expected, strict=True):
            torch.testing.assert_close(own, plain, atol=1e-5, rtol=0)
        while module.idle():
            pass
    assert module.counters()["graph_hits"] == 2


def test_clips_of_several_requests_run_in_one_step_of_the_engine() -> None:
    module = small("audio_encoder")
    spec = NodeSpec(
        name="audio_encoder",
        engine=STATELESS,
        batch_key=(),
        ragged=("audio",),
        ports={"audio": "f32[c,s]", "embeds": f"any[n,{SMALL.audio.output}]"},
    )
    engine = StatelessEngine(spec, module, device=torch.device("cpu"), dtype=torch.float32)
    clips = {0: mel(57), 1: drawn(1, 40_000), 2: drawn(1, 40_000, seed=2), 3: mel(330)}
    for row, clip in clips.items():
        engine.open(Handle(row), SamplingParams(), 1)
        engine.submit(Job(key=JobKey(row), handle=Handle(row), inputs={"audio": clip}, outputs=("embeds",)))
    running = engine.launch()
    assert running is not None
    result = engine.collect(running)
    assert not result.failed and result.rows == len(clips)
    for done in result.done:
        assert torch.equal(done.outputs["embeds"], embeds(module, clips[int(done.job.handle)])[0])
