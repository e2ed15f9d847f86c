"""Rows of a prompt: a text id and the codes of a frame each, whose embeddings are summed (specification section 6).

A row is int64 [1 + groups]: the text id, then one code per group. A code of -1 is absent. In a prompt with a cloned
voice, group 0 may be SPEAKER, or FRAME - i for frame i of the recording, until its codes are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_qwen3tts.checkpoint.config import TTSConfig

    Rows = npt.NDArray[np.int64]

NONE: Final = -1
SPEAKER: Final = -2
FRAME: Final = -3
AUTO: Final = "auto"
CHINESE: Final = "chinese"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """A speech and its manner. text, instruction, reference: ids; header: those of the three first positions.

    voice: a preset voice or empty. is_cloned: a speaker vector takes its place. frames: of the recording if its text is
    known, else 0. is_whole: the whole text stands in the prompt, in place of being read along with the speech. is_open:
    more text follows, so that it is read along.
    """

    header: Sequence[int]
    text: Sequence[int]
    instruction: Sequence[int] = ()
    language: str = AUTO
    voice: str = ""
    is_cloned: bool = False
    reference: Sequence[int] = ()
    frames: int = 0
    is_whole: bool = True
    is_open: bool = False


def layout(speech: Speech, config: TTSConfig) -> tuple[Rows, list[int]]:
    """Return the rows of a prompt, int64 [n, 1 + groups], and the text ids that follow during decoding.

    The ids end with that of the end of text, unless the prompt holds it.
    """
    ids, codes = config.ids, config.codes
    prefix = [*_prefix(speech, config), codes.pad]
    rows = [(token, NONE) for token in (*speech.instruction, *speech.header)]
    rows += [(ids.tts_pad, code) for code in prefix[:-1]] + [(ids.tts_bos, prefix[-1])]
    said = [*speech.reference, *speech.text] if speech.frames else list(speech.text)
    ending = said if speech.is_open else [*said, ids.tts_eos]
    spoken = [codes.bos, *(FRAME - index for index in range(speech.frames))]
    if speech.is_whole:
        rows += [(token, codes.pad) for token in ending] + [(ids.tts_pad, code) for code in spoken]
        return _rows(rows, config), []
    padded = ending + [ids.tts_pad] * (len(spoken) - len(ending))
    rows += zip(padded, spoken, strict=False)
    return _rows(rows, config), ending[len(spoken) :]


def _prefix(speech: Speech, config: TTSConfig) -> list[int]:
    """Return the codes before the padding: language, then the speaker."""
    codes, language = config.codes, speech.language
    if language in (CHINESE, AUTO):
        language = config.dialects.get(speech.voice, language)
    if language == AUTO:
        found = [codes.nothink, codes.think_bos, codes.think_eos]
    else:
        found = [codes.think, codes.think_bos, config.languages[language], codes.think_eos]
    if speech.is_cloned:
        return [*found, SPEAKER]
    return [*found, config.voices[speech.voice]] if speech.voice else found


def _rows(pairs: Sequence[tuple[int, int]], config: TTSConfig) -> Rows:
    rows = np.full((len(pairs), 1 + config.groups), NONE, dtype=np.int64)
    rows[:, :2] = pairs
    return rows
