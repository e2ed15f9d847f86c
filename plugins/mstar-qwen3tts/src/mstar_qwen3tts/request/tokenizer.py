"""Tokenizer of a checkpoint: Qwen2's byte-level BPE from vocab.json, merges.txt and tokenizer_config.json.

Source: specification section 5. Control tokens that are spelled out in a text are tokenized as letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mstar_core.errors import WeightsError
from mstar_core.plugin.plain_text import plain_ids

VOCAB, MERGES, SETTINGS = "vocab.json", "merges.txt", "tokenizer_config.json"
SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenizer pattern of Qwen2: digits stand alone, line breaks end a run of white space."""


class TextTokenizer:
    """Tokenizer of prompts. Raises WeightsError for a missing or broken file."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = _read(folder)
        except (OSError, ValueError, KeyError) as error:
            detail = f"{type(error).__name__}: {error}"
            hint = f"download {VOCAB}, {MERGES} and {SETTINGS}"
            raise WeightsError(f"{folder} has no usable tokenizer", detail, hint, file=str(folder)) from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._control = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text of a request."""
        return plain_ids(partial(self._tokenizer.encode, add_special_tokens=False), text, self._control)

    def encode_template(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are control tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _read(folder: Path) -> Tokenizer:
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
    settings: Mapping[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    for number, token in sorted((int(key), token) for key, token in settings["added_tokens_decoder"].items()):
        tokenizer.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), normalized=False)])
        if tokenizer.token_to_id(token["content"]) != number:
            raise ValueError(f"{token['content']} is id {tokenizer.token_to_id(token['content'])}, not {number}")
    return tokenizer


def _pair(line: str) -> tuple[str, str]:
    left, right = line.split(" ")
    return left, right


def template(kind: str, text: str) -> str:
    """Return the string around a text of a role, which ends after the text's line."""
    return f"<|im_start|>{kind}\n{text}<|im_end|>\n"


def spoken_parts(ids: Sequence[int], tail: int) -> list[int]:
    """Return the ids of the text in those of a whole template: without three in front and `tail` behind."""
    return list(ids[3 : len(ids) - tail])
