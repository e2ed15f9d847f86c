"""Processor of V-JEPA 2: clips to pixels and token ids, latents to bytes. Runs in the api's pool; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from mstar_vjepa2.checkpoint.config import BaseConfig, read_base
from mstar_vjepa2.checkpoint.files import has_pooler
from mstar_vjepa2.program import CLIP, EARLIER
from mstar_vjepa2.request.answers import check_wire, missing_media, sent_as_video
from mstar_vjepa2.request.frame_sampling import Sampling, spread
from mstar_vjepa2.request.media import read_image, read_video
from mstar_vjepa2.request.tensors import clip_of, is_plain_clip
from mstar_vjepa2.request.transforms import cropped

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_vjepa2.params import Params

    Array = npt.NDArray[Any]

MOST_ID: Final = 2**24
"""Ids below this have exact frame, row and column numbers in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clip:
    """Pixels of a request: uint8 or normalised float32 [F, 3, crop, crop]. rate: frames per second, 0 = unknown."""

    pixels: Array
    rate: float = 0.0
    notes: Sequence[str] = ()


class Processor:
    """Processor of V-JEPA 2. Created once per pool process."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "vjepa2")
        self._config: BaseConfig = read_base(folder)
        self._has_pooler = has_pooler(folder)

    inline_bytes: Final = 256 << 20
    """See InlineProcessor. Pixels are views of the upload and are not copied."""

    def warm_up(self) -> None:
        """See InlineProcessor. Nothing is loaded lazily."""

    def is_inline(self, request: PromptRequest) -> bool:
        """Whether the request is a clip in the encoder's own format, used whole, without long lists."""
        params: Params = request.params
        if len(request.media) != 1 or request.text or params.context_mask or params.target_mask:
            return False
        if params.num_frames is not None or params.fps is not None:
            return False
        return is_plain_clip(request.media[0], self._config.encoder)

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return the pixels and the other inputs of the task. Raises RequestError naming the field."""
        params: Params = request.params
        check_wire(params, request.outputs)
        task = params.chosen_task(request.outputs)
        self._check_task(task, params)
        if EARLIER in request.outputs and (params.layers is not None or params.pooling != "none"):
            field = "layers" if params.layers is not None else "pooling"
            raise RequestError(f"{field} has no effect on video", hint="request tensor instead of video", field=field)
        clip = self._clip(request.media, params)
        tokens = self._config.encoder.tokens(len(clip.pixels))
        if request.max_seq_len and tokens > request.max_seq_len:
            raise _too_long(len(clip.pixels), tokens, request.max_seq_len)
        arrays: dict[str, Array] = {CLIP: clip.pixels}
        if task == "encode" and params.layers is not None:
            arrays["layers"] = np.asarray(params.layers, dtype=np.int64)
        if task in ("predict", "rollout"):
            arrays |= self._masks(task, params, clip, tokens)
        return Inputs(
            arrays=arrays,
            prompt_tokens=tokens,
            warnings=list(clip.notes),
            metadata=self._metadata(tokens),
            usage=_usage(arrays, tokens, params.steps if task == "rollout" else 0),
        )

    def postprocess(self, output: Array, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return latents as float32 bytes, for requests with output modality `video`."""
        return sent_as_video(output)

    def _metadata(self, tokens: int) -> dict[str, dict[str, Any]]:
        """Return the metadata of every tensor: picture size, and tokens by time, row and column."""
        encoder = self._config.encoder
        grid = [tokens // encoder.frame_tokens, encoder.grid, encoder.grid]
        return {"tensor": {"crop": encoder.crop, "grid": grid}}

    # -- task --------------------------------------------------------------------------------------

    def _check_task(self, task: str, params: Params) -> None:
        wants_pooler = task == "classify" or (task == "encode" and params.pooling == "attentive")
        if wants_pooler and not self._has_pooler:
            field = "task" if task == "classify" else "pooling"
            raise RequestError(
                f"{field} {task if task == 'classify' else 'attentive'} needs a classifier checkpoint",
                "this checkpoint has no pooler",
                "use pooling mean, or serve a checkpoint such as ssv2",
                field=field,
            )
        if params.layers is not None:
            self._check_layers(task, params)

    def _check_layers(self, task: str, params: Params) -> None:
        most = self._config.encoder.vit.layers
        if params.layers == ():
            raise RequestError("layers is empty", hint="name at least one layer, or omit it", field="layers")
        wrong = next((layer for layer in params.layers or () if layer > most), None)
        if wrong is not None:
            raise RequestError(
                f"layers contains {wrong}, this encoder has {most} blocks",
                hint=f"0 (patches) to {most}",
                field="layers",
                value=str(wrong),
                allowed=f"0 to {most}",
            )
        if params.pooling == "attentive" or task != "encode":
            raise RequestError("layers is only for task encode without attentive pooling", field="layers")

    # -- media --------------------------------------------------------------------------------------------------

    def _clip(self, media: Sequence[MediaPart], params: Params) -> _Clip:
        if not media:
            raise missing_media("video")
        kinds = {part.modality for part in media}
        if kinds == {"image"}:
            return self._chosen(media, params)
        if len(media) > 1:
            raise RequestError(
                f"{len(media)} files were sent",
                hint="send one video, one tensor, or several images in order",
                field="video",
            )
        match media[0].modality:
            case "video":
                return self._video(media[0], params)
            case "tensor":
                return self._tensor(media[0], params)
            case other:
                raise RequestError(f"vjepa2 does not accept {other}", hint="send a video", field=other)

    def _video(self, part: MediaPart, params: Params) -> _Clip:
        sampling = self._sampling(params)
        crop = self._config.encoder.crop
        clip = read_video(
            part, lambda total, rate: spread(total, sampling.count(total, rate)), lambda frame: cropped(frame, crop)
        )
        taken = len(clip.frames)
        notes = sampling.notes(clip.total, taken, self._config.encoder.tubelet)
        return _Clip(pixels=np.stack(clip.frames), rate=clip.rate * taken / clip.total, notes=notes)

    def _chosen(self, media: Sequence[MediaPart], params: Params) -> _Clip:
        """Return a clip whose frames are images, in order."""
        sampling = self._sampling(params)
        chosen = spread(len(media), sampling.count(len(media), 0.0))
        frames = [cropped(read_image(media[index]), self._config.encoder.crop) for index in chosen]
        notes = [] if len(media) == 1 else sampling.notes(len(media), len(frames), self._config.encoder.tubelet)
        return _Clip(pixels=np.stack(frames), notes=notes)

    def _tensor(self, part: MediaPart, params: Params) -> _Clip:
        """Return the uploaded frames. A tensor is sampled only if num_frames or fps is given."""
        pixels = clip_of(part, self._config.encoder)
        if params.num_frames is None and params.fps is None:
            return _Clip(pixels=pixels)
        chosen = spread(len(pixels), self._sampling(params).count(len(pixels), 0.0))
        return _Clip(pixels=np.ascontiguousarray(pixels[list(chosen)]))

    def _sampling(self, params: Params) -> Sampling:
        return Sampling(num_frames=params.num_frames, fps=params.fps, default=self._config.encoder.clip_frames)

    # -- masks --------------------------------------------------------------------------------------------------

    def _masks(self, task: str, params: Params, clip: _Clip, tokens: int) -> dict[str, Array]:
        """Return the ids that the predictor sees and the ids that it predicts.

        By default a rollout predicts one latent frame per step, starting after the clip and its anticipation time.
        """
        if params.context_mask is not None and params.target_mask is not None:
            return {
                "context_mask": _ids(params.context_mask, tokens, "context_mask"),
                "target_mask": _ids(params.target_mask, MOST_ID, "target_mask"),
            }
        every = np.arange(tokens, dtype=np.int64)
        if task == "predict":
            return {"context_mask": every, "target_mask": every}
        start = tokens + self._anticipated_ids(params, clip)
        frame = self._config.encoder.frame_tokens
        return {"context_mask": every, "target_mask": np.arange(start, start + frame, dtype=np.int64)}

    def _anticipated_ids(self, params: Params, clip: _Clip) -> int:
        """Return the number of ids between the clip and the first predicted frame."""
        if not params.anticipation_s:
            return 0
        rate = params.fps or clip.rate
        if not rate > 0:
            raise RequestError(
                "anticipation_s needs a clip with a known frame rate",
                hint="send a video, or fps",
                field="anticipation_s",
            )
        encoder = self._config.encoder
        return encoder.frame_tokens * int(params.anticipation_s * rate / encoder.tubelet)


def _usage(arrays: Mapping[str, Array], tokens: int, steps: int) -> dict[str, int]:
    """Return the usage: encoder tokens, predictor tokens and rollout steps."""
    seen = sum(len(arrays[name]) for name in ("context_mask", "target_mask") if name in arrays)
    usage = {"encoder_tokens": tokens, "predictor_tokens": seen * max(1, steps)}
    return {**usage, "steps": steps} if steps else usage


def _ids(values: Sequence[int], limit: int, field: str) -> Array:
    ids = np.asarray(values, dtype=np.int64)
    if int(ids.max()) >= limit:
        raise RequestError(
            f"{field} contains token {int(ids.max())}, allowed are 0 to {limit - 1}",
            hint="ids are numbered frame by frame, row by row",
            field=field,
            value=str(int(ids.max())),
            allowed=f"0 to {limit - 1}",
        )
    return ids


def _too_long(frames: int, tokens: int, limit: int) -> TooLarge:
    return TooLarge(
        f"{frames} frames make {tokens} tokens and this deployment takes {limit}",
        hint="send a smaller num_frames",
        field="num_frames",
        value=str(frames),
        allowed=str(limit),
    )
