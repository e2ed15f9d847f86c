"""Answers of `transformers` to the same recordings, for the gold checks. A development tool: no process serves with it.

The library computes spectrogram, states, logits and the rules of ids. Windows follow each other as in section 4.5 of
the paper on Whisper (Radford et al. 2022). Every step reads all ids again, without a cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from mstar_core.plugin.check.reference import ReferenceRequest, greedy_ids
from mstar_core.plugin.conformance import CheckSkipped

RATE: Final = 16_000
FRAME_S: Final = 0.01
FRAMES_PER_STATE: Final = 2


def reference(folder: Path, request: ReferenceRequest) -> Mapping[str, npt.NDArray[Any]]:
    """Return {"text" or "token": ids, "segments": records of `text.record`}, of all windows in order.

    Raises CheckSkipped for a request with random draws, voice activity, or earlier windows as context.
    """
    params = request.params
    for is_asked, what in (
        (params.temperature > 0, "a temperature above 0"),
        (params.vad, "voice activity"),
        (params.condition_on_previous, "the text of earlier windows as context"),
    ):
        if is_asked:
            raise CheckSkipped(f"the reference of whisper does not compute {what}")
    with torch.inference_mode():
        return _Recording(folder, request).answer()


class _Recording:
    """One request. Owned by the call of `reference`."""

    def __init__(self, folder: Path, request: ReferenceRequest) -> None:
        self._facts, self._params, self._outputs = request.facts, request.params, request.outputs
        # Eager attention alone returns its weights, which align ids with the sound.
        self._model: Any = WhisperForConditionalGeneration.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._known: Any = self._model.generation_config
        self._window = FRAMES_PER_STATE * self._model.config.max_source_positions
        self._mel = _spectrum(folder, request.arrays["pcm"])
        self._is_timed = self._params.timestamps or self._mel.shape[-1] > self._window
        self._first_time = self._known.no_timestamps_token_id + 1
        self._language: int | None = request.facts["language"]

    def answer(self) -> dict[str, npt.NDArray[Any]]:
        """Return the values of the ports that go to the client."""
        is_streamed = self._params.incremental and not self._params.fallback
        ids, records, seek = list[int](), list[float](), 0
        while seek < self._mel.shape[-1]:
            frames = min(self._window, self._mel.shape[-1] - seek)
            drawn, scores, weights = self._decoded(seek, frames)
            written = drawn[:-1] if drawn[-1] == self._end else drawn
            kept, step = self._kept(written, frames)
            ids += drawn if is_streamed else written[:kept]
            records += [seek * FRAME_S, frames, 0.0, *scores, self._language or 0, kept, *written[:kept], *weights]
            seek += step or frames
        text = {"token" if is_streamed else "text": np.array(ids)} if "text" in self._outputs else {}
        return text | ({"segments": np.array(records, dtype=np.float32)} if "segments" in self._outputs else {})

    @property
    def _end(self) -> int:
        end: int | list[int] = self._known.eos_token_id
        return end[0] if isinstance(end, list) else end

    def _decoded(self, seek: int, frames: int) -> tuple[list[int], Sequence[float], list[float]]:
        """Return the drawn ids of a window; mean log-probability, compression, silence; and what each id listens to."""
        sound = pad(self._mel[:, :, seek : seek + frames], (0, self._window - frames))
        states = self._model.get_encoder()(sound)
        if self._language is None:
            self._language = int(self._model.detect_language(encoder_outputs=states)[0])
        prompt = self._prompt()
        rules = self._rules(len(prompt))
        read: Callable[..., Any] = lambda ids, **options: self._model(  # noqa: E731
            encoder_outputs=states, decoder_input_ids=torch.tensor([ids]), use_cache=False, **options
        )

        def logits(written: list[int]) -> npt.NDArray[Any]:
            ids = [*prompt, *written]
            allowed: npt.NDArray[Any] = rules(torch.tensor([ids]), read(ids).logits[:, -1])[0].numpy()
            return allowed

        limit = min(self._params.max_output_tokens, self._model.config.max_target_positions - len(prompt))
        ends = () if self._params.ignore_eos else (self._end,)
        drawn = greedy_ids(logits, ends=ends, limit=limit)
        if not self._params.fallback and "segments" not in self._outputs:
            return drawn, (0.0, 0.0, 0.0), []
        whole = [*prompt, *drawn]
        found = read(whole, output_attentions=True)
        total = sum(
            float(rules(torch.tensor([whole[:at]]), found.logits[:, at - 1]).log_softmax(-1)[0, whole[at]])
            for at in range(len(prompt), len(whole))
        )
        first = prompt.index(self._known.decoder_start_token_id)
        silence = float(found.logits[0, first].softmax(-1)[self._known.no_timestamps_token_id - 1])
        mean, ratio = total / len(drawn), _compression(drawn)
        if self._params.fallback and (
            mean < self._params.logprob_threshold or ratio > self._params.compression_threshold
        ):
            raise CheckSkipped("the reference of whisper does not draw a poor window again")
        wants_words = self._params.words and "segments" in self._outputs
        # The last id is not read, so it listens to nothing.
        rows = slice(len(prompt), len(whole) - 1)
        heard = self._heard(found.cross_attentions, rows, frames // FRAMES_PER_STATE) if wants_words else []
        return drawn, (mean, ratio, silence), heard

    def _prompt(self) -> list[int]:
        """Return earlier text, at most half of the context, then the start and the forced ids."""
        known, earlier = self._known, list(self._facts["prompt"])
        most = self._model.config.max_target_positions // 2 - 1
        before = [known.prev_sot_token_id, *earlier[-most:]] if earlier else []
        spoken = [self._language, known.task_to_id[self._params.task]] if known.is_multilingual else []
        form = [] if self._is_timed else [known.no_timestamps_token_id]
        return [*before, known.decoder_start_token_id, *spoken, *form]

    def _rules(self, begin: int) -> LogitsProcessorList:
        """Return the library's rules of ids. begin: ids of the prompt."""
        known = self._known
        rules = LogitsProcessorList()
        if never := [number for number in known.suppress_tokens or () if number >= 0]:
            rules.append(SuppressTokensLogitsProcessor(never))
        if known.begin_suppress_tokens:
            rules.append(SuppressTokensAtBeginLogitsProcessor(known.begin_suppress_tokens, begin))
        if self._is_timed:
            rules.append(WhisperTimeStampLogitsProcessor(known, begin_index=begin))
        return rules

    def _kept(self, written: Sequence[int], frames: int) -> tuple[int, int]:
        """Return the number of ids that count, and the frames after which the next window begins."""
        is_time = [number >= self._first_time for number in written]
        pairs = [at for at in range(1, len(written)) if is_time[at - 1] and is_time[at]]
        if not pairs or is_time[-2:] == [False, True]:
            return len(written), frames
        # Text behind the last pair is cut off by the end of the window: the next one begins in front of it.
        return pairs[-1] + 1, FRAMES_PER_STATE * (written[pairs[-1] - 1] - self._first_time)

    def _heard(self, attentions: Sequence[Tensor], rows: slice, states: int) -> list[float]:
        """Return the smoothed mean of the alignment heads, [ids, states], flat. Source: token timestamps of Whisper."""
        heads = torch.stack([attentions[layer][0, head, rows, :states] for layer, head in self._known.alignment_heads])
        if not heads.shape[1]:
            return []
        heads = (heads - heads.mean(-2, keepdim=True)) / heads.std(-2, keepdim=True, unbiased=False)
        heads = heads.nan_to_num()  # a single id
        width = self._model.config.median_filter_width
        if states > width // 2:
            heads = pad(heads, (width // 2, width // 2), mode="reflect").unfold(-1, width, 1).median(-1).values
        flat: list[float] = heads.mean(0).flatten().tolist()
        return flat


def _spectrum(folder: Path, samples: npt.NDArray[np.float32]) -> Tensor:
    """Return the library's features, [1, bins, frames], at least one window."""
    extractor: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
    is_long = len(samples) > extractor.n_samples
    options: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
    features: Tensor = extractor(samples, sampling_rate=RATE, return_tensors="pt", **options).input_features
    return features


def _compression(ids: Sequence[int]) -> float:
    """Return the bytes of ids over those of their compressed form. Each id of Whisper has two bytes."""
    data = np.array(ids, dtype="<u2").tobytes()
    return len(data) / len(zlib.compress(data))
