"""Made English sentences: templates with a grammar, and word salad that covers sequences templates do not have.

Run by `data` (training text) and `judge` (unseen sentences and their near-alikes).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Final

from . import words

LONGEST: Final = 170
"""Characters of a sentence at most: its prompt and 13 s of sound fill the training context."""
HELD_OUT: Final = "held out"
"""Seed prefix of the sentences that the judge uses and training excludes."""

SLOTS: Final = {
    "person": words.PEOPLE,
    "animal": words.ANIMALS,
    "thing": words.THINGS,
    "place": words.PLACES,
    "adj": words.ADJECTIVES,
    "verb": words.VERBS,
    "motion": words.MOTIONS,
    "past": words.PASTS,
    "moved": words.MOVED,
    "adv": words.ADVERBS,
    "time": words.TIMES,
    "number": words.NUMBERS,
    "greeting": words.GREETINGS,
    "who": ("i", "you", "we", "they"),
    "aux": ("can", "could", "will", "should", "must", "might"),
    "prep": ("in", "near", "behind", "under", "above", "beside"),
    "det": ("the", "my", "your", "our", "this", "that"),
}
TEMPLATES: Final = (
    "{det} {adj} {animal} {moved} {prep} the {place}",
    "{det} {person} {past} the {adj} {thing}",
    "the {person} and the {person} {moved} {adv}",
    "{who} {aux} {verb} the {thing} {prep} the {place}",
    "please {verb} the {adj} {thing} {adv}",
    "{greeting}",
    "{greeting}, {greeting}",
    "{greeting}, {who} {aux} {motion} {adv}",
    "there are {number} {thing}s {prep} the {thing}",
    "where is the {adj} {thing}",
    "did you {verb} the {thing} {adv}",
    "on {time} the {person} {past} {number} {thing}s",
    "the {thing} is {adj} and the {thing} is {adj}",
    "{det} {person} is {adj}, but {det} {animal} is {adj}",
    "{who} {aux} {motion} to the {place} when the {thing} is {adj}",
    "{who} do not {verb} the {thing} because it is {adj}",
    "the number is {number} {number} {number}",
    "a {adj} {thing} and a {adj} {thing}",
    "the {adj} {person} {past} a {thing} and {moved} {adv}",
    "every {time} the {animal} {moved} {prep} the {adj} {place}",
    "what did the {person} {verb} {prep} the {place}",
    "the {adj} {animal} jumps over the {adj} {animal}",
)
QUESTIONS: Final = ("where", "did", "what", "how", "can")


def sentence(rng: random.Random) -> str:
    """Return one sentence, at most LONGEST characters: a template, two of them, or word salad."""
    kind = rng.random()
    if kind < 0.55:
        text = filled(rng)
    elif kind < 0.70:
        text = f"{filled(rng)}{rng.choice(('. ', ', and ', ', but '))}{filled(rng)}"
    else:
        text = " ".join(rng.choice(VOCABULARY) for _ in range(rng.randint(1, 12)))
    return written(text[:LONGEST].rsplit(" ", 1)[0] if len(text) > LONGEST else text, rng)


def filled(rng: random.Random) -> str:
    """Return a template with random words."""
    parts = rng.choice(TEMPLATES).split("{")
    chosen = (rng.choice(SLOTS[slot]) + rest for slot, rest in (part.split("}") for part in parts[1:]))
    return _spelled(parts[0] + "".join(chosen))


def _spelled(text: str) -> str:
    """Return the text with its articles before vowels and its plurals as they are written: an apple, ten glasses."""
    text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    text = re.sub(r"(ss|x|sh|ch)s\b", r"\1es", text)
    return re.sub(r"(?<=[^aeiou])ys\b", "ies", text)


def written(text: str, rng: random.Random) -> str:
    """Return the text as people write it: mostly with a capital and an end mark, at times without."""
    if rng.random() < 0.15:
        return text
    mark = "?" if text.startswith(QUESTIONS) else rng.choice((".", ".", ".", ".", "", "!"))
    return text[:1].upper() + text[1:] + mark


def _inflected() -> Iterator[str]:
    yield from (word for name, group in SLOTS.items() if name != "greeting" for word in group)
    yield from words.SMALL
    nouns = (*words.PEOPLE, *words.ANIMALS, *words.THINGS, *words.PLACES)
    yield from (f"{noun}s" for noun in nouns if not noun.endswith(("s", "sh", "ch", "y", "x", "man", "child")))
    for verb in (*words.VERBS, *words.MOTIONS):
        yield f"{verb[:-1] if verb.endswith('e') and not verb.endswith('ee') else verb}ing"
        yield f"{verb}s"
    yield from (f"{adjective}ly" for adjective in words.ADJECTIVES if not adjective.endswith(("y", "le", "ll", "ic")))
    yield from (f"{adjective}ness" for adjective in words.ADJECTIVES if not adjective.endswith("y"))


VOCABULARY: Final = tuple(sorted(set(_inflected())))


def held_out(count: int, seed: int) -> list[str]:
    """Return `count` different plain sentences of 5 to 12 words that training excludes."""
    rng, found = random.Random(f"{HELD_OUT} {seed}"), dict[str, None]()
    while len(found) < count:
        text = filled(rng).replace(",", "")
        if 5 <= len(text.split()) <= 12:
            found[text] = None
    return list(found)


TRIES: Final = 50
"""Random changes for each near-alike sentence that is asked for."""


def near_alike(text: str, count: int, rng: random.Random) -> list[str]:
    """Return `count` different sentences that differ from `text` in one or two words of the same class.

    Of a text with too few such words the rest are any other sentences.
    """
    spoken, found = text.split(), dict[str, None]()
    groups = [[group for group in SLOTS.values() if word in group] for word in spoken]
    places = [index for index, group in enumerate(groups) if group]
    for _ in range(TRIES * count):
        if len(found) == count or not places:
            break
        other = list(spoken)
        for index in rng.sample(places, min(len(places), rng.randint(1, 2))):
            other[index] = rng.choice(rng.choice(groups[index]))
        if other != spoken and " " not in "".join(other):
            found[_spelled(" ".join(other))] = None
    while len(found) < count:
        if (any_other := plain(filled(rng))) != plain(text):
            found[any_other] = None
    return list(found)


def training(seed: int, start: int, count: int, excluded: frozenset[str] = frozenset()) -> list[str]:
    """Return sentences `start` to `start + count` of the endless training text, without the excluded ones.

    Each sentence depends on the seed and its number alone, so the text is the same for any number of processes.
    excluded: as `plain` writes them.
    """
    texts = []
    for number in range(start, start + count):
        rng = random.Random(f"{seed} {number}")
        text = sentence(rng)
        while plain(text) in excluded:
            text = sentence(rng)
        texts.append(text)
    return texts


def plain(text: str) -> str:
    """Return the words of a text in lower case without marks."""
    kept = "".join(char if char.isalnum() or char in " '" else " " for char in text.lower())
    return " ".join(kept.split())
