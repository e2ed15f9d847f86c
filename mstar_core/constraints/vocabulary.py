"""Vocabulary of a text head as bytes: which text each id stands for.

A processor gives it once per process. The api checks grammars with it, and the engine makes matchers of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from llguidance import LLTokenizer

LEAST_IDS: Final = 2
"""Ids of the smallest vocabulary."""


class TokenTable:
    """Bytes of every id of a vocabulary. Immutable.

    tokens: by id; empty for ids that no constrained answer may contain. special: control tokens; their bytes are their
    names, by which a grammar refers to them as `<|name|>`, and no text matches them. ends: ids that end an answer.
    encode: ids of a text, as the model's tokenizer writes it. Text that the grammar leaves no choice about is drawn in
    these ids; by default in the longest tokens.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special: Sequence[int] = (),
        ends: Sequence[int],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        if len(tokens) < LEAST_IDS or not ends or not all(0 <= token < len(tokens) for token in (*special, *ends)):
            raise ValueError(f"a vocabulary of {len(tokens)} ids has special ids or ends outside of it")
        self.tokens = tokens
        self.special = tuple(dict.fromkeys((*special, *ends)))
        self.ends = tuple(ends)
        self.encode = encode

    def __len__(self) -> int:
        return len(self.tokens)

    def sized(self, count: int) -> TokenTable:
        """Return the table of `count` ids, as many as logits have; added ids have no text and are never drawn."""
        if count == len(self):
            return self
        tokens = [*self.tokens[:count], *(b"" for _ in range(count - len(self)))]
        special = [token for token in self.special if token < count]
        return TokenTable(tokens, special=special, ends=self.ends, encode=self.encode)

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """The trie of all tokens, made at first use: about a second for 150,000 ids."""
        ids = list(dict.fromkeys(self.ends))
        return LLTokenizer(_Tokens(self), eos_token=ids, slices=LLTokenizer.general_slices())  # type: ignore[arg-type]

    @functools.cached_property
    def longest(self) -> tuple[dict[bytes, int], int]:
        """Ids by their bytes, without special ones, and the bytes of the longest token."""
        special = frozenset(self.special)
        ids = {text: token for token, text in enumerate(self.tokens) if text and token not in special}
        return ids, max(map(len, ids), default=1)

    def ids_of(self, text: str) -> list[int]:
        """Return ids whose bytes are this text. Bytes that no token has are left out."""
        if self.encode is not None:
            return list(self.encode(text))
        ids, most = self.longest
        data, at, result = text.encode(), 0, list[int]()
        while at < len(data):
            size = next((size for size in range(most, 0, -1) if data[at : at + size] in ids), 0)
            if size:
                result.append(ids[data[at : at + size]])
            at += max(size, 1)
        return result


class _Tokens:
    """A table as `llguidance` reads it."""

    is_tokenizer_wrapper = True

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.tokens
        self.special_token_ids = list(table.special)
        self.eos_token_id = table.ends[0]
        self.bos_token_id = None
        self._ids_of = table.ids_of

    def __call__(self, text: str) -> list[int]:
        return self._ids_of(text)
