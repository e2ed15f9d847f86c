"""Processor of Qwen3-Omni: conversations and media to prompt segments, outputs to bytes and text.

Runs in the api's process pool; the api itself detokenizes and prepares short text prompts. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import BadMedia, RequestError
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.media import read_image
from mstar_core.plugin.media.bands import Bands
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.params import lowered_warnings
from mstar_core.plugin.processor import Detokenizer, Inputs, KeptMedia, PromptRequest, content_key
from mstar_qwen3omni.checkpoint.config import PATCH_FRAMES, read_config
from mstar_qwen3omni.request.chat import SPOKEN_SYSTEM, ChatLayout, Prompt
from mstar_qwen3omni.request.images import PixelRange, grid_of, patches_of, resized, target_size
from mstar_qwen3omni.request.media import Media, picture_media, sound_media, video_media, windowed_sound
from mstar_qwen3omni.request.positions import Grid
from mstar_qwen3omni.request.segments import plain_text, split
from mstar_qwen3omni.request.sounds import read_samples
from mstar_qwen3omni.request.tensors import read_media
from mstar_qwen3omni.request.tokenizer import NumberDetokenizer, TextTokenizer, has_tokenizer, read_tokenizer
from mstar_qwen3omni.request.videos import Sampling, read_clip

if TYPE_CHECKING:
    from mstar_core.constraints.vocabulary import TokenTable
    from mstar_qwen3omni.params import Params

INLINE_CHARS: Final = 1024
"""Longest text that the api tokenizes itself, in about two milliseconds."""

INLINE_IDS: Final = 4096
MISSING: Final = "missing_field"

ANSWER_START: Final = 6
"""Talker tokens between the prompt and the first codec frame."""


class Processor:
    """Processor of Qwen3-Omni. Created once per pool process, and in the api. Raises WeightsError."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "qwen3_omni")
        self._folder = folder
        self._config = read_config(folder)
        self._tokenizer: TextTokenizer | None = None
        self._bands = Bands()

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return the prompt's segments and the output limits that the context leaves. Raises RequestError."""
        warnings: list[str] = []
        kept: dict[int, KeptMedia] = {}
        is_spoken = "audio" in request.outputs
        if is_spoken:
            self._check_speech(request.params)
        limit = min(request.max_seq_len or self._config.max_positions, self._config.max_positions)
        prompt = self._prompt(request, limit, warnings, kept)
        count = len(prompt.ids)
        check_room(count, limit)
        ids = np.asarray(prompt.ids, dtype=np.int64)
        if request.is_raw:
            segments = plain_text(ids, self._config.ids)
        else:
            segments = split(ids, prompt.media, self._config.ids, is_spoken=is_spoken)
        params = self._limited(request.params, limit - count, warnings, "max_output_tokens")
        if is_spoken:
            room = limit - segments.talker_tokens - ANSWER_START
            check_room(limit - room, limit)
            params = self._limited(params, room, warnings, "talker_max_tokens")
        return Inputs(
            segments=segments.inputs,
            prompt_tokens=count,
            params=params,
            max_output_tokens=params.max_output_tokens,
            warnings=warnings,
            kept=kept,
        )

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return sound as little-endian PCM16. output: int16, or float in [-1, 1]."""
        if output.dtype.kind == "f":
            output = (np.clip(output, -1, 1) * 32767).round()
        samples = np.ascontiguousarray(output, dtype="<i2").reshape(-1)
        return samples.tobytes(), {"samples": len(samples)}

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer. Without tokenizer files it writes ids as decimal numbers."""
        return (
            self.tokenizer.detokenizer() if has_tokenizer(self._folder) else NumberDetokenizer(self._config.ids.im_end)
        )

    def token_table(self) -> TokenTable:
        """Return the bytes of the thinker's ids, for grammars. Raises WeightsError without tokenizer files."""
        return self.tokenizer.token_table(self._config.thinker.vocab, (self._config.ids.im_end,))

    def warm_up(self) -> None:
        """Load the tokenizer."""
        if has_tokenizer(self._folder):
            self.tokenizer.encode("Hello")

    def is_inline(self, request: PromptRequest) -> bool:
        """Whether the request is a short text without media."""
        ids = request.params.prompt_token_ids
        count = len(request.ids or ids or ())
        return not request.media and request.size_bytes - 8 * len(request.ids) <= INLINE_CHARS and count <= INLINE_IDS

    def tokenize(self, request: PromptRequest, *, adds_special: bool) -> Sequence[int]:
        """Return the ids of a raw prompt, or of a conversation in the template. Raises RequestError."""
        if request.is_raw:
            return request.ids or self.tokenizer.encode_raw(request.text or "", adds_special=adds_special)
        return self._prompt(request, self._config.max_positions, [], {}).ids

    def spell(self, ids: Sequence[int]) -> Sequence[bytes]:
        """Return the text of each id in UTF-8. Raises RequestError for unknown ids."""
        return self.tokenizer.spell(ids)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The checkpoint's tokenizer, read at first use, because `prompt_token_ids` needs none."""
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._folder, sorted(self._config.ids.control))
        return self._tokenizer

    # -- prompt -------------------------------------------------------------------------------------------------------

    def _prompt(self, request: PromptRequest, limit: int, warnings: list[str], kept: dict[int, KeptMedia]) -> Prompt:
        if request.is_raw:
            return self._raw(request, limit)
        if request.params.prompt_token_ids is not None:
            if (request.text or "").strip():
                warnings.append("prompt_token_ids was given, so the text has no effect")
            return self._of_ids(request.params.prompt_token_ids, request, limit)
        if not request.media and not request.turns and not (request.text or "").strip():
            raise RequestError("the request has no input", hint="send a text or a file", field="text", code=MISSING)
        reader = MediaReader(self, request, limit, warnings, kept)
        turns: Sequence[Turn] = request.turns or (Turn(role="user", order=tuple(request.order)),)
        texts = list(request.texts) or ([request.text] if request.text else [])
        if "audio" in request.outputs and not any(turn.role == "system" for turn in turns):
            texts.append(SPOKEN_SYSTEM)
            turns = (Turn(role="system", order=(("text", len(texts) - 1),)), *turns)
        tools = request.tools if request.tool_choice.mode != "none" else ()
        return ChatLayout(self._config.ids, self.tokenizer.encode, texts.__getitem__, reader.read).write(turns, tools)

    def _raw(self, request: PromptRequest, limit: int) -> Prompt:
        """Return a prompt without a template."""
        tokens = list(self.tokenize(request, adds_special=True))
        self._check_ids(tokens, "ids" if request.ids else "text")
        return Prompt(tokens, [])

    def _check_ids(self, tokens: Sequence[int], field: str) -> None:
        vocab = self._config.thinker.vocab
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None or not tokens:
            allowed = f"ids from 0 to {vocab - 1}"
            title = f"{field} is empty" if wrong is None else f"{field} contains {wrong}"
            raise RequestError(title, f"allowed are {allowed}", field=field, allowed=allowed)

    def _of_ids(self, tokens: Sequence[int], request: PromptRequest, limit: int) -> Prompt:
        self._check_ids(tokens, "prompt_token_ids")
        check_room(len(tokens), limit, "prompt_token_ids")
        ids = np.asarray(tokens, dtype=np.int64)
        return Prompt(list(tokens), read_media(ids, request.media, self._config, request.params.fps))

    # -- limits -------------------------------------------------------------------------------------------------------

    def _check_speech(self, params: Params) -> None:
        if not self._config.has_speech:
            raise RequestError(
                "this checkpoint does not speak",
                "it has no talker",
                "request text only",
                field="modalities",
                code="unknown_modality",
            )
        if params.voice not in self._config.voices:
            allowed = ", ".join(sorted(self._config.voices))
            raise RequestError(
                f"this checkpoint has no voice {params.voice}",
                hint=f"use one of {allowed}",
                field="voice",
                value=params.voice,
                allowed=allowed,
            )

    def _limited(self, params: Params, room: int, warnings: list[str], name: str) -> Params:
        if getattr(params, name) <= room:
            return params
        warnings += lowered_warnings(params, name, room)
        lowered: dict[str, Any] = {name: room}
        return replace(params, **lowered)


class MediaReader:
    """Reads the files of one request as media. kept: see `Inputs.kept`; filled by `read`."""

    def __init__(
        self,
        processor: Processor,
        request: PromptRequest,
        limit: int,
        warnings: list[str],
        kept: dict[int, KeptMedia],
    ) -> None:
        self._config, self._bands, self._kept = processor._config, processor._bands, kept
        self._request, self._params = request, request.params
        self._limit, self._warnings = limit, warnings

    def read(self, modality: str, index: int, before: int) -> Media:
        """Read a file. before: ids of the prompt before it. Raises RequestError, BadMedia, TooLarge."""
        data, params = self._request.media_at(modality, index).data, self._params
        match modality:
            case "image":
                key = content_key("image", data, params.min_pixels, params.max_pixels)
                return replace(self._image(self._request.number_of(modality, index), key), content=key)
            case "audio":
                made = windowed_sound if self._request.reads_windows else sound_media
                media = made(read_samples(data, self._request.limits), self._config)
                return replace(media, content=content_key("audio", data))
            case "video":
                pixels = (params.video_min_pixels, params.video_max_pixels)
                key = content_key("video", data, *pixels, params.fps, self._most_frames, params.use_audio_in_video)
                return replace(self._video(data, before), content=key)
            case _:
                raise RequestError(
                    f"a {modality} file needs prompt_token_ids", hint="send image, audio or video files", field="files"
                )

    @property
    def _most_frames(self) -> int:
        return min(int(self._params.max_frames), self._request.limits.video_frames)

    def _image(self, number: int, key: bytes) -> Media:
        """Read an image, unless an earlier request of the session has. number: in the request's media."""
        part = self._request.media[number]
        if part.kept is not None and part.kept.content == key:
            pairs, rows, columns = (int(value) for value in part.kept.arrays["grid"])
            grid = Grid(pairs=pairs, rows=rows, columns=columns)
            return picture_media(part.kept.arrays["pixels"], grid, self._config)
        pixels, grid = self._pixels(part.data)
        if self._request.keeps_media:
            sides = np.array([grid.pairs, grid.rows, grid.columns])
            self._kept[number] = KeptMedia(content=key, arrays={"pixels": pixels, "grid": sides})
        return picture_media(pixels, grid, self._config)

    def _pixels(self, data: bytes) -> tuple[np.ndarray, Grid]:
        """Return a decoded image, uint8 [y, x, 3], which its encoder resizes, or patches of one that is too large."""
        params, sizes = self._params, self._config.vision
        image = read_image(data, self._request.limits)
        pixels = PixelRange(least=params.min_pixels, most=params.max_pixels)
        height, width = target_size(image.height, image.width, sizes.patch * sizes.merge, pixels)
        grid = grid_of(1, height, width, sizes)
        if image.width * image.height <= PATCH_FRAMES * height * width:  # no more bytes than its patches
            return np.asarray(image), grid
        return patches_of([resized(image, height, width, self._bands)], grid, sizes), grid

    def _video(self, data: bytes, before: int) -> Media:
        params, limits = self._params, self._request.limits
        clip = read_clip(
            data,
            limits,
            Sampling(fps=params.fps, most=self._most_frames),
            PixelRange(least=params.video_min_pixels, most=params.video_max_pixels),
            self._config.vision,
            self._config.ticks,
            lambda tokens: check_room(before + tokens, self._limit, hint=SHORTER_VIDEO),
        )
        return video_media(clip.patches, clip.grid, self._config, self._sound_of(data))

    def _sound_of(self, data: bytes) -> np.ndarray | None:
        if not self._params.use_audio_in_video:
            return None
        try:
            return read_samples(data, self._request.limits)
        except BadMedia as error:
            if error.code != "media_has_no_audio":
                raise
            self._warnings.append("a video has no sound, so use_audio_in_video has no effect on it")
            return None


SHORTER_VIDEO: Final = "send a shorter video, or lower fps, max_frames or video_max_pixels"


def check_room(count: int, limit: int, field: str = "messages", hint: str = "shorten the prompt or its media") -> None:
    """Raise RequestError if a prompt of `count` tokens leaves no room for output in a context of `limit`."""
    if count >= limit:
        raise RequestError(
            f"the prompt has {count} tokens or more, and the context {limit}",
            "at least one must be left for output",
            hint,
            field=field,
            value=str(count),
            allowed=f"< {limit}",
            code="context_length_exceeded",
        )
