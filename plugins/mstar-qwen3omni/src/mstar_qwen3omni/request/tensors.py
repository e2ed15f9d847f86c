"""Ready-made encoder inputs of a request: mel frames, patches and grids, uploaded as tensors in prompt order."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import BadMedia, RequestError
from mstar_core.plugin.processor import MediaPart, content_key
from mstar_qwen3omni.checkpoint.config import PATCH_FRAMES, OmniConfig
from mstar_qwen3omni.request.media import Media, picture_media, sound_media, video_media
from mstar_qwen3omni.request.positions import Grid
from mstar_qwen3omni.request.segments import pad_runs

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Indices = npt.NDArray[np.int64]

FIELD: Final = "files"


def read_media(ids: Indices, files: Sequence[MediaPart], config: OmniConfig, fps: float) -> list[Media]:
    """Return the media of each run of pads, from the tensors in order.

    A run of audio pads takes mel frames [bins, f] or samples [1, s]; image or video pads take patches [p, values] and
    their grid [3] (time, height, width in patches); a video with sound takes patches, grid and mel frames. fps: rate
    of the video frames. Raises BadMedia for an unreadable tensor, RequestError for missing, misshapen or further ones.
    """
    arrays = _arrays(files)
    runs = pad_runs(ids, config.ids)
    media = [_keyed(_medium(set(ids[start:end].tolist()), arrays, config, fps)) for start, end in runs]
    rest = next(arrays, None)
    if rest is not None:
        raise RequestError(
            "the request has more tensors than its prompt has media",
            hint="send the tensors of each run of pads only",
            field=FIELD,
        )
    return media


def _medium(pads: set[int], arrays: Iterator[Array], config: OmniConfig, fps: float) -> Media:
    ids = config.ids
    if pads == {ids.audio_pad}:
        return sound_media(_sound(arrays, config), config)
    pixels, grid = _seen(arrays, config)
    if pads == {ids.image_pad}:
        return picture_media(pixels, grid, config)
    if ids.image_pad in pads:
        raise RequestError(
            "image pads of prompt_token_ids touch other pads",
            hint="put <|vision_end|> between them",
            field="prompt_token_ids",
        )
    timed = Grid(pairs=grid.pairs, rows=grid.rows, columns=grid.columns, pair_ticks=PATCH_FRAMES / fps * config.ticks)
    return video_media(pixels, timed, config, _sound(arrays, config) if ids.audio_pad in pads else None)


def _keyed(medium: Media) -> Media:
    """Add the key of the encoder inputs."""
    values = [part for name, array in medium.arrays.items() for part in (name, str(array.dtype), array.tobytes())]
    grid = medium.grid.pair_ticks if medium.grid is not None else None
    return replace(medium, content=content_key("tensor", medium.kind, grid, *values))


def _sound(arrays: Iterator[Array], config: OmniConfig) -> Array:
    sound = _next(arrays, "mel frames of a sound")
    bins = config.audio.mel_bins
    if sound.ndim != 2 or sound.shape[0] not in (1, bins) or not sound.shape[1]:
        raise _misshapen(sound, f"mel frames [{bins}, f] or samples [1, s]")
    return np.ascontiguousarray(sound, dtype=np.float32)


def _seen(arrays: Iterator[Array], config: OmniConfig) -> tuple[Array, Grid]:
    sizes = config.vision
    pixels = _next(arrays, "patches of an image or video")
    if pixels.ndim != 2 or pixels.shape[1] != sizes.patch_values or not pixels.shape[0]:
        raise _misshapen(pixels, f"patches [p, {sizes.patch_values}]")
    grid = _next(arrays, "a grid").reshape(-1)
    merge = sizes.merge
    is_grid = grid.dtype.kind in "iu" and grid.shape == (3,) and bool((grid > 0).all())
    if not is_grid or grid[1] % merge or grid[2] % merge:
        raise _misshapen(grid, f"a grid of 3 integers, the last two multiples of {merge}")
    pairs, height, width = (int(value) for value in grid)
    if pairs * height * width != len(pixels):
        raise RequestError(
            f"the grid {pairs} x {height} x {width} has {pairs * height * width} patches and the tensor {len(pixels)}",
            hint="send the grid of these patches",
            field=FIELD,
        )
    if pixels.dtype != np.uint8:
        pixels = pixels.astype(np.float32, copy=False)
    return np.ascontiguousarray(pixels), Grid(pairs=pairs, rows=height // merge, columns=width // merge)


def _next(arrays: Iterator[Array], what: str) -> Array:
    array = next(arrays, None)
    if array is None:
        raise RequestError(
            f"the request lacks {what}",
            hint="upload a .npy file per tensor, in the order of the prompt",
            field=FIELD,
            code="missing_field",
        )
    return array


def _misshapen(array: Array, allowed: str) -> RequestError:
    shape = f"{array.dtype.name} {list(array.shape)}"
    return RequestError(f"a tensor is {shape}, expected {allowed}", field=FIELD, value=shape, allowed=allowed)


def _arrays(files: Sequence[MediaPart]) -> Iterator[Array]:
    for number, part in enumerate(files):
        if part.modality != "tensor":
            raise RequestError(
                f"file {number} is {part.modality}, but prompt_token_ids takes tensors",
                hint="send .npy files, or text in place of prompt_token_ids",
                field=FIELD,
            )
        yield _array(part.data, number)


def _array(data: bytes, number: int) -> Array:
    try:
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        count = math.prod(shape)
        # Checked against the file's size before memory is allocated for the claimed shape.
        if dtype.kind not in "fiu" or count * dtype.itemsize != len(data) - file.tell():
            raise ValueError(f"its header says {shape} of {dtype}, which does not match its data")
        flat = np.frombuffer(data, dtype=dtype, count=count, offset=file.tell())
        array: Array = flat.reshape(shape, order="F" if is_fortran else "C")
    except Exception as error:  # numpy raises any exception on damaged data
        raise BadMedia(
            f"file {number} contains no readable array",
            f"{type(error).__name__}: {error}",
            "send .npy files",
            field=FIELD,
            value=f"file {number}",
        ) from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(f"file {number} contains a value that is not finite", field=FIELD)
    return array
