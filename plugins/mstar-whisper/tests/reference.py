"""Random checkpoints in the official layout, the reference of `transformers` over them, and this plugin's answers."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from safetensors.torch import save_file
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.runtime import LocalRuntime, RuntimeSettings
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from mstar_whisper.checkpoint.config import RATE, WhisperConfig, read_config
from mstar_whisper.plugin import whisper
from mstar_whisper.processor import Processor
from mstar_whisper.sources.layout import Sizes, vocabulary, write_texts
from mstar_whisper.sources.tiny import random_weights

SIZES = Sizes(width=48, heads=3, mlp=96, encoder_layers=2, decoder_layers=2, states=50, positions=64)


def write_checkpoint(
    folder: Path, seed: int, sizes: Sizes = SIZES, end_bias: float = 3.0, time_bias: float = 0.0
) -> Path:
    """Write a random checkpoint. end_bias, time_bias: of the end's and of the timestamps' logits."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder, vocabulary(sizes.states), sizes)
    weights, config = random_weights(folder, seed), read_config(folder)
    embedding = weights["model.decoder.embed_tokens.weight"]
    embedding[config.ids.end, 0] = end_bias
    embedding[config.ids.first_time :, 0] = time_bias
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def melody(seconds: float, seed: int = 0) -> np.ndarray:
    """Return tones of random pitch with noise: float32 at 16 kHz, exact in 16 bits."""
    chance = np.random.default_rng(seed)
    count = round(seconds * RATE)
    pitch = np.repeat(chance.uniform(100, 900, count // 2000 + 1), 2000)[:count]
    sound = 0.4 * np.sin(np.cumsum(pitch) * (2 * math.pi / RATE)) + 0.05 * chance.standard_normal(count)
    exact: np.ndarray = (np.clip(sound, -0.99, 0.99) * 32767).astype(np.int16).astype(np.float32) / 32768
    return exact


def wav(samples: np.ndarray) -> MediaPart:
    file = io.BytesIO()
    soundfile.write(file, (samples * 32768).astype(np.int16), RATE, format="WAV", subtype="PCM_16")
    return MediaPart(modality="audio", data=file.getvalue(), name="speech.wav")


class Reference:
    """Model of `transformers` in float32, with attentions, for the times of words."""

    def __init__(self, folder: Path) -> None:
        self.model = WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # Its steps are tiny: several threads would only wait for each other.
        torch.set_num_threads(1)
        self.features = WhisperFeatureExtractor.from_pretrained(folder)

    def spectrum(self, samples: np.ndarray) -> torch.Tensor:
        """Return the features, [1, bins, frames]: one window, or those of a longer recording."""
        is_long = len(samples) > self.features.n_samples
        more: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
        found: torch.Tensor = self.features(samples, sampling_rate=RATE, return_tensors="pt", **more).input_features
        return found

    def generate(self, samples: np.ndarray, **options: Any) -> Any:
        """Return the result of the library's `generate`."""
        with torch.inference_mode():
            return self.model.generate(self.spectrum(samples), **options)


class Served:
    """This plugin over a checkpoint, in one process."""

    def __init__(
        self,
        folder: Path,
        settings: RuntimeSettings | None = None,
        ranks: int = 1,
        processor: type[Processor] = Processor,
    ) -> None:
        self.folder = folder
        self.config: WhisperConfig = read_config(folder)
        self.processor = processor(folder, {})
        self.runtime = LocalRuntime(
            whisper(self.config), folder, settings or RuntimeSettings(), processor=self.processor, ranks=ranks
        )

    def ask(self, *sounds: np.ndarray, outputs: tuple[str, ...] = ("text",), **params: Any) -> list[RequestOutcome]:
        """Transcribe recordings together."""
        base = SampleRequest(order=[("audio", 0)], outputs=outputs, params={"fallback": False, **params})
        answers = self.runtime.ask(*(replace(base, media=(wav(sound),), name="clip") for sound in sounds))
        assert all(answer.status == "finished" for answer in answers), [answer.cause for answer in answers]
        return answers

    def ids(self, sound: np.ndarray, **params: Any) -> list[int]:
        """Return the ids of one recording."""
        (answer,) = self.ask(sound, **params)
        return ids_of(answer)

    def parts(self, sound: np.ndarray, count: int, **params: Any) -> list[RequestOutcome]:
        """Transcribe `count` parts of a recording together, as the api does. Needs the processor `InParts`."""
        base = SampleRequest(
            order=[("audio", 0)],
            outputs=("text", "segments"),
            params={"fallback": False, "batch_size": count, **params},
            media=(wav(sound),),
            name="part",
        )
        answers = self.runtime.ask(*(replace(base, seed=number) for number in range(count)))
        assert all(answer.status == "finished" for answer in answers), [answer.cause for answer in answers]
        return answers

    def joined(self, answers: Sequence[RequestOutcome]) -> list[dict[str, Any]]:
        """Return the segments of answers, in order."""
        records = [array for answer in answers for array in answer.of("segments")]
        return [
            each for one in records for each in json.loads(self.processor.postprocess(one, "segments")[0])["segments"]
        ]

    def segments(self, sound: np.ndarray, **params: Any) -> dict[str, Any]:
        """Return the joined segments of one recording."""
        (answer,) = self.ask(sound, outputs=("text", "segments"), **params)
        parts = [json.loads(self.processor.postprocess(array, "segments")[0]) for array in answer.of("segments")]
        return {
            "language": parts[0]["language"] if parts else "",
            "segments": [each for part in parts for each in part["segments"]],
            "words": [each for part in parts for each in part["words"]],
        }

    def text_of(self, file: bytes) -> str:
        """Return the text of an encoded recording."""
        part = MediaPart(modality="audio", data=file, name="speech")
        request = SampleRequest(
            name="file", order=[("audio", 0)], outputs=("text",), params={"language": "en"}, media=(part,)
        )
        return self.processor._tokens.text(ids_of(self.runtime.ask(request)[0]))


class InParts(Processor):
    """A processor whose request is the part that its seed names."""

    def process_prompt(self, request: PromptRequest) -> Inputs:
        return super().process_prompt(request).part(request.seed)


def ids_of(answer: RequestOutcome) -> list[int]:
    """Return the ids of text of an answer, streamed or not."""
    return [int(number) for array in answer.of("text") or answer.of("token") for number in array]
