"""Processor of Wan 2.2: texts to ids, images to pixels, settings to a table of steps. Runs in the api's pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin import PARTIAL_IMAGE
from mstar_core.plugin.media.images import encode_image, read_image
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.processor import Inputs, PromptRequest
from mstar_wan22.checkpoint.config import read_sizes
from mstar_wan22.program import step_inputs
from mstar_wan22.request.images import AREA, best_size, fitted
from mstar_wan22.request.schedule import Column, folded, step_table
from mstar_wan22.request.tokenizer import PromptTokenizer
from mstar_wan22.request.usual import read_usual

if TYPE_CHECKING:
    from PIL.Image import Image

    from mstar_wan22.params import Params

NEGATIVE: Final = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
"""Negative prompt of requests without one. Source: the official repository."""


class Processor:
    """Processor of one checkpoint. Created once per pool process."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "wan22")
        self._sizes = read_sizes(folder)
        self._usual = read_usual(folder, self._sizes)
        self._tokenizer = PromptTokenizer(folder)
        given = model_kwargs.get("negative_prompt")
        self._negative = NEGATIVE if given is None else str(given)
        self._step_cache = float(model_kwargs.get("step_cache", 0))

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return the arrays of a request. Raises RequestError with the field name for invalid input."""
        params: Params = request.params
        images = [read_image(part.data, request.limits) for part in self._images(request)]
        if not (request.text or "").strip():
            raise RequestError("text is empty", hint="describe the video", field="text", code="missing_field")
        ids = self._tokenizer.ids(request.text or "")
        arrays: dict[str, np.ndarray] = {"tokens": np.array(ids, dtype=np.int64), "memory": np.zeros(0, np.float32)}
        width, height = self._size(params, images)
        arrays["grid"] = self._grid(params, width, height, request.max_seq_len)
        first, second = self._scales(params)
        if first > 1:
            negative = self._negative if params.negative_prompt is None else params.negative_prompt
            arrays["negative_tokens"] = np.array(self._tokenizer.ids(negative), dtype=np.int64)
        for name, image in zip(("image", "last_image"), images, strict=False):
            arrays[name] = fitted(image, (width, height), is_stretched=params.image_fit == "stretch")
        previews = params.partial_images if PARTIAL_IMAGE in request.outputs else 0
        count = params.num_inference_steps or self._usual.steps
        frames = (len(arrays["grid"]) - 1) * self._sizes.vae.frames + 1
        fps = params.fps or self._usual.fps
        cached = self._step_cache if params.step_cache is None else params.step_cache
        tables = self._steps(params, count, (first, second), previews, cached)
        computed = {"computed_steps": sum(map(len, tables.values()))} if cached else {}
        return Inputs(
            arrays={**arrays, **tables},
            prompt_tokens=len(ids),
            metadata={"video": {"fps": fps, "frames": frames, "width": width, "height": height}},
            usage={"frames": frames, "steps": count, "guidance": int(first > 1), **computed},
        )

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return frames as raw RGB bytes, or a preview as PNG. output: uint8 [F, height, width, 3], or one frame."""
        if modality == "video":
            facts = {"shape": list(output.shape), "dtype": "uint8", "format": "raw"}
            return np.ascontiguousarray(output).tobytes(), facts
        from PIL import Image

        height, width = output.shape[:2]
        return encode_image(Image.fromarray(np.ascontiguousarray(output))), {"width": width, "height": height}

    def _images(self, request: PromptRequest) -> list[Any]:
        sizes, count = self._sizes, len(request.media)
        most = 2 if sizes.takes_image else int(sizes.reads_image)
        if count > most:
            what = "a first and a last image at most" if most == 2 else f"{most} at most"
            raise RequestError(f"{count} images were sent", hint=what, field="image")
        if sizes.takes_image and not count:
            raise RequestError("image is missing", hint="this checkpoint animates images", field="image")
        return list(request.media)

    def _size(self, params: Params, images: list[Image]) -> tuple[int, int]:
        """Return width and height in pixels."""
        multiple, usual = self._sizes.side_multiple, self._usual
        if params.width is None or params.height is None:
            width, height = (side // multiple * multiple for side in (usual.width, usual.height))
            area = min(AREA, width * height)
            return best_size(images[0].size, multiple, area) if images else (width, height)
        for name, side in (("width", params.width), ("height", params.height)):
            if side % multiple:
                low = side // multiple * multiple
                raise _misfit(name, side, f"a multiple of {multiple}", max(multiple, low), low + multiple)
        return params.width, params.height

    def _grid(self, params: Params, width: int, height: int, limit: int) -> np.ndarray:
        """Return an array of the latents' shape, of which nothing but the shape is read."""
        sizes = self._sizes
        per_latent = sizes.vae.frames
        frames = params.num_frames
        if frames is None:
            fps, seconds = params.fps or self._usual.fps, params.seconds or self._usual.seconds
            frames = per_latent * round(seconds * fps / per_latent) + 1
        if (frames - 1) % per_latent:
            low = (frames - 1) // per_latent * per_latent + 1
            raise _misfit("num_frames", frames, f"one more than a multiple of {per_latent}", low, low + per_latent)
        patch, most = sizes.transformer.patch, sizes.transformer.max_positions
        grid = ((frames - 1) // per_latent + 1, height // sizes.vae.pixels, width // sizes.vae.pixels)
        tokens = grid[0] * (grid[1] // patch) * (grid[2] // patch)
        longest = max(grid[0], grid[1] // patch, grid[2] // patch)
        if (limit and tokens > limit) or longest > most:
            raise TooLarge(
                f"{frames} frames of {width} x {height} are {tokens} tokens",
                f"this deployment takes {limit}, and {most} along each axis",
                "send fewer frames or a smaller size, or raise max_seq_len",
                field="num_frames",
                value=str(tokens),
                allowed=str(limit),
            )
        return np.zeros(grid, dtype=np.uint8)

    def _scales(self, params: Params) -> tuple[float, float]:
        usual, first, second = self._usual.scales, params.guidance_scale, params.guidance_scale_2
        chosen = usual[0] if first is None else first
        return chosen, second if second is not None else (usual[1] if first is None else chosen)

    def _steps(
        self, params: Params, count: int, scales: tuple[float, float], previews: int, cached: float
    ) -> dict[str, np.ndarray]:
        """Return the tables of steps of each expert, cut behind the steps that a preview follows.

        cached: share of steps without a forward pass. A preview never divides steps that share one: it comes before.
        """
        shift = params.flow_shift or self._usual.shift
        table, first = step_table(count, shift, scales, self._sizes.boundary, params.sigma_grid, params.solver)
        cuts = sorted({round(count * number / (previews + 1)) for number in range(1, previews + 1)} - {0, count})
        found: dict[str, np.ndarray] = {}
        for expert, start, stop in (("high", 0, first), ("low", first, count)):
            rows = folded(table[start:stop], cached) if cached else table[start:stop]
            ends = [int((rows[:, Column.NUMBER] < cut).sum()) for cut in cuts if start < cut <= stop]
            begin = 0
            for name, end in zip(step_inputs(expert), sorted({*ends} - {0}), strict=False):
                found[name], begin = rows[begin:end], end
            if begin < len(rows):
                found[expert] = rows[begin:]
        return found


def _misfit(field: str, value: int, allowed: str, *nearest: int) -> RequestError:
    hint = f"use {' or '.join(str(number) for number in sorted(set(nearest)))}"
    title = f"{field} is {value}, allowed is {allowed}"
    return RequestError(title, hint=hint, field=field, value=str(value), allowed=allowed)
