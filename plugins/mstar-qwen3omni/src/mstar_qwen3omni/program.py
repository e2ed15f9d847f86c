"""Programs of the three partitions of a Qwen3-Omni request. The conductor runs them concurrently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mstar_core.plugin import ProgramRequest, Run, Segment
from mstar_core.plugin.program import ProgramGenerator

PREFILL: Final = {
    "text": "prefill_text",
    "audio": "prefill_audio",
    "image": "prefill_vision",
    "video": "prefill_vision",
    "audio_video": "prefill_audio_vision",
}
"""Kind of a segment -> its walk. A media segment has only its pads; its markers belong to the text around it.

The last segment is text and ends with `<|im_start|>assistant` and a new line.
"""

PLACED: Final = {"text": "prefill_placed_text", "audio": "prefill_placed_audio"}
"""Kind of a segment -> its walk if it has positions of its own, as text and audio after a video with sound may have."""

CONTINUES: Final = "continues"
"""Input of a segment that is a window of a longer sound: whether another window is before it."""

TALKER_TOKENS: Final = "talker_tokens"
"""Input of a text segment for the talker: its ids without system turns and earlier answers; absent if none is left."""

TALKER_POSITIONS: Final = "talker_positions"
"""Input of a vision segment for the talker: positions in its own, shorter sequence; absent if they are consecutive."""


def thinker(request: ProgramRequest) -> ProgramGenerator:
    """Run prefill for every segment in order, then decode. The last segment starts the answer with the first token."""
    reading = [Run(_walk(segment), sample=segment.is_last, **_read(segment)) for segment in request.segments]
    yield [*reading, Run("thinker_decode", max_iters=request.params.max_output_tokens - 1)]


def _walk(segment: Segment) -> str:
    return PLACED.get(segment.kind, PREFILL[segment.kind]) if "positions" in segment.inputs else PREFILL[segment.kind]


def _read(segment: Segment) -> dict[str, Any]:
    return {name: segment for name in segment.inputs if name not in (TALKER_TOKENS, TALKER_POSITIONS)}


def talker(request: ProgramRequest) -> ProgramGenerator:
    """Run prefill for the user's turns and the start of the answer, then decode.

    A media segment waits for the thinker's hidden states, the opening for the first id of text. If the thinker writes
    no text, the runs end without sound.
    """
    listening = [run for segment in request.segments for run in _listen(segment)]
    limit = request.params.talker_max_tokens
    yield [*listening, Run("talker_last_prefill"), Run("talker_decode", max_iters=limit)]


def _listen(segment: Segment) -> Iterator[Run]:
    if segment.kind == "text":
        if TALKER_TOKENS in segment.inputs:
            yield Run("talker_prefill_text", sample=False, tokens=segment.inputs[TALKER_TOKENS])
    elif TALKER_POSITIONS in segment.inputs:
        yield Run("talker_prefill_placed_media", sample=False, positions=segment.inputs[TALKER_POSITIONS])
    else:
        yield Run("talker_prefill_media", sample=False)


def code2wav(request: ProgramRequest) -> ProgramGenerator:
    """Convert frames to sound as they arrive, until their stream ends, even if it has none."""
    yield Run("code2wav_chunk")
