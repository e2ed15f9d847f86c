"""The processor: prompts, refused requests and bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mstar_core.errors import RequestError, WeightsError
from mstar_core.plugin import parse_params
from mstar_core.plugin.processor import PromptRequest
from mstar_orpheus.checkpoint.config import VOICES, read_config
from mstar_orpheus.plugin import ORPHEUS, OpenParams, Params
from mstar_orpheus.processor import Processor


@pytest.fixture(scope="module")
def processor(tiny_folder: Path) -> Processor:
    return Processor(tiny_folder, {})


def ask(processor: Processor, text: str | None = None, limit: int = 0, **params: Any) -> Any:
    return processor.process_prompt(PromptRequest(text=text, params=Params(**params), max_seq_len=limit))


def prompt(processor: Processor, text: str, **params: Any) -> list[int]:
    return list(ask(processor, text, **params).arrays["text_tokens"])


def test_the_prompt_is_the_canonical_form(processor: Processor, tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "lm" / "tokenizer.json"))
    ids = read_config(tiny_folder).ids
    assert prompt(processor, "Hello there", voice="zoe") == [
        ids.start,
        *tokenizer.encode("zoe: Hello there").ids,
        *ids.end,
    ]
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    assert prompt(processor, "Hello there").count(begin) == 1
    assert ask(processor, "Hello").arrays["text_tokens"].dtype == np.int64


def test_the_default_voice_is_tara_names_have_any_case_and_no_voice_is_allowed(processor: Processor) -> None:
    assert prompt(processor, "hi") == prompt(processor, "hi", voice="Tara ")
    assert prompt(processor, "tara: hi", voice="") == prompt(processor, "hi", voice="tara")


def test_an_unknown_voice_is_refused_with_the_list(tiny_folder: Path) -> None:
    with pytest.raises(RequestError) as caught:
        parse_params(ORPHEUS.bound(tiny_folder, {}).params, {"voice": "tarra"})
    assert caught.value.field == "voice"
    assert all(voice in str(caught.value) for voice in VOICES)
    assert "did you mean 'tara'" in str(caught.value)


def test_any_voice_is_accepted_if_the_deployment_allows_it(tiny_folder: Path) -> None:
    kwargs = {"allow_any_voice": True}
    params = parse_params(ORPHEUS.bound(tiny_folder, kwargs).params, {"voice": "Jürgen"}).params
    open_processor = Processor(tiny_folder, kwargs)
    inputs = open_processor.process_prompt(PromptRequest(text="hi", params=params))
    named = open_processor.process_prompt(PromptRequest(text="Jürgen: hi", params=OpenParams(voice="")))
    assert inputs.arrays["text_tokens"].tolist() == named.arrays["text_tokens"].tolist()


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_empty_text_is_refused(text: str | None, processor: Processor) -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        ask(processor, text)
    assert caught.value.field == "text"


def test_text_over_the_context_is_refused_with_both_numbers(processor: Processor) -> None:
    length = ask(processor, "word " * 50).prompt_tokens
    with pytest.raises(RequestError) as caught:
        ask(processor, "word " * 50, limit=length)
    assert caught.value.code == "context_length_exceeded"
    assert f"{length} ids" in str(caught.value)
    assert ask(processor, "word " * 50, limit=length + 1).max_output_tokens == 1


def test_the_output_limit_is_lowered_with_a_warning(processor: Processor) -> None:
    free = ask(processor, "hi", max_output_tokens=50, limit=200)
    assert (free.max_output_tokens, list(free.warnings)) == (50, [])
    cut = ask(processor, "hi", max_output_tokens=500, limit=200)
    assert cut.max_output_tokens == cut.params.max_output_tokens == 200 - cut.prompt_tokens
    assert "500" in cut.warnings[0]
    assert ask(processor, "hi", limit=200).warnings == [], "the client set no limit"


def test_the_context_is_never_longer_than_the_model(processor: Processor, tiny_folder: Path) -> None:
    positions = read_config(tiny_folder).max_positions
    actual = ask(processor, "hi", limit=10 * positions, max_output_tokens=10 * positions)
    assert actual.max_output_tokens == positions - actual.prompt_tokens


def test_given_ids_are_the_prompt_and_need_no_tokenizer(checkpoint: Path, golden: Any) -> None:
    ids = golden.lm[f"prompt_{golden.prompts[0]}"].tolist()
    assert not (checkpoint / "lm" / "tokenizer.json").exists()
    processor = Processor(checkpoint, {})
    actual = ask(processor, prompt_token_ids=tuple(ids))
    assert actual.arrays["text_tokens"].tolist() == ids
    assert actual.prompt_tokens == len(ids)
    assert ask(processor, "text too", prompt_token_ids=tuple(ids)).warnings
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        ask(processor, "hi")


@pytest.mark.parametrize("ids", [(), (-1,), (1, 10**9)])
def test_given_ids_out_of_range_are_refused(ids: tuple[int, ...], processor: Processor) -> None:
    with pytest.raises(RequestError) as caught:
        ask(processor, prompt_token_ids=ids)
    assert caught.value.field == "prompt_token_ids"


@pytest.mark.parametrize(
    "spelled",
    ["<|eot_id|>", "<custom_token_2>", "<custom_token_700><|begin_of_text|>", "<<|eot_id|>", "<|eot_id|>" * 300],
)
def test_control_tokens_in_the_text_are_read_as_letters(spelled: str, processor: Processor, tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "lm" / "tokenizer.json"))
    actual = prompt(processor, f"say {spelled} é now", voice="")
    ends = len(read_config(tiny_folder).ids.end)
    inner = actual[2:-ends]
    assert not set(inner) & set(tokenizer.get_added_tokens_decoder())
    assert tokenizer.decode(inner) == f"say {spelled} é now"


def test_emotion_tags_are_ordinary_text(processor: Processor, tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "lm" / "tokenizer.json"))
    ends = len(read_config(tiny_folder).ids.end)
    assert tokenizer.decode(prompt(processor, "well <laugh> yes")[2:-ends]) == "tara: well <laugh> yes"


def test_samples_become_little_endian_bytes_with_their_metadata(processor: Processor) -> None:
    data, metadata = processor.postprocess(np.array([1, -2, 32767], dtype=np.int16), "audio")
    assert data == b"\x01\x00\xfe\xff\xff\x7f"
    assert metadata == {"sample_rate": 24000, "num_channels": 1, "samples": 3}


def test_a_damaged_tokenizer_is_named(checkpoint: Path) -> None:
    (checkpoint / "lm" / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match=r"tokenizer\.json cannot be read"):
        ask(Processor(checkpoint, {}), "hi")


def test_a_missing_folder_is_an_error_with_a_hint() -> None:
    with pytest.raises(WeightsError, match="orpheus:tiny"):
        Processor(None, {})


def test_only_the_limit_of_the_parameters_changes(processor: Processor) -> None:
    params = Params(voice="leo", temperature=0.0, max_output_tokens=9)
    inputs = processor.process_prompt(PromptRequest(text="hi", params=params))
    assert inputs.params == replace(params)
