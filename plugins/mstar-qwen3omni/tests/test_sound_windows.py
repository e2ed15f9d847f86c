"""Turns of a spoken conversation: what was read before is neither encoded nor read again, and no answer changes."""

from __future__ import annotations

import functools
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from mstar_core.config.files.load import read_file
from mstar_core.config.files.placement import make_plan
from mstar_core.config.files.resolution import resolve
from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.miniature import Miniature
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.families.mel import LogMel
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.processor import MediaPart, PromptRequest
from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.plugin import spec
from mstar_qwen3omni.request.sound_windows import sound_windows

RATE, PAGE = 16_000, 16
SHORT = {"max_output_tokens": 8, "talker_max_tokens": 10, "temperature": 0.0}
SPOKEN, WRITTEN = ("text", "audio"), ("text",)


@functools.cache
def tiny() -> Miniature:
    return Miniature(spec(OmniConfig()))


@functools.cache
def config() -> OmniConfig:
    return read_config(tiny().folder)


def noise(seconds: float, seed: int, rising: float = 0.0) -> np.ndarray:
    """Return noise whose loudest place is its begin, or later if it is rising: int16 [s] at 16 kHz."""
    count = int(seconds * RATE)
    values = np.random.default_rng(seed).standard_normal(count) * (1 + rising * np.arange(count) / RATE)
    values[: RATE // 10] *= 1.0 if rising else 8.0
    return (values * 800).clip(-32768, 32767).astype(np.int16)


def wav(samples: np.ndarray) -> MediaPart:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    return MediaPart(modality="audio", data=file.getvalue())


def picture(seed: int) -> MediaPart:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8)).save(file, "PNG")
    return MediaPart(modality="image", data=file.getvalue())


@dataclass
class Talk:
    """A conversation. ids: of each answer, as a session of the api knows them."""

    media: list[MediaPart] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def ask(self, *parts: MediaPart | str) -> Talk:
        """Add a turn of the user."""
        order = []
        for part in parts:
            if isinstance(part, str):
                order.append(("text", len(self.texts)))
                self.texts.append(part)
            else:
                order.append((part.modality, sum(each.modality == part.modality for each in self.media)))
                self.media.append(part)
        self.turns.append(Turn(role="user", order=order))
        return self

    def answered(self, ids: Sequence[int]) -> None:
        self.turns.append(Turn(role="assistant", ids=ids))

    def request(self, outputs: Sequence[str] = SPOKEN, **params: Any) -> SampleRequest:
        return SampleRequest(
            media=list(self.media),
            texts=list(self.texts),
            turns=list(self.turns),
            order=[place for turn in self.turns for place in turn.order],
            params={**SHORT, **params},
            outputs=outputs,
            reads_windows=True,
            is_journaled=True,
        )


class Counted:
    """A deployment that counts: tokens that the thinker has read from prompts, and runs of the encoders."""

    def __init__(self, settings: RuntimeSettings | None = None, **placement: Any) -> None:
        self.runs: Counter[str] = Counter()
        self.runtime: LocalRuntime = tiny().runtime(
            settings, faults=lambda node, handles: self.runs.update({node: len(handles)}), **placement
        )
        self.runtime.api.session = "talk"

    def ask(self, request: SampleRequest, *, reads_only: bool = False) -> tuple[RequestOutcome, int, int]:
        """Run a request. Returns its outcome, the tokens of its prompt, and those that were cached."""
        self.runs.clear()
        self.runtime.api.reads_only = reads_only
        call = self.runtime.send(request)
        self.runtime.run()
        assert call.outcome is not None and call.finished is not None, call.outcome
        assert self.runtime.leaks() == []
        prompt = tiny().processor.process_prompt(prompt_of(request)).prompt_tokens
        return call.outcome, prompt, call.finished.cached_tokens


def prompt_of(request: SampleRequest) -> PromptRequest:
    params = tiny().spec.params(**request.params)
    return PromptRequest(
        text=None,
        texts=request.texts,
        turns=request.turns,
        media=request.media,
        order=request.order,
        params=params,
        outputs=frozenset(request.outputs),
        max_seq_len=1024,
        reads_windows=request.reads_windows,
    )


def ids_of(outcome: RequestOutcome) -> list[int]:
    return [int(value) for values in outcome.of("token") for value in values.reshape(-1)]


def require_same(one: RequestOutcome, other: RequestOutcome) -> None:
    assert one.outputs == other.outputs and one.status == other.status == "finished"
    assert len(one.outputs["text"]) and ("audio" not in other.outputs or len(one.outputs["audio"]))


TURNS: tuple[tuple[MediaPart | str, ...], ...] = (
    (wav(noise(1.3, 1)),),
    (picture(2), "What is this?"),
    (wav(noise(0.7, 3)), "And this?"),
    ("Thank you.",),
)

CONFIGS = Path(__file__).parents[3] / "configs"

PLACES: Mapping[str, tuple[RuntimeSettings, int | str]] = {
    "one rank": (RuntimeSettings(), 1),
    "chunked": (RuntimeSettings(token_budget=24), 1),
    "overlapping": (RuntimeSettings(lookahead=1), 1),
    "each node apart": (RuntimeSettings(), 5),
    "prefill and decode apart": (RuntimeSettings(), "qwen3omni_pd_disaggregated"),
}
"""Settings, and the number of ranks or the name of a deployment file."""


def placement_of(ranks: int | str) -> dict[str, Any]:
    if isinstance(ranks, int):
        return {"ranks": ranks}
    resolved = resolve(spec(OmniConfig()), read_file(CONFIGS / f"{ranks}.yaml"))
    return {"plan": make_plan(tiny().spec, resolved, ("cpu",))}


@pytest.mark.parametrize("place", PLACES)
def test_a_spoken_turn_reads_nothing_of_the_turns_before(place: str) -> None:
    settings, ranks = PLACES[place]
    placement = placement_of(ranks)
    served, talk, known = Counted(settings, **placement), Talk(), 0
    for number, parts in enumerate(TURNS):
        request = talk.ask(*parts).request(seed=number)
        outcome, prompt, cached = served.ask(request)
        fresh, _, none = Counted(replace(settings, prefix_cache=False, feature_cache_bytes=0)).ask(request)
        require_same(outcome, fresh)
        assert none == 0
        assert known - PAGE < cached < prompt, "all earlier turns, up to the page that their last token is in"
        # The page keys of an answer stay on the rank that decodes, so a prefill rank reads the last answer once.
        known = prompt + (0 if "plan" in placement else len(ids_of(outcome)) - 1)
        talk.answered(ids_of(outcome))


# -- windows of sounds ------------------------------------------------------------------------------------------------

WINDOW_S = 2.0
"""Of the tiny checkpoint."""

MARGIN = RATE // 40
"""Sound behind the windows that are read ahead: the last frame of a window reads beyond it."""


@pytest.mark.parametrize("seconds", [2.01, 4.0, 5.37])
def test_windows_have_the_log_mel_values_of_the_whole_sound(seconds: float) -> None:
    sizes, sound = config().audio, noise(seconds, 4).astype(np.float32)[None] / 32768
    windows = [frames for frames, _ in sound_windows(sound, sizes.mel_bins, sizes.window)]
    whole = LogMel(sizes.mel_bins)([torch.from_numpy(sound[0])])[0].T
    assert [frames.shape[1] for frames in windows[:-1]] == [sizes.window] * (len(windows) - 1)
    torch.testing.assert_close(torch.from_numpy(np.concatenate(windows, axis=1)), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seconds", [2.3, 4.02, 5.37])
def test_windows_are_encoded_as_in_the_whole_sound(seconds: float) -> None:
    """The last window may be shorter than a chunk of the convolutions, which then goes on with zeros."""
    encoder, sizes = tiny().built["audio_encoder"].module, config().audio
    sound = noise(seconds, 4).astype(np.float32)[None] / 32768
    (whole,) = encoder(audio=[torch.from_numpy(sound)])["embeds"]
    windows = [torch.from_numpy(frames) for frames, _ in sound_windows(sound, sizes.mel_bins, sizes.window)]
    continues = np.arange(len(windows))[:, None] > 0
    parts = encoder(audio=windows, continues=continues)["embeds"]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-5)


def grown(served: Counted, talk: Talk, sound: np.ndarray, outputs: Sequence[str] = SPOKEN) -> None:
    """Read the completed windows of a sound ahead, as it grows."""
    step = int(WINDOW_S * RATE)
    for end in range(step, len(sound) - MARGIN, step):
        ahead = replace(talk, media=list(talk.media), texts=list(talk.texts), turns=list(talk.turns))
        outcome, _, _ = served.ask(ahead.ask(wav(sound[: end + MARGIN])).request(outputs), reads_only=True)
        assert outcome.status == "finished" and not outcome.items and not any(outcome.outputs.values())


@pytest.mark.parametrize("outputs", [SPOKEN, WRITTEN])
@pytest.mark.parametrize("seconds", [5.5, 4.3])
def test_the_end_of_speech_leaves_one_window(seconds: float, outputs: tuple[str, ...]) -> None:
    served, talk, sound = Counted(), Talk(), noise(seconds, 5)
    first, _, _ = served.ask(talk.ask(picture(1), "What is this?").request(outputs))
    talk.answered(ids_of(first))
    grown(served, talk, sound, outputs)
    request = talk.ask(wav(sound)).request(outputs)
    outcome, prompt, cached = served.ask(request)
    assert served.runs["audio_encoder"] == 1 and not served.runs["vision_encoder"]
    tail = prompt - cached
    assert tail <= 13 * (seconds % WINDOW_S + 0.1) + 2 * PAGE, "the last window, the end of the template, and a page"
    fresh = Counted()
    whole, _, none = fresh.ask(request)
    assert none == 0 and fresh.runs["audio_encoder"] == 3
    require_same(outcome, whole)
    unsplit, _, _ = Counted().ask(replace(request, reads_windows=False))
    require_same(outcome, unsplit)


def test_windows_that_a_louder_place_has_changed_are_read_again() -> None:
    served, sound = Counted(), noise(7.0, 6)
    sound[RATE // 5 : RATE] //= 400  # near the floor
    sound[-RATE // 2 :] = (sound[-RATE // 2 :].astype(int) * 30).clip(-32768, 32767)
    grown(served, Talk(), sound)
    request = Talk().ask(wav(sound)).request()
    outcome, _, _ = served.ask(request)
    assert 1 < served.runs["audio_encoder"] <= 4
    fresh, _, _ = Counted().ask(request)
    require_same(outcome, fresh)
    keys = [[key for _, key in sound_windows(each, 128, 200)] for each in (sound_of(sound), sound_of(sound[:-RATE]))]
    changed = [one != other for one, other in zip(*keys, strict=False)]
    assert changed[0] and served.runs["audio_encoder"] == 1 + sum(changed[:3])


def sound_of(samples: np.ndarray) -> np.ndarray:
    return samples.astype(np.float32)[None] / 32768


@pytest.mark.parametrize("turns", [1, 3, 6, 12])
def test_reading_ahead_that_is_cancelled_holds_nothing(turns: int) -> None:
    served, sound = Counted(), noise(5.5, 7)
    served.runtime.api.reads_only = True
    call = served.runtime.send(Talk().ask(wav(sound[: int(4 * RATE) + MARGIN])).request())
    for _ in range(turns):
        served.runtime.step()
    served.runtime.cancel(call)
    served.runtime.run()
    assert served.runtime.leaks() == [] and not call.items
    request = Talk().ask(wav(sound)).request()
    outcome, _, _ = served.ask(request)
    require_same(outcome, Counted().ask(request)[0])
