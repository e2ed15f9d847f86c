"""A long video prompt for Qwen3-Omni as ids and patches, so that no video decoder is needed."""

from __future__ import annotations

import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.sources.tiny import write_tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPrompt:
    """A prompt with one video. ids: of the whole prompt; files: patches and grid as `.npy` uploads."""

    ids: tuple[int, ...]
    files: dict[str, bytes]

    def body(self, text_tokens: int, seed: int) -> dict[str, Any]:
        """Return the form of a request for an answer in text."""
        params = {
            "prompt_token_ids": self.ids,
            "max_output_tokens": text_tokens,
            "ignore_eos": True,
            "seed": seed,
            "fps": 2.0,
        }
        return {"output_modalities": "text", "stream_events": "full", "model_kwargs": params}


def video_prompt(tokens: int, *, is_tiny: bool) -> VideoPrompt:
    """Return a prompt of about this many video tokens, of random pixels. is_tiny: for the miniature."""
    config = _config(is_tiny=is_tiny)
    ids, sizes = config.ids, config.vision
    side = 2 if is_tiny else 16
    pairs = max(1, tokens // side**2)
    grid = np.array([pairs, side * sizes.merge, side * sizes.merge], dtype=np.int64)
    pixels = np.random.default_rng(1).integers(0, 256, (int(grid.prod()), sizes.patch_values), dtype=np.uint8)
    line_break = config.thinker.vocab // 2 if is_tiny else 198
    pads = [ids.video_pad] * (pairs * side**2)
    prompt = (
        ids.im_start,
        ids.user,
        line_break,
        ids.vision_start,
        *pads,
        ids.vision_end,
        ids.im_end,
        line_break,
        ids.im_start,
        ids.assistant,
        line_break,
    )
    return VideoPrompt(ids=prompt, files={"pixels.npy": _npy(pixels), "grid.npy": _npy(grid)})


def _config(*, is_tiny: bool) -> OmniConfig:
    if not is_tiny:
        return OmniConfig()
    with tempfile.TemporaryDirectory() as scratch:
        return read_config(write_tiny(Path(scratch) / "tiny"))


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
