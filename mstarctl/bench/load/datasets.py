"""Datasets from files as workloads: conversations like ShareGPT's, and sentences to speak like those of SeedTTS."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from mstar_core.errors import ConfigError, UsageError, did_you_mean
from mstar_core.plugin.offers import WorkloadSpec
from mstar_core.workloads import ServedModel, WorkloadRequest
from mstar_core.workloads.generic import WORDS_PER_TOKEN, forced
from mstarctl.bench.load.workloads import Workload
from mstarctl.bench.measure.tokens import TokenCounter

ASKS: Final = ("human", "user")
ANSWERS: Final = ("gpt", "assistant", "chatgpt", "bing", "bard")
SEEDTTS_FIELDS: Final = 4
T = TypeVar("T")
SPEECH: Final = "mstar_core.workloads.generic:speech"


@dataclass(frozen=True, slots=True)
class Question:
    """First question of a conversation. tokens: of its answer. prompt_tokens: of the question itself."""

    text: str
    tokens: int
    prompt_tokens: int


def dataset_workload(name: str, offered: Sequence[WorkloadSpec], count_tokens: TokenCounter | None = None) -> Workload:
    """Return the workload of `KIND:FILE`. offered: of the model, whose speech decides the outputs of SeedTTS texts.

    Raises UsageError for an unknown kind, and ConfigError that names file and line for a file that cannot be read.
    """
    kind, colon, place = name.partition(":")
    if not colon or not place or kind not in READERS:
        raise UsageError(
            f"--dataset is {name!r}",
            hint=f"{did_you_mean(kind, READERS)}: --dataset sharegpt:FILE.json or --dataset seedtts:meta.lst",
        )
    return READERS[kind](Path(place), offered, count_tokens)


def _sharegpt(path: Path, offered: Sequence[WorkloadSpec], count_tokens: TokenCounter | None) -> Workload:
    """Return a chat of each conversation: its first question, and an answer of the length of the first one."""
    exchanges = list(_exchanges(path, count_tokens or _words))
    if not exchanges:
        raise ConfigError(
            f"{path} contains no conversation of a question and an answer",
            hint='[{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]',
            file=str(path),
        )

    def draw(card: ServedModel, seed: int) -> Iterator[WorkloadRequest]:
        room = card.max_model_len
        fitting = [exchange for exchange in exchanges if not room or exchange.prompt_tokens + exchange.tokens <= room]
        if not fitting:
            raise UsageError(f"no conversation of {path} fits {room} tokens", hint="choose another dataset")
        for number, exchange in _shuffled(fitting, seed):
            params = {"max_output_tokens": exchange.tokens, "ignore_eos": True, "seed": number}
            yield WorkloadRequest(outputs=("text",), text=exchange.text, params=forced(card, params))

    return Workload(name=path.stem, title=f"{len(exchanges)} conversations of a file", source=draw)


def _exchanges(path: Path, count: TokenCounter) -> Iterator[Question]:
    text = _text_of(path)
    try:
        items = json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise ConfigError(f"{path}:{line} is not JSON", str(error), file=str(path), line=line) from error
    if not isinstance(items, list):
        raise ConfigError(f"{path}:1 is not a list", hint="a list of conversations", file=str(path), line=1)
    # JSON has no lines of its own, so an invalid item is named by the line on which it begins.
    for number, item in enumerate(items):
        turns = item.get("conversations", item.get("messages")) if isinstance(item, dict) else None
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            line = _line_of(text, number)
            raise ConfigError(
                f"{path}:{line} item {number} is not a conversation",
                'it needs "conversations", a list of turns',
                'each turn: {"from": "human", "value": "..."}',
                file=str(path),
                line=line,
            )
        said = [(_speaker(turn), str(turn.get("value", turn.get("content")) or "").strip()) for turn in turns]
        said = [turn for turn in said if turn[0] in (*ASKS, *ANSWERS)]
        match said[:2]:
            case [(asks, question), (answers, answer)] if asks in ASKS and answers in ANSWERS and question and answer:
                yield Question(question, tokens=max(1, count(answer)), prompt_tokens=count(question))


def _speaker(turn: Mapping[str, Any]) -> str:
    return str(turn.get("from", turn.get("role", ""))).lower()


def _line_of(text: str, number: int) -> int:
    """Return the line on which item `number` of a JSON list begins."""
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    for left in range(number, -1, -1):
        while text[at] in " \t\r\n,":
            at += 1
        if not left:
            break
        _, at = decoder.raw_decode(text, at)
    return text.count("\n", 0, at) + 1


def _words(text: str) -> int:
    """Return an estimate of the tokens of a text by its words."""
    return max(1, round(len(text.split()) / WORDS_PER_TOKEN))


def _seedtts(path: Path, offered: Sequence[WorkloadSpec], count_tokens: TokenCounter | None) -> Workload:
    """Return the texts of a meta.lst to be spoken. Voices of its recordings are not cloned."""
    texts = list(_sentences(path))
    if not texts:
        raise ConfigError(f"{path} contains no texts", hint="utt|prompt_text|prompt_wav|text", file=str(path))
    options = next((dict(spec.options) for spec in offered if spec.target == SPEECH), {})
    per_word = int(options.get("ids_per_word", 0))

    def draw(card: ServedModel, seed: int) -> Iterator[WorkloadRequest]:
        for number, text in _shuffled(texts, seed):
            params: dict[str, Any] = {"seed": number} if card.endpoints else {}
            if per_word and card.endpoints:
                params |= {"max_output_tokens": per_word * len(text.split()), "ignore_eos": True}
            yield WorkloadRequest(outputs=tuple(options.get("outputs", ("audio",))), text=text, params=params)

    return Workload(name=path.stem, title=f"{len(texts)} texts of a file to speak", source=draw)


def _sentences(path: Path) -> Iterator[str]:
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        fields = line.split("|")
        if len(fields) < SEEDTTS_FIELDS or not fields[3].strip():
            raise ConfigError(
                f"{path}:{number} is not a line of a meta.lst",
                f"it has {len(fields)} fields",
                "utt|prompt_text|prompt_wav|text",
                file=str(path),
                line=number,
            )
        yield fields[3].strip()


def _shuffled(items: Sequence[T], seed: int) -> Iterator[tuple[int, T]]:
    """Yield numbered items without end, each round in another order."""
    number, chance = 0, random.Random(f"dataset/{seed}")
    while True:
        for item in chance.sample(items, len(items)):
            yield number, item
            number += 1


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", error.strerror or "", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8", str(error), file=str(path)) from error


READERS: Final[Mapping[str, Callable[[Path, Sequence[WorkloadSpec], TokenCounter | None], Workload]]] = {
    "sharegpt": _sharegpt,
    "seedtts": _seedtts,
}
"""Kinds of datasets by the word before the colon."""
