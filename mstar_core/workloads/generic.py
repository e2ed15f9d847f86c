"""Workloads that several models share, as targets of `WorkloadSpec`: chats, speech, and questions about images.

Each function yields requests without end; the same card, seed and options give the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mstar_core.workloads.media import picture
from mstar_core.workloads.request import ServedModel, WorkloadRequest, length, numbered
from mstar_core.workloads.words import sentence

WORDS_PER_TOKEN = 0.75


def chat(
    card: ServedModel, seed: int, *, least_in: int = 32, most_in: int = 1024, least_out: int = 16, most_out: int = 512
) -> Iterator[WorkloadRequest]:
    """Yield texts that ask for text, with log-normal lengths in tokens. The length of an answer is forced."""
    room = card.max_model_len or most_in + most_out
    for number, chance in enumerate(numbered(seed)):
        asked = length(chance, least_in, min(most_in, max(least_in, room // 4)))
        answered = length(chance, least_out, min(most_out, max(least_out, room // 4)))
        params = {"max_output_tokens": answered, "ignore_eos": True, "seed": number}
        text = sentence(chance, max(1, round(asked * WORDS_PER_TOKEN)))
        yield WorkloadRequest(outputs=("text",), text=text, params=forced(card, params))


def forced(card: ServedModel, params: Mapping[str, int]) -> Mapping[str, int]:
    """Return parameters that force a length: all for a model that publishes its own, else the limit alone.

    Every model of this runtime accepts them; a server without a published schema gets the OpenAI name.
    """
    if card.endpoints:
        return params
    return {"max_tokens": params["max_output_tokens"]} if "max_output_tokens" in params else {}


def speech(
    card: ServedModel,
    seed: int,
    *,
    least: int = 8,
    most: int = 25,
    outputs: tuple[str, ...] = ("audio",),
    ids_per_word: int = 0,
) -> Iterator[WorkloadRequest]:
    """Yield texts of `least` to `most` words to be spoken.

    ids_per_word: force this length of speech, for models whose parameters limit it; 0 leaves it to the model.
    """
    for number, chance in enumerate(numbered(seed)):
        words = chance.randint(least, most)
        params = {"seed": number} if card.endpoints else {}
        if ids_per_word and card.endpoints:
            params |= {"max_output_tokens": ids_per_word * words, "ignore_eos": True}
        yield WorkloadRequest(outputs=outputs, text=sentence(chance, words), params=params)


def see(
    card: ServedModel, seed: int, *, side: int = 1024, least_out: int = 16, most_out: int = 128
) -> Iterator[WorkloadRequest]:
    """Yield questions about one image of `side` x `side` pixels. The length of an answer is forced."""
    pixels = 64 if card.is_tiny else side
    for number, chance in enumerate(numbered(seed)):
        params = {"max_output_tokens": length(chance, least_out, most_out), "ignore_eos": True, "seed": number}
        yield WorkloadRequest(
            outputs=("text",),
            text="Describe the picture.",
            files=(("picture.png", picture(chance, pixels)),),
            params=forced(card, params),
        )
