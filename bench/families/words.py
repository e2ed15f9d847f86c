"""Words for the free ids of a vocabulary: each id that a model of random weights draws is text for its client."""

from __future__ import annotations

import functools
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

LONGEST: Final = 14
"""Most characters of a piece of a word."""

STARTS: Final = 8
"""Places within a word at which pieces begin."""

BYTE_LEVEL: Final = {" ": "Ġ", "\n": "Ċ", "\t": "ĉ"}
"""Letters that stand for white space in a byte-level vocabulary."""


def with_words(vocab: Mapping[str, int], size: int, taken: Iterable[int] = ()) -> dict[str, int]:
    """Return the vocabulary with `w17 ` for each free id below `size`. taken: ids of control tokens.

    The last character is the byte-level letter of a space.
    """
    used = {*vocab.values(), *taken}
    return {**vocab, **{f"w{number}Ġ": number for number in range(size) if number not in used}}


def with_pieces(vocab: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the vocabulary with a common piece of a word for each free id below `size`, and `with_words` behind them.

    Masks of constrained decoding cost what the vocabulary's trie costs, and that of numbered words is like no real one.
    """
    used = frozenset(vocab.values())
    free = (number for number in range(size) if number not in used)
    spelled = ("".join(BYTE_LEVEL.get(letter, letter) for letter in piece) for piece in common_pieces())
    added = islice((piece for piece in spelled if piece not in vocab), size)
    return with_words({**vocab, **dict(zip(added, free, strict=False))}, size)


@functools.cache
def common_pieces() -> tuple[str, ...]:
    """Return pieces of words in Python's standard library with and without a space before them, the commonest first."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="ascii", errors="ignore")
        counts.update(re.findall(r" ?[A-Za-z]+|[0-9]{1,3}| ?[!-/:-@\[-`{-~]+|[ \t\n]+", text))
    pieces: Counter[str] = Counter()
    for word, count in counts.items():
        for start in range(min(len(word), STARTS)):
            for end in range(start + 1, min(len(word), start + LONGEST) + 1):
                pieces[word[start:end]] += count
    return tuple(sorted(pieces, key=lambda piece: (-pieces[piece], piece)))
