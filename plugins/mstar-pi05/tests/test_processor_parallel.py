"""Cameras that are decoded separately from their request: equal arrays, equal errors, and the selection of files."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mstar_core.errors import BadMedia
from mstar_core.plugin import parse_params
from mstar_core.plugin.observation import packed
from mstar_core.plugin.processor import MediaPart, ParallelDecodeProcessor, PromptRequest
from mstar_pi05.params import Params
from mstar_pi05.processor import Processor

SIDE = 28
STATE = [0.1, -0.2, 0.3, 0.0, 0.5, -0.5, 0.25, 0.75]


def picture(width: int = SIDE, height: int = SIDE, form: str = "PNG", mode: str = "RGB") -> MediaPart:
    file = io.BytesIO()
    Image.effect_noise((width, height), 60).convert(mode).save(file, form)
    return MediaPart(modality="image", data=file.getvalue())


def array(*shape: int, kind: str = "|u1") -> MediaPart:
    file = io.BytesIO()
    np.save(file, np.zeros(shape, kind))
    return MediaPart(modality="tensor", data=file.getvalue())


def asked(*files: MediaPart, **params: Any) -> PromptRequest:
    given = {"robot_state": STATE, **params}
    params_ = parse_params(Params, {name: value for name, value in given.items() if value is not None}).params
    return PromptRequest(text="pick it up", media=files, params=params_, seed=3, max_seq_len=1024)


def read(processor: Processor, request: PromptRequest) -> PromptRequest:
    """The request as a pool makes it: files of one modality, so a place is a number."""
    media = list(request.media)
    for place in processor.parallel_files(request):
        media[place] = processor.decode_file(media[place], place)
    return replace(request, media=media)


@pytest.fixture
def processor(tiny_folder: Path) -> Processor:
    made = Processor(tiny_folder, {})
    made.warm_up()
    return made


def test_the_pool_takes_it_for_one_whose_files_are_read_apart(processor: Processor) -> None:
    assert isinstance(processor, ParallelDecodeProcessor)


@pytest.mark.parametrize(
    "request_",
    [
        asked(picture(), picture(), picture()),
        asked(picture(64, 48), picture(20, 90, "JPEG"), picture(mode="L")),
        asked(picture(), picture(), image_mask=[True, True, False]),
    ],
    ids=["of its size", "of any size", "two of three"],
)
def test_read_apart_is_read_the_same(processor: Processor, request_: PromptRequest) -> None:
    ready = read(processor, request_)
    actual, same = processor.process_prompt(ready), processor.process_prompt(request_)
    assert all(np.array_equal(actual.arrays[name], same.arrays[name]) for name in same.arrays)
    assert {name: each.dtype for name, each in actual.arrays.items()} == {n: a.dtype for n, a in same.arrays.items()}
    assert processor.is_inline(ready), "the api prepares it now"


@pytest.mark.parametrize(
    ("request_", "places"),
    [
        (asked(picture(), picture()), [0, 1]),
        (asked(array(8, kind="<f8"), picture(), picture(), robot_state=None), [1, 2]),
        (asked(picture(), array(10, 32, kind="<f4"), picture()), [0, 2]),
        (asked(picture(), array(SIDE, SIDE, 3)), []),
        (asked(picture(), picture(), array(9, 9, 3)), []),
        (asked(picture(), MediaPart(modality="tensor", data=b"\x93NUMPY")), []),
        (asked(picture(), picture(), picture(), image_mask=[False, True, True]), []),
        (asked(picture(), picture(), image_mask=[True, True, False]), [0, 1]),
        (asked(picture(), picture(), image_mask=[True]), [0, 1]),
        (replace(asked(), observation=packed({})), []),
    ],
)
def test_cameras_that_are_all_files_and_count_are_read_apart(
    processor: Processor, request_: PromptRequest, places: list[int]
) -> None:
    assert list(processor.parallel_files(request_)) == places


def test_the_tensor_way_keeps_its_floats_in_one_process(tiny_folder: Path) -> None:
    assert not Processor(tiny_folder, {"resize": "tensor"}).parallel_files(asked(picture(40, 20), picture(40, 20)))


def test_a_damaged_file_is_refused_in_the_same_words(processor: Processor) -> None:
    request = asked(picture(), MediaPart(modality="image", data=picture().data[:90]))
    told = []
    for way in (lambda: processor.process_prompt(request), lambda: read(processor, request)):
        with pytest.raises(BadMedia) as caught:
            way()
        told.append((str(caught.value), caught.value.detail, caught.value.facts))
    assert told[0] == told[1]
