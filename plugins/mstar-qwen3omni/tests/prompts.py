"""Requests for the processor: golden cases as tensor uploads, and positions of all segments in a row."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from mstar_core.plugin.processor import MediaPart, PromptRequest, SegmentInputs
from mstar_qwen3omni.params import Params

SPEAKS = frozenset({"text", "audio"})
WRITES = frozenset({"text"})


def npy(array: np.ndarray) -> MediaPart:
    """Return an array as an uploaded npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return MediaPart(modality="tensor", data=file.getvalue(), name="array.npy")


def tensors_of(case: dict[str, np.ndarray]) -> list[MediaPart]:
    """Return the encoder inputs of a golden case, in prompt order: image before audio, video before its sound."""
    made: list[np.ndarray] = []
    for pixels, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        if f"in.{pixels}" in case:
            made += [case[f"in.{pixels}"], case[f"in.{grid}"][0]]
    if "in.input_features" in case:
        made.append(case["in.input_features"][0][:, : int(case["in.feature_attention_mask"].sum())])
    return [npy(array) for array in made]


def case_request(case: dict[str, np.ndarray], outputs: frozenset[str] = SPEAKS, **params: Any) -> PromptRequest:
    """Return the request of a golden case: its ids, and its media as tensors."""
    seconds = float(case["in.video_second_per_grid"][0]) if "in.video_second_per_grid" in case else 1.0
    given = Params(prompt_token_ids=tuple(case["in.input_ids"].tolist()), fps=2.0 / seconds, **params)
    return PromptRequest(text=None, media=tensors_of(case), params=given, outputs=outputs, max_seq_len=4096)


def placed(segments: Sequence[SegmentInputs], tokens: str = "tokens", positions: str = "positions") -> np.ndarray:
    """Return the positions of all tokens as the engine counts them: given ones, else one more than the greatest."""
    made, top = [], 0.0
    for segment in segments:
        ids = segment.arrays.get(tokens)
        if ids is None:
            continue
        given = segment.arrays.get(positions)
        here = np.broadcast_to(top + np.arange(len(ids)), (3, len(ids))) if given is None else given
        made.append(here)
        top = max(top, float(here.max()) + 1)
    return np.concatenate(made, axis=1) if made else np.zeros((3, 0))


def talker_placed(segments: Sequence[SegmentInputs]) -> np.ndarray:
    """Return the talker's positions of the whole prompt, media included."""
    shares = []
    for segment in segments:
        name = "talker_tokens" if segment.kind == "text" else "tokens"
        arrays = {"tokens": segment.arrays[name]} if name in segment.arrays else {}
        if "talker_positions" in segment.arrays:
            arrays["positions"] = segment.arrays["talker_positions"]
        shares.append(SegmentInputs(kind=segment.kind, arrays=arrays))
    return placed(shares)
