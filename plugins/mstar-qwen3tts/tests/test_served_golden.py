"""All cases of a checkpoint at once through conductor, scheduler and engines: the samples of the reference."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin.processor import MediaPart
from mstar_qwen3tts.plugin import mstar_models
from mstar_qwen3tts.voice.encoder import CodecEncoder
from mstar_qwen3tts.voice.speaker import SpeakerEncoder

from .driver import NAMES
from .golden_set import CASES, FOLDER, Case

PCM = 3
"""Largest difference of a 16-bit sample: the codec's limit, and rounding."""


def request(case: Case) -> SampleRequest:
    """Return a case as a client sends it, greedy and with its number of frames."""
    call = {NAMES.get(name, name): value for name, value in case.call.items() if name not in ("method", "text")}
    media: tuple[MediaPart, ...] = ()
    if call.pop("ref_audio", None):
        file = io.BytesIO()
        soundfile.write(file, case.recording.numpy(), 24000, format="WAV", subtype="FLOAT")
        media = (MediaPart(modality="audio", data=file.getvalue()),)
    params = {"do_sample": False, "subtalker_dosample": False, "max_output_tokens": len(case.tensors["codes"])}
    return SampleRequest(
        text=case.call["text"],
        media=media,
        order=[*([("audio", 0)] if media else []), ("text", 0)],
        params=call | params,
        outputs=("audio",),
        name=case.name,
    )


@pytest.mark.parametrize("folder", ["custom_voice", "base"])
def test_cases_served_together_sound_like_the_reference(folder: str) -> None:
    cases = [case for case in map(Case, CASES) if case.folder.name == folder and case.kind is None]
    if not cases:
        pytest.skip(f"the set has no cases of {folder}")
    model = next(
        spec for spec in mstar_models() if spec.name == ("qwen3_tts_base" if folder == "base" else "qwen3_tts")
    )
    runtime = LocalRuntime(model.bound(FOLDER / folder, {}), FOLDER / folder)
    for case, outcome in zip(cases, runtime.ask(*map(request, cases)), strict=True):
        assert outcome.status == "finished", outcome.cause
        pcm = np.concatenate(outcome.of("pcm")).astype(np.int32)
        expected = (case.tensors["waveform"].flatten().numpy() * 32767).round().astype(np.int32)
        # The reference may cut one sample less than whole frames of a recording.
        assert abs(pcm - expected[-len(pcm) :]).max() <= PCM, case.name


def test_a_voice_is_encoded_once_and_its_codec_state_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in map(Case, CASES) if case.is_clone and case.call.get("ref_text") and case.kind is None]
    if not cases:
        pytest.skip("the set has no cloned voice with its text")
    case, runs = cases[0], dict[str, int]()

    def counted(kind: type[Any], name: str) -> None:
        method = getattr(kind, name)

        def run(self: Any, *args: Any) -> Any:
            runs[kind.__name__] = runs.get(kind.__name__, 0) + 1
            return method(self, *args)

        monkeypatch.setattr(kind, name, run)

    counted(CodecEncoder, "forward")
    counted(SpeakerEncoder, "forward")
    (model,) = (spec for spec in mstar_models() if spec.name == "qwen3_tts_base")
    runtime = LocalRuntime(model.bound(case.folder, {}), case.folder)
    features = runtime.workers[0].executor.features
    ask = request(case)  # once: a file of soundfile holds the time
    (first,) = runtime.ask(ask)
    assert runs == {"CodecEncoder": 1, "SpeakerEncoder": 1}
    made = features.misses
    (second,) = runtime.ask(ask)
    assert first.outputs == second.outputs
    assert runs == {"CodecEncoder": 1, "SpeakerEncoder": 1} and features.misses == made
