"""Tokenizer of the checkpoint, which reads spelled-out control tokens as text, and its detokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstar_bagel.checkpoint.config import TOKENIZER_CONFIG
from mstar_core.errors import WeightsError
from mstar_core.plugin.json_fields import JsonFields
from mstar_core.plugin.plain_text import plain_ids, spelled_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mstar_core.constraints.vocabulary import TokenTable

FILE: Final = "tokenizer.json"
VOCAB: Final = "vocab.json"
MERGES: Final = "merges.txt"
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words of Qwen2's tokenizer, for folders without tokenizer.json."""

INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"


class TextTokenizer:
    """Byte-level BPE without control tokens from the text."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = read_tokenizer(folder)
        self._control = frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text. A spelled-out control token is split after its first character."""
        return plain_ids(partial(self._tokenizer.encode, add_special_tokens=False), text, self._control)

    def token_table(self, vocab: int, ends: Sequence[int]) -> TokenTable:
        """Return the bytes of `vocab` ids, for grammars. ends: ids that end an answer."""
        from mstar_core.constraints.vocabulary import TokenTable  # here, because most requests need no grammar

        added = {token: str(each.content) for token, each in self._tokenizer.get_added_tokens_decoder().items()}
        tokens = [
            added[token].encode() if token in added else spelled_bytes(self._tokenizer.id_to_token(token) or "")
            for token in range(vocab)
        ]
        return TokenTable(tokens, special=[token for token in added if token < vocab], ends=ends, encode=self.encode)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without control tokens; an incomplete character becomes U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class TextStream:
    """Incremental detokenizer: returns text as soon as its characters are complete."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete. Byte-level tokens never change earlier characters."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        if text.endswith(INCOMPLETE):
            return ""
        self._ids = []
        return text

    def flush(self) -> str:
        """Return what is left, with U+FFFD for an incomplete character."""
        text, self._ids = self._tokenizer.decode(self._ids), []
        return text


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json, else vocab.json and merges.txt. Raises WeightsError with the file."""
    from tokenizers import Tokenizer

    path = folder / FILE
    if not path.is_file() and not ((folder / VOCAB).is_file() and (folder / MERGES).is_file()):
        detail = f"there is neither {FILE}, nor {VOCAB} with {MERGES}"
        raise WeightsError(f"{folder} has no tokenizer", detail, "download these files", file=str(path))
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else _from_parts(folder)
    except WeightsError:
        raise
    except Exception as error:
        path = path if path.is_file() else folder / VOCAB
        raise WeightsError(f"{path} cannot be read", str(error), "download this file again", file=str(path)) from error


def _from_parts(folder: Path) -> Tokenizer:
    from tokenizers import AddedToken, models

    tokenizer = qwen_tokenizer(models.BPE.from_file(str(folder / VOCAB), str(folder / MERGES)))
    config = JsonFields.read_if_any(folder / TOKENIZER_CONFIG)
    added = sorted((int(number), token) for number, token in config.get("added_tokens_decoder", {}).items())
    for _, token in added:
        tokenizer.add_tokens(
            [AddedToken(token["content"], normalized=False, special=bool(token.get("special", False)))]
        )
    wrong = next(
        (token["content"] for number, token in added if tokenizer.token_to_id(token["content"]) != number), None
    )
    if wrong is not None:
        raise WeightsError(
            f"{folder / VOCAB} and {TOKENIZER_CONFIG} disagree",
            f"{wrong} would get another id",
            "download the tokenizer's files again",
            file=str(folder / VOCAB),
        )
    return tokenizer


def qwen_tokenizer(model: Any) -> Tokenizer:
    """Return a tokenizer of Qwen2's kind around a BPE model, without added tokens."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
