"""Tokenizer of a checkpoint. Byte-level BPE with Qwen2's splitting rule.

The files are tokenizer.json, or vocab.json and merges.txt with the added tokens of tokenizer_config.json.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mstar_core.errors import RequestError, WeightsError
from mstar_core.plugin.plain_text import ByteDetokenizer, plain_ids, spelled_bytes
from mstar_core.plugin.processor import Detokenizer

if TYPE_CHECKING:
    from mstar_core.constraints.vocabulary import TokenTable

WHOLE: Final = "tokenizer.json"
VOCAB, MERGES, SETTINGS = "vocab.json", "merges.txt", "tokenizer_config.json"
SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenizer pattern of Qwen2: digits stand alone, line breaks end a run of white space."""


MOST_IDS: Final = 2**32
"""The library reads ids as unsigned numbers of 32 bits."""


class TextTokenizer:
    """Tokenizer of prompts. Control tokens that are spelled out in a text are tokenized as letters."""

    def __init__(self, tokenizer: Tokenizer, control: Sequence[int]) -> None:
        """control: ids that a text must never contain, besides the special ids of the tokenizer itself."""
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        special = (number for number, token in self._added.items() if token.special)
        self._control = frozenset((*control, *special))
        self._bytes = functools.lru_cache(maxsize=1 << 14)(self._bytes_of)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        return plain_ids(partial(self._tokenizer.encode, add_special_tokens=False), text, self._control)

    def encode_raw(self, text: str, *, adds_special: bool) -> list[int]:
        """Return the ids of a whole prompt, whose control tokens are control tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=adds_special).ids)

    def spell(self, ids: Sequence[int]) -> list[bytes]:
        """Return the text of each id in UTF-8, control tokens included. Raises RequestError for unknown ids."""
        wrong = next((token for token in ids if not self._has(token)), None)
        if wrong is not None:
            raise RequestError(f"{wrong} is not the id of a token", field="ids")
        return [self._spelled(token) for token in ids]

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return ByteDetokenizer(self.bytes_of)

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of an id, which may be part of a character; nothing for control and unknown ids."""
        return self._bytes(token)

    def _bytes_of(self, token: int) -> bytes:
        return b"" if token in self._control else self._spelled(token)

    def _has(self, token: int) -> bool:
        return 0 <= token < MOST_IDS and self._tokenizer.id_to_token(token) is not None

    def _spelled(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return str(added.content).encode()
        return spelled_bytes(self._tokenizer.id_to_token(token) or "")

    def token_table(self, vocab: int, ends: Sequence[int]) -> TokenTable:
        """Return the bytes of `vocab` ids, for grammars. ends: ids that end an answer."""
        from mstar_core.constraints.vocabulary import TokenTable  # here, because most requests need no grammar

        special = [token for token in sorted(self._control) if token < vocab]
        names = {token: str(self._added[token].content).encode() for token in special if token in self._added}
        tokens = [names.get(token) or self._bytes_of(token) for token in range(vocab)]
        return TokenTable(tokens, special=special, ends=ends, encode=self.encode)


class NumberDetokenizer:
    """Detokenizer of a checkpoint without tokenizer files: ids as decimal numbers, each followed by a space."""

    def __init__(self, stop_id: int) -> None:
        self._stop_id = stop_id

    def push(self, ids: Sequence[int]) -> str:
        """Return the numbers of these ids without the stop id."""
        return "".join(f"{token} " for token in ids if token != self._stop_id)

    def flush(self) -> str:
        """Return nothing: numbers are never held back."""
        return ""


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint folder contains tokenizer files."""
    return (folder / WHOLE).is_file() or (folder / VOCAB).is_file()


def read_tokenizer(folder: Path, control: Sequence[int]) -> TextTokenizer:
    """Read the tokenizer of a checkpoint. Raises WeightsError for a missing or broken file."""
    path = folder / (WHOLE if (folder / WHOLE).is_file() else VOCAB)
    if not path.is_file():
        hint = f"download {WHOLE}, or {VOCAB}, {MERGES} and {SETTINGS}; or send prompt_token_ids"
        raise WeightsError(f"{folder} has no tokenizer", "text cannot be tokenized without it", hint, file=str(path))
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.name == WHOLE else _from_parts(folder)
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(
            f"{path} cannot be read", f"{type(error).__name__}: {error}", "download the tokenizer again", file=str(path)
        ) from error
    return TextTokenizer(tokenizer, control)


def _from_parts(folder: Path) -> Tokenizer:
    vocab: dict[str, int] = json.loads((folder / VOCAB).read_text(encoding="utf-8"))
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
    merges = [_pair(line) for line in lines if line and not line.startswith("#version")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, folder / SETTINGS)
    return tokenizer


def _pair(line: str) -> tuple[str, str]:
    left, right = line.split(" ")
    return left, right


def _add_tokens(tokenizer: Tokenizer, settings: Path) -> None:
    """Add the tokens of tokenizer_config.json, in the order of their ids."""
    tokens: Mapping[str, Any] = json.loads(settings.read_text(encoding="utf-8"))["added_tokens_decoder"]
    for number, token in sorted((int(number), token) for number, token in tokens.items()):
        tokenizer.add_tokens([_added(token)])
        if tokenizer.token_to_id(token["content"]) != number:
            raise ValueError(f"{token['content']} is id {tokenizer.token_to_id(token['content'])}, not {number}")


def _added(token: Mapping[str, Any]) -> AddedToken:
    return AddedToken(
        token["content"],
        single_word=bool(token.get("single_word", False)),
        lstrip=bool(token.get("lstrip", False)),
        rstrip=bool(token.get("rstrip", False)),
        normalized=bool(token.get("normalized", False)),
        special=bool(token.get("special", False)),
    )
