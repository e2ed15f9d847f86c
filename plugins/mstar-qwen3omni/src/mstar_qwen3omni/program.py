"""Programs of the three partitions of a Qwen3-Omni request. The conductor runs them concurrently."""

from __future__ import annotations

from typing import Any, Final

from mstar_core.plugin import ProgramRequest, Run, Segment
from mstar_core.plugin.program import ProgramGenerator

HISTORY: Final = "history"
"""Kind of system turns and earlier answers, which only the thinker reads."""

PREFILL: Final = {
    "text": "prefill_text",
    HISTORY: "prefill_history",
    "audio": "prefill_audio",
    "image": "prefill_vision",
    "video": "prefill_vision",
    "audio_video": "prefill_audio_vision",
}
"""Kind of a segment -> its walk. A media segment has only its pads; its markers belong to the text around it."""

TALKER_ONLY: Final = "talker_positions"
"""Input for the talker: positions in its own, shorter sequence."""


def thinker(request: ProgramRequest) -> ProgramGenerator:
    """Run prefill for every segment in order, then decode. The last segment starts the answer with the first token."""
    reading = [Run(PREFILL[segment.kind], sample=segment.is_last, **_heard(segment)) for segment in request.segments]
    yield [*reading, Run("thinker_decode", max_iters=request.params.max_output_tokens - 1)]


def _heard(segment: Segment) -> dict[str, Any]:
    return {name: segment for name in segment.inputs if name != TALKER_ONLY}


def talker(request: ProgramRequest) -> ProgramGenerator:
    """Run prefill for the thinker's user segments, then decode. Each run waits for its part of the stream."""
    spoken = [segment for segment in request.segments if segment.kind != HISTORY]
    listening = [Run("talker_prefill", sample=False, positions=segment.inputs[TALKER_ONLY]) for segment in spoken]
    yield [*listening, Run("talker_last_prefill"), Run("talker_decode", max_iters=request.params.talker_max_tokens - 1)]


def code2wav(request: ProgramRequest) -> ProgramGenerator:
    """Convert frames to sound as they arrive, until their stream ends, even if it has none."""
    yield Run("code2wav_chunk")
