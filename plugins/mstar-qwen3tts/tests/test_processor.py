"""The processor: refusals with the way out, warnings, limits, and text that arrives in pieces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import RequestError, WeightsError
from mstar_core.plugin.processor import MediaPart, PromptRequest
from mstar_qwen3tts.checkpoint.config import BASE, CODEC_FOLDER, CUSTOM, DESIGN, SMALL, read_config
from mstar_qwen3tts.params import bound_params
from mstar_qwen3tts.processor import FRAMES_PER_TOKEN, LEAST_FRAMES, Processor
from mstar_qwen3tts.sources.tiny_files import write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("texts")
    write_texts(made, CUSTOM)
    return made


def processor(folder: Path, **changes: Any) -> Processor:
    made = Processor(folder, {})
    made._config = replace(made._config, **changes)
    return made


def request(
    folder: Path, text: str = "Hello there.", media: tuple[MediaPart, ...] = (), **params: Any
) -> PromptRequest:
    return PromptRequest(text=text, media=media, params=bound_params(read_config(folder))(**params))


def refused(made: Processor, asked: PromptRequest, field: str) -> RequestError:
    with pytest.raises(RequestError) as error:
        made.process_prompt(asked)
    assert error.value.facts["field"] == field
    return error.value


def test_an_unknown_voice_names_the_nearest(folder: Path) -> None:
    error = refused(processor(folder), request(folder, voice="vivien"), "voice")
    assert "did you mean 'vivian'" in error.hint and "ryan" in error.hint


def test_an_unknown_language_names_the_nearest_and_no_dialect(folder: Path) -> None:
    error = refused(processor(folder), request(folder, language="germen"), "language")
    assert "did you mean 'german'" in error.hint and "dialect" not in error.hint


def test_an_empty_text_is_refused(folder: Path) -> None:
    refused(processor(folder), request(folder, text=" \n"), "text")


def test_what_a_kind_of_checkpoint_cannot_do_is_refused(folder: Path) -> None:
    recording = (MediaPart(modality="audio", data=b"RIFF"),)
    refused(processor(folder), request(folder, media=recording), "ref_audio")
    refused(processor(folder, kind=DESIGN), request(folder, voice="ryan"), "voice")
    refused(processor(folder, kind=BASE), request(folder), "ref_audio")
    refused(processor(folder, kind=BASE), request(folder, voice="ryan"), "voice")


def test_an_instruction_comes_first_or_is_reported(folder: Path) -> None:
    plain = processor(folder).process_prompt(request(folder))
    told = processor(folder).process_prompt(request(folder, instructions="Whisper."))
    assert len(told.arrays["prompt"]) > len(plain.arrays["prompt"]) and not told.warnings
    small = processor(folder, size=SMALL).process_prompt(request(folder, instructions="Whisper."))
    assert len(small.arrays["prompt"]) == len(plain.arrays["prompt"])
    assert small.warnings == ["instructions has no effect on a checkpoint of 0.6B"]


def test_the_text_stands_in_the_prompt_or_follows_it(folder: Path) -> None:
    made = processor(folder)
    whole = made.process_prompt(request(folder))
    along = made.process_prompt(request(folder, non_streaming_mode=False))
    assert "trailing" not in whole.arrays
    count = len(made._tokenizer.encode("Hello there."))
    assert len(whole.arrays["prompt"]) == len(along.arrays["prompt"]) + count + 1
    assert along.arrays["trailing"].tolist()[-1] == made._config.ids.tts_eos
    assert len(along.arrays["trailing"]) == count


def test_the_limit_follows_the_text_and_the_context(folder: Path) -> None:
    made = processor(folder)
    count = len(made._tokenizer.encode("Hello there."))
    assert made.process_prompt(request(folder)).max_output_tokens == LEAST_FRAMES + FRAMES_PER_TOKEN * count
    short = replace(request(folder, max_output_tokens=500), max_seq_len=100)
    found = made.process_prompt(short)
    assert found.max_output_tokens == 100 - len(found.arrays["prompt"]) - 1 and found.warnings
    refused(made, replace(request(folder), max_seq_len=8), "text")


def test_codes_that_are_not_drawn_are_the_most_likely(folder: Path) -> None:
    found = processor(folder).process_prompt(request(folder, do_sample=False, subtalker_dosample=False))
    assert (found.params.temperature, found.params.subtalker_temperature) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["  Hello there, it's 7 o'clock.\nWell - yes! ", "今天天气很好。明天呢？", "one"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_text_in_pieces_has_the_ids_of_the_whole(folder: Path, text: str, size: int) -> None:
    made = processor(folder)
    reader, ids = made.text_reader(), list[int]()
    for start in range(0, len(text), size):
        ids += reader.push(text[start : start + size])
    assert ids + reader.end() == [*made._tokenizer.encode(text.strip()), made._config.ids.tts_eos]


def test_words_are_certain_before_the_end(folder: Path) -> None:
    reader = processor(folder).text_reader()
    assert reader.push("Hello the") and not reader.push("re") and reader.push(" you")


def test_another_tokenizer_of_codes_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / CODEC_FOLDER).mkdir()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tokenizer_type": "qwen3_tts_tokenizer_25hz"}))
    (tmp_path / CODEC_FOLDER / "config.json").write_text((folder / CODEC_FOLDER / "config.json").read_text())
    with pytest.raises(WeightsError, match="qwen3_tts_tokenizer_25hz") as error:
        read_config(tmp_path)
    assert "12Hz" in error.value.hint
