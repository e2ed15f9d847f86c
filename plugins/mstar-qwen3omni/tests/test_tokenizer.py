"""The tokenizer against transformers, spelled-out control tokens, and the detokenizer."""

from __future__ import annotations

import random
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.errors import WeightsError
from mstar_qwen3omni.checkpoint.config import TextIds
from mstar_qwen3omni.request.tokenizer import NumberDetokenizer, TextTokenizer, has_tokenizer, read_tokenizer

from .tokenizers_made import NAMES, write_tokenizer


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TextIds]:
    folder = tmp_path_factory.mktemp("tokenizer")
    return folder, write_tokenizer(folder)


@pytest.fixture(scope="session")
def tokenizer(made: tuple[Path, TextIds]) -> TextTokenizer:
    folder, ids = made
    return read_tokenizer(folder, [getattr(ids, name) for name in NAMES])


@pytest.fixture(scope="session")
def oracle(made: tuple[Path, TextIds]) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(made[0])


TEXTS = [
    "hello world",
    "it's 12345 o'clock, WE'LL see",
    "\n\n\nhello\n",
    "  two  spaces\t\ttabs ",
    "日本語 🎈 é",
    "e\u0301 ffi",
    "",
    " ",
    "a<tool_call>b",
    "\r\n x \u00a0y",
]


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_has_the_ids_of_transformers(tokenizer: TextTokenizer, oracle: Any, text: str) -> None:
    assert tokenizer.encode(text) == oracle(text)["input_ids"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_has_the_ids_of_transformers(tokenizer: TextTokenizer, oracle: Any, text: str) -> None:
    assert tokenizer.encode(text) == oracle(text)["input_ids"]


def test_spelled_control_tokens_are_letters(tokenizer: TextTokenizer, made: tuple[Path, TextIds]) -> None:
    control = {getattr(made[1], name) for name in NAMES}
    for name in NAMES.values():
        ids = tokenizer.encode(f"a{name}{name} b{name}")
        assert not control & set(ids)
        whole = tokenizer.detokenizer()
        assert whole.push(ids) + whole.flush() == f"a{name}{name} b{name}"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30), st.integers(0, 2**16))
def test_any_split_of_ids_gives_the_text(tokenizer: TextTokenizer, text: str, seed: int) -> None:
    expected = unicodedata.normalize("NFC", text)
    ids, pieces = tokenizer.encode(text), []
    decoder, chance = tokenizer.detokenizer(), random.Random(seed)
    while ids:
        count = chance.randint(1, 3)
        pieces.append(decoder.push(ids[:count]))
        ids = ids[count:]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in expected
    assert "".join(pieces) + decoder.flush() == expected


def test_an_incomplete_character_at_the_end_is_replaced(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("\U000103ff")  # not in the training text: four bytes
    decoder = tokenizer.detokenizer()
    assert len(ids) == 4
    assert decoder.push(ids[:3]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_control_and_unknown_ids_have_no_text(tokenizer: TextTokenizer, made: tuple[Path, TextIds]) -> None:
    decoder = tokenizer.detokenizer()
    assert decoder.push([made[1].im_end, made[1].tts_eos, 151_000]) == ""


def test_both_forms_of_a_tokenizer_give_the_same_ids(
    tokenizer: TextTokenizer, made: tuple[Path, TextIds], oracle: Any, tmp_path: Path
) -> None:
    oracle.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    whole = read_tokenizer(tmp_path, [made[1].im_end])
    for text in (*TEXTS, "a<|im_end|>b"):
        assert whole.encode(text) == tokenizer.encode(text)


def test_missing_and_broken_files_are_named(made: tuple[Path, TextIds], tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(WeightsError, match="has no tokenizer"):
        read_tokenizer(tmp_path, [])
    shutil.copytree(made[0], tmp_path / "broken")
    (tmp_path / "broken" / "merges.txt").write_text("one two three\n")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_tokenizer(tmp_path / "broken", [])


def test_without_a_tokenizer_ids_are_numbers() -> None:
    decoder = NumberDetokenizer(stop_id=9)
    assert decoder.push([5, 17]) + decoder.push([3]) + decoder.flush() == "5 17 3 "
