"""Record of a window: how it was decoded, its ids, and what they listen to. The processor makes segments of it.

A record is float32, which holds every id exactly: START to COUNT, the ids, then [ids of the window, states] of
attention if words were asked for.
"""

from __future__ import annotations

import json
from typing import Any, Final

import numpy.typing as npt

from mstar_core.families.languages import LANGUAGES
from mstar_whisper.checkpoint.config import STRIDE, TokenIds
from mstar_whisper.text.segments import split
from mstar_whisper.text.tokens import Tokens
from mstar_whisper.text.words import times, words

START, FRAMES, TEMPERATURE, MEAN, RATIO, NO_SPEECH, LANGUAGE, COUNT, HEAD = range(9)
DIGITS: Final = 3


def segments_of(record: npt.NDArray[Any], tokens: Tokens, ids: TokenIds) -> bytes:
    """Return a window's segments as JSON: {"language": name, "segments": [...], "words": [...]}."""
    head, rest = record[:HEAD].tolist(), record[HEAD:]
    count, states = int(head[COUNT]), int(head[FRAMES]) // STRIDE
    written = [int(number) for number in rest[:count].tolist()]
    ends = [0.0, *times(rest[count:].reshape(-1, states))] if len(rest) > count else []
    ends += ends[-1:] * (count + 1 - len(ends))  # the last id of a window is unread: it ends with the one before it
    code = next((code for code, number in ids.languages.items() if number == int(head[LANGUAGE])), "en")
    numbers = {
        "temperature": round(head[TEMPERATURE], DIGITS),
        "avg_logprob": head[MEAN],
        "compression_ratio": head[RATIO],
        "no_speech_prob": head[NO_SPEECH],
    }
    segments, spoken = [], list[dict[str, Any]]()
    for span in split(written, ids.first_time, int(head[FRAMES]))[0]:
        own = written[span.first : span.last]
        place = _place(head[START], span.start_s, span.end_s)
        segments.append({**place, "text": tokens.text(own), "tokens": own, **numbers})
        for word in words(own, ends[span.first : span.last + 1], tokens.bytes_of, code) if ends else ():
            spoken.append({"word": word.text, **_place(head[START], word.start_s, word.end_s)})
    name = LANGUAGES.get(code, code).lower()
    return json.dumps({"language": name, "segments": segments, "words": spoken}, ensure_ascii=False).encode()


def _place(offset_s: float, start_s: float, end_s: float) -> dict[str, float]:
    return {"start": round(offset_s + start_s, DIGITS), "end": round(offset_s + end_s, DIGITS)}
