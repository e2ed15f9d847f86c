"""Processor of BAGEL: interleaved text and images to segments, pixels to PNG. Runs in the api's pool, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_bagel.checkpoint.config import read_sizes
from mstar_bagel.graph import MARKERS
from mstar_bagel.params import guidance
from mstar_bagel.program import GUIDED, IMAGE, SYSTEM
from mstar_bagel.request.images import fitted_size, resize, resized_size
from mstar_bagel.request.prompt import THINK_TO_ANSWER, THINK_TO_PAINT, PromptIds
from mstar_bagel.request.schedule import phases
from mstar_bagel.request.tokenizer import TextStream, TextTokenizer
from mstar_core.errors import RequestError
from mstar_core.plugin import PARTIAL_IMAGE
from mstar_core.plugin.media.bands import Bands
from mstar_core.plugin.media.images import encode_image, read_image
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.params import lowered_warnings
from mstar_core.plugin.processor import Inputs, KeptMedia, PromptRequest, SegmentInputs, content_key

if TYPE_CHECKING:
    from PIL import Image

    from mstar_bagel.params import Guidance, Params
    from mstar_core.constraints.vocabulary import TokenTable

TEXT: Final = "text"
SIZES: Final = "sizes"
TIMES: Final = "times_"
"""Prefix of the inputs with flow times."""

CHATML: Final = "chatml"
DIRECT: Final = "vllm"
"""`image_preprocess` of servers that resize an image once for the image encoder."""


@dataclass(frozen=True, slots=True)
class _Read:
    """The prompt's segments, and the size of the last input image after the first rule. kept: see `Inputs.kept`."""

    segments: list[SegmentInputs]
    image_size: tuple[int, int] | None
    kept: dict[int, KeptMedia]

    @property
    def tokens(self) -> int:
        return sum(segment.length for segment in self.segments)


class Processor:
    """Processor of one checkpoint. Created once per pool process."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "bagel")
        self._sizes = read_sizes(folder)
        self._folder = folder
        self._tokenizer: TextTokenizer | None = None
        self._step_cache = float(model_kwargs.get("step_cache", 0))
        self._bands = Bands()

    @property
    def tokenizer(self) -> TextTokenizer:
        """The checkpoint's tokenizer, read at first use."""
        if self._tokenizer is None:
            self._tokenizer = TextTokenizer(self._folder)
        return self._tokenizer

    def warm_up(self) -> None:
        """See WarmedProcessor: read the tokenizer."""
        self.tokenizer.encode("Hello")

    def detokenizer(self) -> TextStream:
        """Return a detokenizer for one answer."""
        return TextStream(self.tokenizer)

    def token_table(self) -> TokenTable:
        """Return the bytes of the ids of text, for grammars."""
        return self.tokenizer.token_table(self._sizes.language.vocab, (self._sizes.ids.end,))

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return segments and arrays of a request. Raises RequestError with the field name for invalid input."""
        params: Params = dataclasses.replace(request.params, **request.template)  # thinking by `reasoning_effort`
        paints = IMAGE in request.outputs
        self._check(request, params, paints=paints)
        read = self._read(request, params, paints=paints)
        arrays: dict[str, np.ndarray] = {}
        ids, opening = self._sizes.ids, [self._sizes.ids.start]
        if paints:
            partial = params.partial_images if PARTIAL_IMAGE in request.outputs else 0
            arrays |= self._painted(params, read.image_size, partial)
            if params.think_mode:
                arrays |= {"start": np.array([ids.start]), "end": np.array([ids.end])}
        elif params.prompt_format == CHATML:
            *header, last = PromptIds(self.tokenizer, ids).answer()
            read.segments.append(_text_segment(header))
            opening = [last]
        inputs = self._limited(request, params, read, arrays, paints=paints)
        return inputs if paints else dataclasses.replace(inputs, segments=_closed(read.segments, opening))

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return an image as PNG with its size. output: uint8 [y, x, 3]."""
        from PIL import Image

        height, width = output.shape[:2]
        return encode_image(Image.fromarray(np.ascontiguousarray(output))), {"width": width, "height": height}

    # -- prompt ----------------------------------------------------------------------------------------------------

    def _read(self, request: PromptRequest, params: Params, *, paints: bool) -> _Read:
        prompt = PromptIds(self.tokenizer, self._sizes.ids)
        segments: list[SegmentInputs] = []
        size: tuple[int, int] | None = None
        kept: dict[int, KeptMedia] = {}
        if params.think_mode:
            segments.append(_text_segment(prompt.text(THINK_TO_PAINT if paints else THINK_TO_ANSWER), SYSTEM))
        for role, modality, index in _parts(request):
            if modality == IMAGE:
                segment, size = self._image(request, params, request.number_of(IMAGE, index), kept, paints=paints)
                segments.append(segment)
            elif text := request.text_at(index):
                is_chat = params.prompt_format == CHATML
                segments.append(_text_segment(prompt.message(role, text) if is_chat else prompt.text(text)))
        return _Read(segments, size, kept)

    def _image(
        self, request: PromptRequest, params: Params, number: int, kept: dict[int, KeptMedia], *, paints: bool
    ) -> tuple[SegmentInputs, tuple[int, int]]:
        """Read an image, unless an earlier request of the session has. number: in the request's media."""
        part, made = request.media[number], request.media[number].kept
        if made is None and not request.keeps_media:
            arrays = self._decoded(part.data, request, params, paints=paints)
        else:
            key = content_key("image", part.data, params.image_preprocess, paints)
            if made is None or made.content != key:
                made = KeptMedia(content=key, arrays=self._decoded(part.data, request, params, paints=paints))
                if request.keeps_media:
                    kept[number] = made
            arrays = dict(made.arrays)
        length, width, height = (int(value) for value in arrays.pop(SIZES))
        return SegmentInputs(kind=IMAGE, arrays=arrays, length=length), (width, height)

    def _decoded(self, data: bytes, request: PromptRequest, params: Params, *, paints: bool) -> dict[str, np.ndarray]:
        """Return the pixels of an image for each encoder, and SIZES: its tokens, and its size after the first rule."""
        original, is_direct = read_image(data, request.limits), params.image_preprocess == DIRECT
        first = resized_size(original.size, self._sizes.vae_rule)
        is_final = resized_size(first, self._sizes.vae_rule) == first
        if is_final and not paints and not is_direct:
            return self._unresized(original, first)
        return self._resized(original, first, paints=paints, is_direct=is_direct)

    def _unresized(self, image: Image.Image, first: tuple[int, int]) -> dict[str, np.ndarray]:
        """Return the pixels of an image, channels last, for the encoder to resize. first: size after the first rule.

        The first rule shrinks a large image here, because all of its pixels would take longer to carry.
        """
        from PIL import Image as Pillow

        if max(image.size) > self._sizes.vae_rule.longest:
            image = Pillow.merge("RGB", self._bands.map(image, lambda band: resize(band, self._sizes.vae_rule)))
        width, height = resized_size(first, self._sizes.vit_rule)
        patch = self._sizes.vision.patch
        length = width // patch * (height // patch) + MARKERS
        return {"vit_image": np.asarray(image), SIZES: np.array([length, *first])}

    def _resized(
        self, original: Image.Image, size: tuple[int, int], *, paints: bool, is_direct: bool
    ) -> dict[str, np.ndarray]:
        """Return the resized pixels, channels first, for each encoder. size: after the first rule."""
        sizes = self._sizes

        def resized(band: Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
            first = resize(band, sizes.vae_rule)
            seen = resize(band if is_direct else first, sizes.vit_rule)
            return np.asarray(seen), np.asarray(resize(first, sizes.vae_rule)) if paints else None

        bands = self._bands.map(original, resized)
        seen = np.stack([band for band, _ in bands])
        arrays, length = {"vit_image": seen}, _tokens(seen, sizes.vision.patch)
        if paints:
            arrays["vae_image"] = clean = np.stack([band for _, band in bands if band is not None])
            length += _tokens(clean, sizes.token_pixels)
        return {**arrays, SIZES: np.array([length, *size])}

    def _check(self, request: PromptRequest, params: Params, *, paints: bool) -> None:
        parts = _parts(request)
        has_text = any(modality == TEXT and request.text_at(index).strip() for _, modality, index in parts)
        if not has_text and (paints or not request.media):
            code = "missing_field" if request.text is None else "invalid_value"
            what = "describe the image" if paints else "send a text or an image"
            raise RequestError("text is empty", hint=what, field="text", code=code)
        odd = next((part for part in request.media if part.modality != IMAGE), None)
        if odd is not None:
            raise RequestError(f"{odd.modality} is not an input of this model", hint="send images", field="files")
        if paints and params.prompt_format == CHATML:
            raise RequestError(
                "prompt_format chatml cannot make an image",
                "the layout has no place for one",
                "use reference",
                field="prompt_format",
                value=CHATML,
                allowed="reference",
            )

    # -- image -----------------------------------------------------------------------------------------------------

    def _painted(self, params: Params, source_size: tuple[int, int] | None, partial: int) -> dict[str, np.ndarray]:
        """Return the arrays of the image to make. source_size: of the last input image; partial: partial images."""
        sizes = self._sizes
        width, height = self._size(params, source_size)
        guide = guidance(params, is_edit=source_size is not None)
        rows, columns = height // sizes.token_pixels, width // sizes.token_pixels
        return {
            "grid": np.zeros((rows, columns), dtype=np.uint8),
            "guidance": np.array([*guide.numbers(), params.num_timesteps - 1], dtype=np.float32),
            **phases(params.num_timesteps, params.timestep_shift, guide, partial, self._cached(params)),
        }

    def _cached(self, params: Params) -> float:
        """Return the share of steps without a forward pass."""
        return self._step_cache if params.step_cache is None else params.step_cache

    def _size(self, params: Params, source_size: tuple[int, int] | None) -> tuple[int, int]:
        sizes, longest = self._sizes, self._sizes.longest_side
        for name, side in (("width", params.width), ("height", params.height)):
            if side is not None and (side > longest or side % sizes.token_pixels):
                allowed = f"a multiple of {sizes.token_pixels} up to {longest}"
                raise RequestError(
                    f"{name} is {side}, allowed is {allowed}",
                    "this checkpoint's position table ends there",
                    field=name,
                    value=str(side),
                    allowed=allowed,
                )
        if source_size is None:
            return params.image_size(longest)
        return fitted_size(source_size, (params.width, params.height), sizes.token_pixels)

    # -- limits ----------------------------------------------------------------------------------------------------

    def _limited(
        self, request: PromptRequest, params: Params, read: _Read, arrays: dict[str, np.ndarray], *, paints: bool
    ) -> Inputs:
        limit = min(request.max_seq_len or self._sizes.language.max_positions, self._sizes.language.max_positions)
        writes = params.think_mode or not paints
        closing = 2 if paints and writes else 1  # the start id, and the end id of a thought
        room = limit - read.tokens - (closing if writes else 0)
        if room < (1 if writes else 0):
            raise RequestError(
                f"the prompt has {read.tokens} tokens and the context {limit}",
                _told(read.segments),
                "send fewer or smaller images, or a shorter text",
                field="text",
                code="context_length_exceeded",
                value=str(read.tokens),
                allowed=f"< {limit}",
            )
        warnings: list[str] = []
        usage: dict[str, int] = {}
        if paints:
            guide = guidance(params, is_edit=read.image_size is not None)
            is_guided = any(name.startswith(GUIDED) for name in arrays)
            usage = {"guidance": int(is_guided), "image_guidance": int(is_guided and guide.image_scale > 1)}
            if self._cached(params):
                usage["computed_steps"] = sum(len(table) for name, table in arrays.items() if name.startswith(TIMES))
            warnings += _without_effect(params, guide, is_guided=is_guided)
        if not paints:
            return Inputs(
                arrays=arrays,
                segments=read.segments,
                kept=read.kept,
                prompt_tokens=read.tokens,
                max_output_tokens=min(params.max_output_tokens, room),
                warnings=warnings,
            )
        thought = min(params.max_think_tokens, room) if writes else 0
        if writes:
            warnings += lowered_warnings(params, "max_think_tokens", thought)
        # The conductor reserves cache for max_output_tokens: here the thought and the ids around it.
        changed = dataclasses.replace(
            params, max_think_tokens=max(1, thought), max_output_tokens=thought + closing if writes else 1
        )
        return Inputs(
            arrays=arrays,
            segments=read.segments,
            kept=read.kept,
            prompt_tokens=read.tokens,
            params=changed,
            usage=usage,
            warnings=warnings,
        )


def _without_effect(params: Params, guide: Guidance, *, is_guided: bool) -> list[str]:
    """Return a warning for each setting of guidance that the request's other settings switch off."""
    if is_guided:
        return []
    if guide.is_on:
        return [f"the image has no guidance: no step lies in cfg_interval ({guide.low}, {guide.high}]"]
    if params.cfg_img_scale is not None and params.cfg_img_scale > 1:
        return ["cfg_img_scale has no effect: a cfg_text_scale of at most 1 switches guidance off"]
    return []


def _parts(request: PromptRequest) -> list[tuple[str, str, int]]:
    """Return role, modality and index of each part of the prompt, in order."""
    if request.turns:
        return [(turn.role, modality, index) for turn in request.turns for modality, index in turn.order]
    order: Sequence[tuple[str, int]] = request.order
    if not order:
        images = [(IMAGE, index) for index in range(len(request.media))]
        order = [*images, *([(TEXT, 0)] if request.text else [])]
    return [("user", modality, index) for modality, index in order]


def _text_segment(ids: list[int], kind: str = TEXT) -> SegmentInputs:
    return SegmentInputs(kind=kind, arrays={"tokens": np.array(ids, dtype=np.int64)}, length=len(ids))


def _closed(segments: Sequence[SegmentInputs], opening: list[int]) -> list[SegmentInputs]:
    """Return the segments of a prompt with one behind its last image: all texts there and the opening of the answer.

    One pass reads them and draws the first id. opening: ids from which the answer is decoded.
    """
    count = len(segments)
    while count and segments[count - 1].kind != IMAGE:
        count -= 1
    texts = [token for segment in segments[count:] for token in segment.arrays["tokens"].tolist()]
    return [*segments[:count], _text_segment([*texts, *opening])]


def _tokens(image: np.ndarray, pixels: int) -> int:
    """Return the tokens of an image with its markers. image: [3, y, x]."""
    _, height, width = image.shape
    return int(height // pixels) * int(width // pixels) + MARKERS


def _told(segments: Sequence[SegmentInputs]) -> str:
    counts: dict[str, int] = {}
    for segment in segments:
        counts[segment.kind] = counts.get(segment.kind, 0) + segment.length
    return ", ".join(f"{kind}: {count}" for kind, count in counts.items())
