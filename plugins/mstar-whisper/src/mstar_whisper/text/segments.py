"""Segments of a window's ids: texts between two timestamp tokens. Used by the program and by the processor.

Source: long-form decoding of the reference, `transformers`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mstar_whisper.checkpoint.config import HOP, RATE, STRIDE

STEP_S: Final = STRIDE * HOP / RATE
"""Seconds between two timestamp tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ids [first, last) of a window, timestamp tokens included, and their seconds from its start."""

    first: int
    last: int
    start_s: float
    end_s: float


def split(ids: Sequence[int], first_time: int, frames: int) -> tuple[list[Span], int]:
    """Return the segments of a window, and the frames after which the next window starts.

    ids: drawn ids without the end. frames: of the window that hold sound.
    """
    is_time = [number >= first_time for number in ids]
    ends_once = is_time[-2:] == [False, True]
    cuts = [index + 1 for index in range(len(ids) - 1) if is_time[index] and is_time[index + 1]]
    if not cuts:
        last = next((number - first_time for number in reversed(ids) if number > first_time), None)
        end = int(frames / STRIDE) if last is None else last
        return [Span(first=0, last=len(ids), start_s=0.0, end_s=end * STEP_S)], frames
    if ends_once:
        cuts.append(len(ids))
    else:
        cuts[-1] += 1  # the unfinished segment behind the last pair is dropped, its first timestamp is kept
    spans, first = [], 0
    for number, cut in enumerate(cuts):
        is_open = number == len(cuts) - 1 and not ends_once
        end = ids[cut - 2] if is_open else ids[cut - 1]
        spans.append(
            Span(first=first, last=cut, start_s=(ids[first] - first_time) * STEP_S, end_s=(end - first_time) * STEP_S)
        )
        first = cut
    return spans, frames if ends_once else (ids[first - 2] - first_time) * STRIDE


def compression(ids: Sequence[int], vocab: int) -> float:
    """Return the bytes of the ids over those of their compressed form. Repetition compresses well."""
    width = int(math.log2(vocab) / 8) + 1
    data = b"".join(int(number).to_bytes(width, "little") for number in ids)
    return len(data) / len(zlib.compress(data))
