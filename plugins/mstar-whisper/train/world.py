"""The world of `whisper:mini`: English sentences of about 130 words that `orpheus:mini` knows.

One sentence in ten is held out: training never hears it, and the judge takes nothing else.
"""

from __future__ import annotations

import random
import zlib
from typing import Final

SLOTS: Final = {
    "person": "mother father sister brother friend teacher doctor farmer king queen".split(),
    "animal": "dog cat horse cow fox bear wolf bird".split(),
    "thing": "table chair door window book apple box hat ball letter clock boat".split(),
    "place": "house school garden market river hill forest park bridge road city castle".split(),
    "adj": "red green blue black white small big old young new cold happy quiet strong".split(),
    "moved": "walked ran jumped sat slept waited played sang".split(),
    "past": "saw found carried brought opened painted sold liked".split(),
    "verb": "open close bring take find wash".split(),
    "prep": "near behind under over beside across".split(),
    "time": "today tomorrow again slowly quickly together".split(),
    "number": "zero one two three four five six seven eight nine ten".split(),
    "det": "the my your".split(),
    "greeting": ("hello", "good morning", "good evening", "thank you", "how are you today", "see you tomorrow"),
}
TEMPLATES: Final = (
    "the {adj} {animal} {moved} {prep} the {place}",
    "the {adj} {animal} {moved} {prep} the {adj} {place} {time}",
    "the {animal} {moved} {time}",
    "{det} {person} {past} the {adj} {thing}",
    "{det} {person} {past} a {thing} {time}",
    "the {person} and the {person} {moved} {time}",
    "where is the {adj} {thing}",
    "where is {det} {person}",
    "{det} {thing} is {adj} and {det} {thing} is {adj}",
    "{det} {person} is {adj}",
    "please {verb} the {adj} {thing}",
    "there are {number} {animal}s {prep} the {place}",
    "the number is {number} {number} {number}",
    "{number} {number} {number} {number}",
    "a {adj} {thing} and a {adj} {animal}",
    "{greeting}",
)
QUESTIONS: Final = ("where", "how")
HELD_OUT: Final = 10
"""One of so many sentences is held out."""


def sentence(chance: random.Random, *, held_out: bool) -> str:
    """Return a sentence as it is written: with a capital, and a mark at its end."""
    while True:
        parts = chance.choice(TEMPLATES).split("{")
        text = parts[0] + "".join(chance.choice(SLOTS[slot]) + rest for slot, rest in (p.split("}") for p in parts[1:]))
        if (zlib.crc32(text.encode()) % HELD_OUT == 0) == held_out:
            text = text.replace("a apple", "an apple").replace("a old", "an old")
            return f"{text[0].upper()}{text[1:]}{'?' if text.startswith(QUESTIONS) else '.'}"


def words() -> list[str]:
    """Return every word that a sentence has, as it is written."""
    inner = {word for slot in SLOTS.values() for text in slot for word in text.split()}
    inner |= {word for text in TEMPLATES for word in text.split() if "{" not in word} | {"an"}
    inner |= {f"{animal}s" for animal in SLOTS["animal"]}
    first = {text.split()[0] for text in TEMPLATES if not text.startswith("{")}
    first |= {*SLOTS["number"], *SLOTS["det"], *(text.split()[0] for text in SLOTS["greeting"])}
    return sorted({*inner, *(word.capitalize() for word in first)})


def plain(text: str) -> list[str]:
    """Return the words of a text in lower case, without marks."""
    return "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()
