"""Processor of V-JEPA 2: valid requests to arrays, and errors for invalid ones."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin import parse_params
from mstar_core.plugin.processor import InlineProcessor, Inputs, MediaPart, PromptRequest
from mstar_vjepa2.params import Params
from mstar_vjepa2.processor import Processor

from .conftest import film, npy, picture

CROP, FRAME, CLIP = 32, 16, 8
"""Sizes of the tiny checkpoint: pixels per side, tokens of a latent frame, frames of a clip."""

PIXELS = "pixel_values_videos"


@pytest.fixture(scope="module")
def processor(tiny_base: Path) -> Processor:
    return Processor(tiny_base, {})


def ask(processor: Any, *media: MediaPart, outputs: str = "tensor", limit: int = 18432, **params: Any) -> Inputs:
    request = PromptRequest(
        text=None,
        media=media,
        params=parse_params(Params, params).params,
        outputs=frozenset({outputs}),
        max_seq_len=limit,
    )
    made: Inputs = processor.process_prompt(request)
    return made


def refused(processor: Any, *media: MediaPart, **params: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        ask(processor, *media, **params)
    return error.value


def floats(frames: int = 4, **more: Any) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((frames, 3, CROP, CROP)).astype(np.float32, **more)


def test_a_video_travels_as_bytes(processor: Processor) -> None:
    actual = ask(processor, film(20))
    pixels = actual.arrays[PIXELS]
    assert (pixels.dtype, pixels.shape) == (np.uint8, (CLIP, 3, CROP, CROP))
    expected = [20 * (index * 20 // CLIP) % 256 for index in range(CLIP)]
    assert np.abs(pixels.mean(axis=(1, 2, 3)) - expected).max() < 8
    assert actual.prompt_tokens == CLIP // 2 * FRAME
    assert list(actual.warnings) == []


def test_a_short_clip_is_taken_whole_and_that_is_said(processor: Processor) -> None:
    actual = ask(processor, film(5))
    assert len(actual.arrays[PIXELS]) == 4
    assert "5 frames" in actual.warnings[0] and "4 of them" in actual.warnings[0]


def test_an_odd_number_is_as_asked_and_its_last_frame_is_said_to_be_lost(processor: Processor) -> None:
    actual = ask(processor, film(9), num_frames=7)
    assert len(actual.arrays[PIXELS]) == 7 and actual.prompt_tokens == 3 * FRAME
    assert "last 1" in actual.warnings[0]


def test_frames_by_their_rate(processor: Processor) -> None:
    assert len(ask(processor, film(30, rate=30), fps=6).arrays[PIXELS]) == 6
    assert refused(processor, film(6, rate=30), fps=60).field == "fps"
    assert refused(processor, film(6), num_frames=7).field == "num_frames"


def test_images_are_frames_in_order(processor: Processor) -> None:
    one = ask(processor, picture())
    assert one.arrays[PIXELS].shape == (1, 3, CROP, CROP) and one.prompt_tokens == FRAME and not one.warnings
    three = ask(processor, picture(), picture(50, 50), picture(32, 90), num_frames=2)
    assert three.arrays[PIXELS].shape == (2, 3, CROP, CROP)


@pytest.mark.parametrize("shape", [(4, 3, CROP, CROP), (1, 4, 3, CROP, CROP)])
def test_tensors_skip_preprocessing(shape: tuple[int, ...], processor: Processor) -> None:
    value = floats()
    actual = ask(processor, npy(value.reshape(shape))).arrays[PIXELS]
    assert actual.dtype == np.float32 and np.array_equal(actual, value)
    named = MediaPart(modality="tensor", data=save({"pixel_values_videos": value, "other": np.zeros(3)}))
    assert np.array_equal(ask(processor, named).arrays[PIXELS], value)
    assert ask(processor, npy(np.zeros((2, 3, CROP, CROP), np.uint8))).arrays[PIXELS].dtype == np.uint8


def object_array() -> MediaPart:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return MediaPart(modality="tensor", data=file.getvalue())


def altered(before: bytes, after: bytes) -> MediaPart:
    """Return pixels whose header is changed to another one of equal length."""
    data = npy(np.zeros((2, 3, CROP, CROP), np.uint8)).data
    assert before in data and len(before) == len(after)
    return MediaPart(modality="tensor", data=data.replace(before, after, 1))


@pytest.mark.parametrize(
    "part",
    [
        altered(b"(2, 3", b"(-1,3"),
        altered(b"(2, 3", b"(9, 3"),
        altered(b"NUMPY\x01", b"NUMPY\x09"),
        npy(np.full((2, 3, CROP, CROP), np.nan, np.float32)),
        npy(np.full((2, 3, CROP, CROP), 1e300)),
        npy(np.zeros((2, 3, CROP, CROP), np.int64)),
        npy(np.zeros((2, 3, CROP + 8, CROP), np.float32)),
        npy(np.zeros((2, 1, CROP, CROP), np.float32)),
        npy(np.zeros((0, 3, CROP, CROP), np.float32)),
        npy(np.zeros((2, 3, CROP, CROP), complex)),
        object_array(),
        MediaPart(modality="tensor", data=b"\x93NUMPY cut"),
        MediaPart(modality="tensor", data=b"\x08\0\0\0\0\0\0\0{bad"),
        MediaPart(modality="tensor", data=save({"a": floats(), "b": floats()})),
    ],
)
def test_a_tensor_that_is_no_clip_is_refused(part: MediaPart, processor: Processor) -> None:
    assert refused(processor, part).field == "tensor"


def test_what_cannot_be_looked_at_is_refused(processor: Processor) -> None:
    assert refused(processor).field == "video"
    assert refused(processor, film(4), film(4)).field == "video"
    assert refused(processor, MediaPart(modality="audio", data=b"RIFF")).field == "audio"


def test_too_many_tokens_for_the_deployment(processor: Processor) -> None:
    error = refused(processor, film(8), limit=3 * FRAME)
    assert isinstance(error, TooLarge) and error.field == "num_frames" and str(4 * FRAME) in error.title


def test_masks_are_all_tokens_unless_given(processor: Processor) -> None:
    actual = ask(processor, npy(floats()), task="predict").arrays
    assert actual["context_mask"].tolist() == actual["target_mask"].tolist() == list(range(2 * FRAME))
    inputs = ask(processor, npy(floats()), task="predict", context_mask=[3, 1], target_mask=[99]).arrays
    assert (inputs["context_mask"].tolist(), inputs["target_mask"].tolist()) == ([3, 1], [99])
    assert "context_mask" not in ask(processor, npy(floats())).arrays


def test_context_ids_lie_in_the_clip(processor: Processor) -> None:
    inside = {"task": "predict", "target_mask": [0]}
    assert refused(processor, npy(floats()), context_mask=[2 * FRAME], **inside).field == "context_mask"
    assert (
        refused(processor, npy(floats()), task="predict", context_mask=[0], target_mask=[2**24]).field == "target_mask"
    )


def test_a_rollout_predicts_the_frame_behind_the_clip(processor: Processor) -> None:
    actual = ask(processor, npy(floats()), task="rollout", horizon=2).arrays
    assert actual["target_mask"].tolist() == list(range(2 * FRAME, 3 * FRAME))
    later = ask(processor, film(8, rate=8), task="rollout", anticipation_s=1.0).arrays
    assert later["target_mask"][0] == 4 * FRAME + 4 * FRAME, "8 frames a second, 2 to a latent frame"
    assert refused(processor, npy(floats()), task="rollout", anticipation_s=1.0).field == "anticipation_s"


def test_layers_are_those_of_the_encoder(processor: Processor) -> None:
    assert ask(processor, npy(floats()), layers=[0, 2]).arrays["layers"].tolist() == [0, 2]
    for wrong in ([3], [0, 64], []):
        assert refused(processor, npy(floats()), layers=wrong).field == "layers"
    assert refused(processor, npy(floats()), layers=[1], task="predict").field == "layers"


def test_only_a_classifier_classifies(processor: Processor, base: Any, tmp_path: Path) -> None:
    from .conftest import lay_out

    bare = Processor(lay_out(tmp_path / "bare", base.json("config.json"), base.tensors("model")), {})
    assert refused(bare, npy(floats()), task="classify").field == "task"
    assert refused(bare, npy(floats()), pooling="attentive").field == "pooling"
    assert ask(processor, npy(floats()), task="classify").arrays


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"outputs": "video", "output_format": "npy", "task": "predict"}, "output_format"),
        ({"outputs": "video", "output_dtype": "bfloat16", "task": "predict"}, "output_dtype"),
        ({"outputs": "video", "return": ["latents"], "task": "predict"}, "return"),
        ({"outputs": "video", "pooling": "mean", "task": "encode"}, "pooling"),
    ],
)
def test_what_has_no_effect_on_video_is_refused(params: dict[str, Any], field: str, processor: Processor) -> None:
    assert refused(processor, npy(floats()), **params).field == field


@pytest.mark.parametrize("form", ["raw", "npy", "safetensors", "json"])
def test_every_form_of_numbers_can_be_asked_for(form: str, processor: Processor) -> None:
    actual = ask(processor, npy(floats()), output_format=form, output_dtype="float16")
    assert actual.metadata["tensor"] == {"crop": CROP, "grid": [len(floats()) // 2, CROP // 8, CROP // 8]}


def test_latents_as_video_are_bare_floats(processor: Processor) -> None:
    value = floats(1)[0].astype(np.float64)
    data, told = processor.postprocess(value, "video")
    assert data == value.astype("<f4").tobytes() and told == {"shape": [3, CROP, CROP], "dtype": "float32"}


def test_what_a_request_costs_is_told(processor: Processor) -> None:
    """Encoder tokens, predictor tokens, and steps."""
    clip, both = npy(floats()), 2 * 2 * FRAME
    assert ask(processor, clip).usage == {"encoder_tokens": 2 * FRAME, "predictor_tokens": 0}
    assert ask(processor, clip, task="predict").usage == {"encoder_tokens": 2 * FRAME, "predictor_tokens": both}
    rolled = {"encoder_tokens": 2 * FRAME, "predictor_tokens": 3 * 3 * FRAME, "steps": 3}
    assert ask(processor, clip, task="rollout", horizon=3).usage == rolled


def quick(processor: Processor, *media: MediaPart, **params: Any) -> bool:
    checked = Params(**params)
    return processor.is_inline(PromptRequest(text=None, media=media, params=checked, outputs=frozenset({"tensor"})))


def test_pixels_as_the_encoder_takes_them_are_handed_on_where_they_lie(processor: Processor) -> None:
    part = npy(np.arange(4 * 3 * CROP * CROP, dtype=np.uint8).reshape(4, 3, CROP, CROP))
    assert isinstance(processor, InlineProcessor) and quick(processor, part, pooling="mean")
    actual = ask(processor, part).arrays[PIXELS]
    whole = np.frombuffer(part.data, np.uint8)
    assert np.shares_memory(actual, whole) and np.array_equal(actual.ravel(), whole[-actual.size :])


def test_whatever_needs_a_pass_over_the_pixels_is_left_to_a_process(processor: Processor) -> None:
    pixels = np.zeros((4, 3, CROP, CROP), np.uint8)
    assert not quick(processor, npy(floats())) and not quick(processor, picture())
    assert not quick(processor, npy(pixels), num_frames=2) and not quick(processor, npy(pixels), fps=1.0)
    assert not quick(processor, npy(pixels), npy(pixels)) and not quick(processor, npy(np.asfortranarray(pixels)))
    assert not quick(processor, npy(pixels), context_mask=(1,), target_mask=(2,))
    assert not quick(processor, MediaPart(modality="tensor", data=b"\x93NUMPY cut"))


def test_arrays_by_columns_and_files_that_end_early_are_read_as_numpy_reads_them(processor: Processor) -> None:
    value = floats()
    assert np.array_equal(ask(processor, npy(np.asfortranarray(value))).arrays[PIXELS], value)
    cut = npy(value).data[:-4]
    assert refused(processor, MediaPart(modality="tensor", data=cut)).field == "tensor"
