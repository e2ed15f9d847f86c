"""Programs of the three partitions of a request. The conductor runs them concurrently."""

from __future__ import annotations

from typing import Final

from mstar_core.plugin import ProgramRequest, Receive, Run
from mstar_core.plugin.program import ProgramGenerator
from mstar_qwen3tts.params import MOST_FRAMES

VOICE: Final = "voice"
"""Kind of the segment with the recording of a cloned voice whose text is known."""

LIVE: Final = "live_text"
"""Input that grows with the ids of a text which arrives while it is spoken."""

TIMBRE: Final = "timbre"
"""The same, if the speaker's vector alone is used."""


def text(request: ProgramRequest) -> ProgramGenerator:
    """Give the talker the text that its prompt does not hold. The end of this program is the end of the text."""
    if "trailing" in request.inputs:
        yield Run("text", ids=request.inputs["trailing"])
    while LIVE in request.growing and (more := (yield Receive(LIVE))):
        yield Run("text", ids=more)


def talker(request: ProgramRequest) -> ProgramGenerator:
    """Read the prompt, whose id is the first code, then speak."""
    prompt = request.inputs["prompt"]
    read = Run("talker_prefill", prompt=prompt)
    for segment in request.segments:
        read = Run(f"talker_prefill_{segment.kind}", audio=segment, prompt=prompt)
    yield [read, Run("talker_decode", max_iters=request.params.max_output_tokens or MOST_FRAMES)]


def codec(request: ProgramRequest) -> ProgramGenerator:
    """Turn frames into sound as they come, going on from a recording if its text is known."""
    begin = Run("codec_begin", fresh=request.inputs["fresh"])
    for segment in request.segments:
        if segment.kind == VOICE:
            begin = Run("codec_begin_voice", audio=segment)
    yield [begin, Run("codec_chunk")]
