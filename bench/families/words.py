"""A word for every id of a vocabulary, so that each id that a model of random weights draws is text for its client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def with_words(vocab: Mapping[str, int], size: int, taken: Iterable[int] = ()) -> dict[str, int]:
    """Return the vocabulary with `w17 ` for each free id below `size`. taken: ids of control tokens.

    The last character is the byte-level letter of a space.
    """
    used = {*vocab.values(), *taken}
    return {**vocab, **{f"w{number}Ġ": number for number in range(size) if number not in used}}
