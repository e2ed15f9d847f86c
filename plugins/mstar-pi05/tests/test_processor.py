"""Requests to arrays with the checkpoint's tokenizer and statistics, and every kind of invalid request."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mstar_core.errors import BadMedia, ConfigError, RequestError, WeightsError
from mstar_core.plugin import parse_params
from mstar_core.plugin.observation import packed
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from mstar_pi05.checkpoint.config import IMAGE
from mstar_pi05.params import Params
from mstar_pi05.processor import Processor
from mstar_pi05.request.prompt import pieces
from mstar_pi05.robots.statistics import find_statistics

STATE = [0.1, -0.2, 0.3, 0.0, 0.5, -0.5, 0.25, 0.75]
SIDE, PLACES = 28, 4


def png(width: int = 40, height: int = 20, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 60).convert(mode).save(file, "PNG")
    return file.getvalue()


def ask(
    processor: Processor,
    text: str | None = "pick up the red block",
    images: Sequence[bytes] = (b"",),
    seed: int = 3,
    room: int = 1024,
    **params: Any,
) -> Inputs:
    files = [MediaPart(modality="image", data=data or png()) for data in images]
    given = {"robot_state": STATE, **params}
    checked = parse_params(Params, {name: value for name, value in given.items() if value is not None}).params
    return processor.process_prompt(PromptRequest(text=text, media=files, params=checked, seed=seed, max_seq_len=room))


@pytest.fixture
def processor(tiny_folder: Path) -> Processor:
    return Processor(tiny_folder, {})


def test_a_request_becomes_the_graphs_arrays(processor: Processor) -> None:
    actual = ask(processor, images=[b"", b""])
    shapes = {name: (array.shape, array.dtype.name) for name, array in actual.arrays.items()}
    length = len(actual.arrays["tokens"])
    assert shapes == {
        "images": ((2, SIDE, SIDE, 3), "uint8"),
        "tokens": ((length,), "int64"),
        "noise": ((10, 32), "float32"),
        "scale": ((10, 32), "float32"),
        "offset": ((10, 32), "float32"),
    }
    assert actual.prompt_tokens == length and actual.warnings == []
    assert actual.arrays["tokens"][: 2 * PLACES].tolist() == [IMAGE] * 2 * PLACES


def test_the_prompt_holds_the_normalised_state_of_the_robots_own_values(processor: Processor) -> None:
    actual = ask(processor)
    low, high = (np.array([sign * (1 + 0.125 * i) + 0.25 for i in range(8)]) for sign in (-1, 1))
    normal = 2 * (np.array(STATE) - low) / (high - low + 1e-6) - 1
    expected = processor.tokenizer.encode(pieces("pick up the red block", normal))
    assert actual.arrays["tokens"][PLACES:].tolist() == expected
    assert expected[0] == 2 and expected.count(2) == 1 and 1 not in expected  # begins, and does not end


def test_a_state_can_be_padded_before_it_is_printed(tiny_folder: Path) -> None:
    """As in an earlier lerobot: zeros become bin 128."""
    plain, padded = (len(ask(Processor(tiny_folder, {"pad_state": pads})).arrays["tokens"]) for pads in (False, True))
    assert padded > plain


def test_without_state_in_the_prompt_it_is_not_asked_for(tiny_folder: Path) -> None:
    processor = Processor(tiny_folder, {"state_in_prompt": False})
    actual = ask(processor, robot_state=None)
    expected = [
        *processor.tokenizer.encode([("pick up the red block", True)]),
        processor.tokenizer.encode([("\n", False)])[0],
    ]
    assert actual.arrays["tokens"][PLACES:].tolist() == expected
    assert actual.warnings == []
    (warning,) = ask(processor).warnings
    assert "robot_state has no effect" in warning


def test_masked_cameras_are_left_out(processor: Processor) -> None:
    images = [png(), b"this is never read", png()]
    actual = ask(processor, images=images, image_mask=[True, False, True])
    whole = ask(processor, images=[images[0], images[2]])
    assert np.array_equal(actual.arrays["images"], whole.arrays["images"])
    assert np.array_equal(actual.arrays["tokens"], whole.arrays["tokens"])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "I;16"])
def test_images_of_any_mode_become_three_channels(processor: Processor, mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (30, 30)).save(file, "TIFF" if mode == "CMYK" else "PNG")
    assert ask(processor, images=[file.getvalue()]).arrays["images"].shape == (1, SIDE, SIDE, 3)


def test_the_tensor_way_gives_floats(tiny_folder: Path) -> None:
    processor = Processor(tiny_folder, {"resize": "tensor"})
    assert ask(processor).arrays["images"].dtype == np.float32
    mixed = ask(processor, images=[png(), png(SIDE, SIDE)]).arrays["images"]
    assert mixed.dtype == np.float32 and -1 <= mixed.min() < mixed.max() <= 1
    assert ask(processor, images=[png(SIDE, SIDE)]).arrays["images"].dtype == np.uint8


def test_noise_comes_from_the_seed_or_the_client(processor: Processor) -> None:
    first, again, other = (ask(processor, seed=seed).arrays["noise"] for seed in (3, 3, 4))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert np.array_equal(
        ask(processor, seed=9, **{"noise": None}).arrays["noise"], ask(processor, seed=9).arrays["noise"]
    )
    inputs = [[0.5] * 32] * 10
    assert np.array_equal(ask(processor, noise=inputs).arrays["noise"], np.full((10, 32), 0.5, np.float32))


def test_actions_leave_in_the_robots_units_unless_told_otherwise(processor: Processor) -> None:
    scale, offset = (ask(processor).arrays[name] for name in ("scale", "offset"))
    assert (scale == scale[0]).all() and (offset == offset[0]).all()  # every step of the plan alike
    np.testing.assert_allclose(scale[0][:8], [1 + 0.125 * i + 5e-7 for i in range(8)], rtol=1e-6)
    assert (scale[0][8:] == 1).all() and (offset[0][8:] == 0).all()
    plain = ask(processor, return_normalized=True)
    assert (plain.arrays["scale"] == 1).all() and (plain.arrays["offset"] == 0).all() and plain.warnings == []


def test_without_statistics_the_answer_says_so(tiny_folder: Path) -> None:
    processor = Processor(tiny_folder, {"norm_stats": "none"})
    actual = ask(processor)
    assert (actual.arrays["scale"] == 1).all()
    assert any("no statistics" in warning for warning in actual.warnings)
    with pytest.raises(RequestError) as caught:
        ask(processor, return_normalized=False)
    assert caught.value.field == "return_normalized"


def test_aloha_needs_its_state_for_actions_that_are_differences(tiny_folder: Path, tmp_path: Path) -> None:
    stats = {"q01": [-1.0] * 14, "q99": [1.0] * 14}
    (tmp_path / "norm_stats.json").write_text(str({"norm_stats": {"state": stats, "actions": stats}}).replace("'", '"'))
    options = {"robot": "aloha", "state_in_prompt": False, "norm_stats": str(tmp_path)}
    processor = Processor(tiny_folder, options)
    state = [0.25] * 14
    actual = ask(processor, robot_state=state).arrays["offset"][0]
    assert actual[0] == pytest.approx(0.25, abs=1e-5)  # added to the difference
    assert actual[1] == pytest.approx(0.25, abs=1e-5)  # sign turned in and out again
    with pytest.raises(RequestError) as caught:
        ask(processor, robot_state=None)
    assert caught.value.field == "robot_state"
    assert ask(processor, robot_state=None, return_normalized=True).warnings == []


def test_a_default_prompt_stands_in_for_none(tiny_folder: Path) -> None:
    processor = Processor(tiny_folder, {"default_prompt": "be useful"})
    assert np.array_equal(ask(processor, text=None).arrays["tokens"], ask(processor, text="be useful").arrays["tokens"])


def test_a_long_prompt_is_cut_and_says_so(processor: Processor) -> None:
    actual = ask(processor, text="pick up the block " * 40)
    assert actual.prompt_tokens == PLACES + 96
    assert "truncated" in actual.warnings[0]


def test_what_spells_a_control_token_is_read_as_letters(processor: Processor) -> None:
    ids = ask(processor, text="<bos> and <eos>").arrays["tokens"][PLACES:].tolist()
    assert ids.count(2) == 1 and 1 not in ids


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"images": []}, "files"),
        ({"images": [b""] * 4}, "files"),
        ({"images": [b"no image"]}, "files"),
        ({"images": [png()[:60]]}, "files"),
        ({"text": None}, "text"),
        ({"text": "  "}, "text"),
        ({"room": 10}, "text"),
        ({"robot_state": None}, "robot_state"),
        ({"robot_state": [0.0] * 9}, "robot_state"),
        ({"robot_state": []}, "robot_state"),
        ({"robot_state": [float("nan")] * 8}, "robot_state"),
        ({"robot_state": [float("inf")] * 8}, "robot_state"),
        ({"num_steps": 21}, "num_steps"),
        ({"num_steps": 0}, "num_steps"),
        ({"noise": [[0.0] * 32] * 9}, "noise"),
        ({"noise": [[0.0] * 31] * 10}, "noise"),
        ({"image_mask": [False]}, "image_mask"),
        ({"image_mask": [True, True]}, "image_mask"),
        ({"image_mask": [True], "images": [b"", b""]}, "image_mask"),
        ({"image_mask": [False, True], "images": [b""]}, "image_mask"),
        ({"image_mask": [True] * 4}, "image_mask"),
    ],
)
def test_a_wrong_request_is_refused_by_its_field(change: dict[str, Any], field: str, processor: Processor) -> None:
    with pytest.raises(RequestError) as caught:
        ask(processor, **change)
    assert caught.value.field == field
    assert caught.value.title and (caught.value.hint or caught.value.facts.get("allowed"))


def test_the_robots_own_count_of_values_is_asked_for(tiny_folder: Path) -> None:
    processor = Processor(tiny_folder, {"robot": "droid"})
    assert ask(processor).arrays["scale"].shape == (10, 32)
    with pytest.raises(RequestError, match="8 values \\(droid\\)"):
        ask(processor, robot_state=[0.0] * 7)


def test_a_huge_image_is_refused_before_it_is_decoded(processor: Processor) -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    with pytest.raises(BadMedia, match="camera image 0"):
        ask(processor, images=[file.getvalue()])


def test_bytes_are_little_endian_rows(processor: Processor) -> None:
    data, facts = processor.postprocess(np.arange(6, dtype=np.float32).reshape(2, 3), "action")
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(facts["shape"]), np.arange(6.0).reshape(2, 3))


# -- deployments ----------------------------------------------------------------------------------------------------


def test_a_processor_needs_a_checkpoint() -> None:
    with pytest.raises(WeightsError, match="no checkpoint folder"):
        Processor(None, {})


def test_a_checkpoint_without_tokenizer_says_where_one_comes_from(checkpoint: Path) -> None:
    processor = Processor(checkpoint, {})
    side = processor._sizes.vision.image_size
    with pytest.raises(WeightsError, match="paligemma"):
        ask(processor, images=[png(side, side)])


def test_a_tokenizer_of_another_model_is_refused(tiny_folder: Path, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    (checkpoint / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    with pytest.raises(WeightsError, match="the model has 300"):
        Processor(checkpoint, {}).tokenizer  # noqa: B018 read at first use


def test_a_robot_that_the_statistics_do_not_fit_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="aloha has 14"):
        Processor(tiny_folder, {"robot": "aloha"})


def test_the_tiny_checkpoints_statistics_are_its_own(tiny_folder: Path) -> None:
    statistics = find_statistics(tiny_folder, None)
    assert statistics is not None and statistics.source.parent.name == "tiny"


# -- observations of robots -----------------------------------------------------------------------------------------


def observe(processor: Processor, seen: Any, **params: Any) -> Inputs:
    checked = parse_params(Params, params).params
    return processor.process_prompt(
        PromptRequest(text=None, observation=packed(seen), params=checked, seed=3, max_seq_len=1024)
    )


def own(**changes: Any) -> dict[str, Any]:
    pixels = np.asarray(Image.open(io.BytesIO(png())))
    return {"images": {"base_0_rgb": pixels, "right_wrist_0_rgb": pixels}, "state": np.array(STATE), **changes}


def test_an_observation_is_what_its_files_and_fields_would_be(processor: Processor) -> None:
    """Without a robot the keys are the model's own; cameras keep their order, and a missing one uses no positions."""
    inputs = png()
    pixels = np.asarray(Image.open(io.BytesIO(inputs)))
    images = {"right_wrist_0_rgb": pixels, "base_0_rgb": pixels.transpose(2, 0, 1)}
    actual = observe(processor, own(images=images, prompt="pick up the red block"))
    expected = ask(processor, images=[inputs, inputs])
    for name, array in expected.arrays.items():
        assert np.array_equal(actual.arrays[name], array), name
    assert actual.metadata == expected.metadata == {"action": {"normalized": False}}


def test_a_state_that_nothing_reads_is_no_matter_of_warnings(tiny_folder: Path) -> None:
    processor = Processor(tiny_folder, {"state_in_prompt": False})
    actual = observe(processor, own(prompt="go"))
    assert actual.warnings == []
    assert np.array_equal(actual.arrays["tokens"], observe(processor, own(prompt="go", state=None)).arrays["tokens"])


@pytest.mark.parametrize(
    ("change", "params", "field"),
    [
        ({"images": {}}, {}, "images"),
        ({"images": {"base": np.zeros((4, 4, 3), np.uint8)}}, {}, "images"),
        ({"state": None}, {}, "robot_state"),
        ({"state": np.zeros(9)}, {}, "robot_state"),
        ({"state": np.full(8, np.inf)}, {}, "state"),
        ({"prompt": " "}, {}, "text"),
        ({"prompt": 3}, {}, "prompt"),
        ({"images": {"base_0_rgb": [[1], [1, 2]]}}, {}, "base_0_rgb"),
        ({"images": {"base_0_rgb": np.full((4, 4, 3), np.nan)}}, {}, "base_0_rgb"),
        ({}, {"robot_state": STATE}, "robot_state"),
        ({}, {"image_mask": [True]}, "image_mask"),
        ({}, {"num_steps": 21}, "num_steps"),
    ],
)
def test_a_wrong_observation_is_refused_by_its_place(
    change: dict[str, Any], params: dict[str, Any], field: str, processor: Processor
) -> None:
    with pytest.raises(RequestError) as caught:
        observe(processor, own(**{"prompt": "go", **change}), **params)
    assert caught.value.field == field
    assert caught.value.title and caught.value.hint


@pytest.mark.parametrize("seen", [[1, 2], "go", 7, None])
def test_an_observation_that_is_no_map_is_refused(seen: Any, processor: Processor) -> None:
    with pytest.raises(RequestError, match="must be a map"):
        observe(processor, seen)


@pytest.mark.parametrize("value", [[1], "x", 3])
def test_what_robots_are_told_is_a_map(value: Any, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="metadata"):
        Processor(tiny_folder, {"metadata": value})
