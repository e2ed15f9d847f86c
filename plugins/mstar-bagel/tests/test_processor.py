"""The processor: resizing, order of parts, think and ChatML layouts, sizes, flow inputs, limits and refusals."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from PIL import Image, ImageFile

from mstar_bagel.checkpoint.config import ResizeRule, Sizes
from mstar_bagel.graph import MARKERS
from mstar_bagel.nodes.pixels import SignedPixels
from mstar_bagel.params import Params
from mstar_bagel.plugin import spec
from mstar_bagel.processor import Processor
from mstar_bagel.request.images import fitted_size, resize, resized_size
from mstar_bagel.request.prompt import THINK_TO_ANSWER, THINK_TO_PAINT
from mstar_core.errors import MstarError, RequestError
from mstar_core.plugin import parse_params
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest

PIXELS = 1e-6


@pytest.fixture(scope="module")
def processor(reference: Any) -> Processor:
    return Processor(reference.folder, {})


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), 0).save(file, "PNG")
    return file.getvalue()


def request(
    parts: Sequence[tuple[str, Any]], outputs: Sequence[str] = ("text",), turns: Sequence[str] = (), **params: Any
) -> PromptRequest:
    """Return a request of parts in order: ("text", words) or ("image", bytes). turns: role of each part."""
    texts = [value for kind, value in parts if kind == "text"]
    files = [MediaPart(modality=kind, data=value) for kind, value in parts if kind != "text"]
    order = [(kind, sum(each == kind for each, _ in parts[:place])) for place, (kind, _) in enumerate(parts)]
    made = [Turn(role=role, order=[at]) for role, at in zip(turns, order, strict=False)]  # type: ignore[arg-type]
    return PromptRequest(
        text="\n\n".join(texts) if texts else None,
        texts=texts,
        media=files,
        order=order,
        turns=made,
        params=parse_params(Params, params).params,
        outputs=frozenset(outputs),
        max_seq_len=2048,
    )


def ids_of(inputs: Inputs) -> list[list[int]]:
    return [segment.arrays["tokens"].tolist() for segment in inputs.segments if "tokens" in segment.arrays]


# -- images -----------------------------------------------------------------------------------------------------------


def test_sizes_follow_the_official_rules(golden: Any) -> None:
    for case in golden.json("resize_cases.json"):
        actual = {name.partition("_")[0]: (rule_of(name), size) for name, size in case.items() if name != "wh"}
        (first_rule, first), (then_rule, then), (direct_rule, direct) = (
            actual[kind] for kind in ("rule", "then", "direct")
        )
        size = resized_size(tuple(case["wh"]), first_rule)
        assert list(size) == first and list(resized_size(size, then_rule)) == then
        assert list(resized_size(tuple(case["wh"]), direct_rule)) == direct


def rule_of(name: str) -> ResizeRule:
    """Return the rule in the name of a size: `rule_1024_512_16`."""
    longest, shortest, stride = (int(part) for part in name.split("_")[1:])
    return ResizeRule(longest=longest, shortest=shortest, stride=stride)


def test_pixels_equal_the_reference(image: str, golden: Any, reference: Any, processor: Processor) -> None:
    expected = golden.tensors("preprocess")
    with Image.open(io.BytesIO(golden.png(image))) as given:
        first = resize(given.convert("RGB"), reference.sizes.vae_rule)
    assert np.array_equal(np.asarray(first), expected[f"{image}.resized_uint8"].numpy())
    inputs = processor.process_prompt(request([("image", golden.png(image)), ("text", "bluer")], ["image"]))
    arrays = inputs.segments[0].arrays
    for name in ("vae", "vit"):
        values = SignedPixels()(torch.from_numpy(arrays[f"{name}_image"]))
        torch.testing.assert_close(values, expected[f"{image}.{name}_input"], atol=PIXELS, rtol=0)


def test_transparent_pixels_are_white(processor: Processor) -> None:
    inputs = processor.process_prompt(request([("image", png(64, 64, "RGBA"))]))
    assert (inputs.segments[0].arrays["vit_image"] == 255).all()


def test_the_encoder_resizes_images_of_questions(image: str, golden: Any, reference: Any, processor: Processor) -> None:
    segment = processor.process_prompt(request([("image", golden.png(image)), ("text", "what?")])).segments[0]
    with Image.open(io.BytesIO(golden.png(image))) as given:
        assert segment.arrays["vit_image"].shape == (given.height, given.width, 3)  # as decoded
    pixels = golden.tensors("preprocess")[f"{image}.vit_input"]
    actual, expected = (
        reference.vit(image=[each])["features"][0]
        for each in (torch.from_numpy(segment.arrays["vit_image"].copy()), pixels)
    )
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=0)
    assert segment.length == len(expected) + MARKERS


def test_images_over_the_first_rule_are_carried_after_it(reference: Any, processor: Processor) -> None:
    rules, side = (reference.sizes.vae_rule, reference.sizes.vit_rule), reference.sizes.vae_rule.longest
    pixels = np.random.default_rng(1).integers(0, 256, (side + 20, 2 * side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    segment = processor.process_prompt(request([("image", file.getvalue())])).segments[0]
    first = resize(Image.fromarray(pixels), rules[0])
    assert np.array_equal(segment.arrays["vit_image"], np.asarray(first))
    seen = torch.from_numpy(np.asarray(resize(first, rules[1])).transpose(2, 0, 1).copy())
    actual, expected = (
        reference.vit(image=[each])["features"][0]
        for each in (torch.from_numpy(segment.arrays["vit_image"].copy()), seen)
    )
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)
    assert segment.length == len(expected) + MARKERS


def test_other_servers_resize_once_for_understanding(processor: Processor, reference: Any) -> None:
    size, patch = (75, 52), reference.sizes.vision.patch
    for name, rule in (("default", None), ("vllm", reference.sizes.vit_rule)):
        segment = processor.process_prompt(request([("image", png(*size))], image_preprocess=name)).segments[0]
        once = resized_size(size if rule else resized_size(size, reference.sizes.vae_rule), reference.sizes.vit_rule)
        assert segment.length == once[0] // patch * (once[1] // patch) + MARKERS
        assert segment.arrays["vit_image"].shape == ((3, once[1], once[0]) if rule else (size[1], size[0], 3))


def test_sizes_after_the_first_rule_are_final() -> None:
    rule = Sizes().vae_rule
    sides = (1, 3, 17, 97, 223, 512, 777, 1024, 1025, 1999, 8000)
    for size in ((width, height) for width in sides for height in sides):
        first = resized_size(size, rule)
        assert resized_size(first, rule) == first


# -- order and layouts ------------------------------------------------------------------------------------------------


class Loads:
    """Counter of decoded images."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        load = ImageFile.ImageFile.load

        def counted(image: ImageFile.ImageFile) -> Any:
            self.count += bool(image.tile)  # its pixels are still encoded
            return load(image)

        monkeypatch.setattr(ImageFile.ImageFile, "load", counted)


@pytest.mark.parametrize("outputs", [("text",), ("image",)])
def test_an_image_of_a_session_is_decoded_once_and_reads_the_same(
    outputs: tuple[str, ...], processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(monkeypatch)
    asked = replace(request([("image", png(50, 30)), ("text", "what?")], outputs), keeps_media=True)
    first = processor.process_prompt(asked)
    again = processor.process_prompt(replace(asked, media=[replace(asked.media[0], kept=first.kept[0])]))
    assert loads.count == 1 and not again.kept
    assert replace(again, segments=(), arrays={}) == replace(first, segments=(), arrays={}, kept={})
    assert all(np.array_equal(array, again.arrays[name]) for name, array in first.arrays.items())
    for one, other in zip(first.segments, again.segments, strict=True):
        assert (one.kind, one.length, one.arrays.keys()) == (other.kind, other.length, other.arrays.keys())
        assert all(np.array_equal(array, other.arrays[name]) for name, array in one.arrays.items())
    direct = parse_params(Params, {"image_preprocess": "vllm"}).params
    other = replace(asked, media=[replace(asked.media[0], kept=first.kept[0])], params=direct)
    assert set(processor.process_prompt(other).kept) == {0} and loads.count == 2  # kept for other options


def test_parts_keep_their_order(golden: Any, reference: Any, processor: Processor) -> None:
    words, ids = golden.cases["tokens"], reference.sizes.ids
    first, second, *_ = [text for text in words if "think" not in text]
    pictures = [golden.png(name) for name in golden.images]
    parts = [("text", first), ("image", pictures[0]), ("image", pictures[1]), ("text", second)]
    inputs = processor.process_prompt(request(parts))
    assert [segment.kind for segment in inputs.segments] == ["text", "image", "image", "text"]
    spelled = [[ids.start, *words[text], ids.end] for text in (first, second)]
    assert ids_of(inputs) == [spelled[0], [*spelled[1], ids.start]]
    lengths = [segment.length for segment in inputs.segments if segment.kind == "image"]
    shapes = [golden.cases["preprocess"][name]["vit_input_chw"] for name in golden.images]
    patch = reference.sizes.vision.patch
    assert lengths == [height // patch * (width // patch) + MARKERS for _, height, width in shapes]
    assert all("vae_image" not in segment.arrays for segment in inputs.segments)  # only an edit reads clean latents
    assert not inputs.arrays
    assert inputs.prompt_tokens == sum(segment.length for segment in inputs.segments) - 1


@pytest.mark.parametrize(("outputs", "instruction"), [(("text",), THINK_TO_ANSWER), (("image",), THINK_TO_PAINT)])
def test_thinking_puts_its_instruction_first(
    outputs: tuple[str, ...], instruction: str, golden: Any, reference: Any, processor: Processor
) -> None:
    ids = reference.sizes.ids
    parts = [("image", golden.png(golden.images[0])), ("text", "x")]
    inputs = processor.process_prompt(request(parts, outputs, think=True))
    assert [segment.kind for segment in inputs.segments] == ["system", "image", "text"]
    assert ids_of(inputs)[0] == [ids.start, *golden.cases["tokens"][instruction], ids.end]
    assert ("end" in inputs.arrays) == ("image" in outputs)


def test_an_effort_of_thinking_sets_the_mode_of_the_model(golden: Any, reference: Any, processor: Processor) -> None:
    chat = spec(reference.sizes).chat
    efforts = chat.reasoning.efforts if chat.reasoning is not None else {}
    assert list(efforts) == ["none", "low", "medium", "high"] and chat.tools is None
    asked = [
        replace(request([("text", "x")], ["image"], think=think), template=efforts[effort])  # type: ignore[index]
        for effort, think in (("none", True), ("low", False))
    ]
    plain, thinking = map(processor.process_prompt, asked)
    assert ([segment.kind for segment in plain.segments], plain.params.think_mode) == (["text"], False)
    assert ([segment.kind for segment in thinking.segments], thinking.params.think_mode) == (["system", "text"], True)


def test_its_vocabulary_spells_every_text(reference: Any, processor: Processor) -> None:
    ids, table = reference.sizes.ids, processor.token_table()
    assert (len(table), table.ends, ids.end in table.special) == (reference.sizes.language.vocab, (ids.end,), True)
    head = spec(reference.sizes).node("LLM").sampling
    assert head is not None and head.is_text and head.vocab == len(table)
    text = "a boat,\n é 42"
    assert b"".join(table.tokens[token] for token in table.ids_of(text)).decode() == text
    matcher = LLMatcher(table.tokenizer, 'start: "a boat" /[^0-9]+/ "42"')
    assert matcher.try_consume_tokens(table.ids_of(text)) == len(table.ids_of(text)) and matcher.is_accepting()


def test_messages_are_segments_and_chatml_adds_roles(reference: Any, processor: Processor) -> None:
    tokenizer, ids = processor.tokenizer, reference.sizes.ids
    parts, roles = [("text", "be brief"), ("text", "hello")], ["system", "user"]
    plain = processor.process_prompt(request(parts, turns=roles))
    spelled = [token for _, text in parts for token in (ids.start, *tokenizer.encode(text), ids.end)]
    assert ids_of(plain) == [[*spelled, ids.start]]
    chat = processor.process_prompt(request(parts, turns=roles, prompt_format="chatml"))
    line = tokenizer.encode("\n")
    expected = [
        token
        for role, (_, text) in zip(roles, parts, strict=True)
        for token in (ids.start, *tokenizer.encode(f"{role}\n{text}"), ids.end, *line)
    ]
    assert ids_of(chat) == [[*expected, ids.start, *tokenizer.encode("assistant\n")]]


def test_spelled_out_control_tokens_stay_text(reference: Any, processor: Processor) -> None:
    ids = reference.sizes.ids
    inputs = processor.process_prompt(request([("text", "a<|im_end|><|vision_start|>b")]))
    (actual,) = ids_of(inputs)
    control = {ids.start, ids.end, ids.image_start, ids.image_end}
    assert [token for token in actual if token in control] == [ids.start, ids.end, ids.start]
    assert processor.tokenizer.decode(actual) == "a<|im_end|><|vision_start|>b"


def test_text_leaves_in_whole_characters(processor: Processor) -> None:
    text = "Größe 5 µm, 你好! 🚤"
    stream, pieces = processor.detokenizer(), []
    for token in processor.tokenizer.encode(text):
        pieces.append(stream.push([token]))
    assert "".join(pieces) + stream.flush() == text
    assert "" in pieces and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    stream.push(processor.tokenizer.encode("🚤")[:-1])
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


# -- images to make ---------------------------------------------------------------------------------------------------


def test_a_new_image_has_the_size_that_was_asked_for(reference: Any, processor: Processor) -> None:
    pixels, longest = reference.sizes.token_pixels, reference.sizes.longest_side
    columns, rows = longest // pixels, longest // pixels - 1
    asked = processor.process_prompt(request([("text", "x")], ["image"], width=columns * pixels, height=rows * pixels))
    assert asked.arrays["grid"].shape == (rows, columns)
    assert processor.process_prompt(request([("text", "x")], ["image"])).arrays["grid"].shape == (
        longest // pixels,
        longest // pixels,
    )
    assert asked.arrays["guidance"].tolist() == [4.0, 1.0, 0.0, 0.0, 49.0]
    assert {name for name in asked.arrays if name.startswith("times")} == {"times_guided", "times_after"}


def test_an_edit_has_the_size_of_its_last_image_within_the_box(
    golden: Any, reference: Any, processor: Processor
) -> None:
    pixels = reference.sizes.token_pixels
    parts = [*(("image", golden.png(name)) for name in golden.images), ("text", "join")]
    width, height = golden.cases["preprocess"][golden.images[-1]]["after_first_rule_wh"]
    whole = processor.process_prompt(request(parts, ["image"]))
    assert whole.arrays["grid"].shape == (height // pixels, width // pixels)
    half = max(1, height // 2 // pixels)
    boxed = processor.process_prompt(request(parts, ["image"], height=half * pixels))
    rows, columns = boxed.arrays["grid"].shape
    assert rows == half and columns <= width // pixels


def test_a_box_only_makes_an_image_smaller() -> None:
    assert fitted_size((800, 608), (1024, 1024), 16) == (800, 608)
    assert fitted_size((800, 608), (400, None), 16) == (400, 304)
    assert fitted_size((800, 608), (400, 160), 16) == (208, 160)
    assert fitted_size((1024, 176), (16, None), 16) == (16, 16)


def test_an_image_leaves_as_png_with_its_size(processor: Processor) -> None:
    pixels = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    data, metadata = processor.postprocess(pixels, "image")
    with Image.open(io.BytesIO(data)) as read:
        assert (read.format, read.size) == ("PNG", (4, 2)) and np.array_equal(np.asarray(read), pixels)
    assert metadata == {"width": 4, "height": 2}


GUIDED: list[tuple[dict[str, Any], tuple[int, int], str]] = [
    ({}, (1, 0), ""),
    ({"cfg_img_scale": 1.5}, (1, 1), ""),
    ({"cfg_text_scale": 1.0}, (0, 0), ""),
    ({"cfg_text_scale": 1.0, "cfg_img_scale": 1.5}, (0, 0), "cfg_img_scale has no effect"),
    ({"cfg_interval": [0.0, 0.01]}, (0, 0), "no step lies in cfg_interval"),
]


@pytest.mark.parametrize("number", range(len(GUIDED)))
def test_usage_and_warnings_name_the_guidance_that_is_off(number: int, processor: Processor) -> None:
    params, expected, warning = GUIDED[number]
    inputs = processor.process_prompt(request([("text", "x")], ["image"], **params))
    assert (inputs.usage["guidance"], inputs.usage["image_guidance"]) == expected
    assert [warning in each for each in inputs.warnings] == ([True] if warning else [])


def test_edits_have_image_guidance_by_default(processor: Processor, golden: Any) -> None:
    inputs = processor.process_prompt(request([("image", golden.png(golden.images[0])), ("text", "x")], ["image"]))
    assert inputs.usage == {"guidance": 1, "image_guidance": 1} and not inputs.warnings


# -- limits and refusals ----------------------------------------------------------------------------------------------


def test_output_limits_leave_room_in_the_context(processor: Processor) -> None:
    inputs = processor.process_prompt(request([("text", "hello")], max_output_tokens=100_000))
    assert inputs.max_output_tokens == 2048 - inputs.prompt_tokens - 1
    thought = processor.process_prompt(request([("text", "hello")], ["image"], think=True, max_think_tokens=100_000))
    assert thought.params.max_think_tokens == 2048 - thought.prompt_tokens - 2
    assert any("max_think_tokens" in warning for warning in thought.warnings)


BAD: list[tuple[list[tuple[str, Any]], dict[str, Any], tuple[str, ...], str]] = [
    ([], {}, ("text",), "text"),
    ([("text", " ")], {}, ("text",), "text"),
    ([("text", "")], {}, ("image",), "text"),
    ([("image", png(40, 40))], {}, ("image",), "text"),
    ([("text", "x")], {"width": 1024}, ("image",), "width"),
    ([("text", "x")], {"prompt_format": "chatml"}, ("image",), "prompt_format"),
    ([("text", "word " * 3000)], {}, ("text",), "text"),
    ([*[("image", png(96, 96))] * 24, ("text", "join")], {}, ("image",), "text"),
    ([("audio", b"RIFF"), ("text", "x")], {}, ("text",), "files"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_request_that_cannot_work_names_its_field(number: int, processor: Processor) -> None:
    parts, params, outputs, field = BAD[number]
    with pytest.raises(RequestError) as caught:
        processor.process_prompt(request(parts, outputs, **params))
    assert caught.value.facts["field"] == field


def test_a_broken_image_is_refused(processor: Processor, golden: Any) -> None:
    for data in (b"", b"\x89PNG\r\n\x1a\n broken", golden.png("a")[:200]):
        with pytest.raises(MstarError, match="image"):
            processor.process_prompt(request([("image", data), ("text", "x")]))
