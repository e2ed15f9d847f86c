"""Speaker of a conversation, on a clock of the test."""

from __future__ import annotations

from mstar_core.api.realtime.floor import Floor
from mstar_core.api.realtime.items import MessageEntry, SpokenPart
from mstar_core.api.realtime.response import OpenOutput, RealtimeResponse
from mstar_core.api.realtime.settings import RealtimeSettings
from mstar_core.api.realtime.sound.spoken import SpokenText

RATE = 1000


def answer(seconds: float) -> RealtimeResponse:
    """Return a finished response with so much sound."""
    response = RealtimeResponse(settings=RealtimeSettings(output="audio"))
    spoken = SpokenText(RATE)
    spoken.sound(int(seconds * RATE))
    entry = MessageEntry(id="item", role="assistant", parts=[SpokenPart(spoken)])
    response.outputs.append(OpenOutput(0, entry))
    response.state = "completed"
    return response


def test_the_model_speaks_until_its_sound_has_been_played() -> None:
    floor, response = Floor(), answer(2.0)
    floor.sounded(response, 10.0)
    speakers = [floor.speaker(None, now, is_user_speaking=False) for now in (10.0, 11.9, 12.0)]
    assert speakers == ["model", "model", "silence"]


def test_an_answer_without_output_is_thinking() -> None:
    waiting = RealtimeResponse(settings=RealtimeSettings(output="audio"))
    assert Floor().speaker(waiting, 0.0, is_user_speaking=False) == "thinking"


def test_speech_interrupts_an_answer_that_is_still_played() -> None:
    floor, response = Floor(), answer(2.0)
    floor.sounded(response, 10.0)
    assert floor.user_began(None, 11.0, interrupts=True)
    assert floor.speaker(None, 11.1, is_user_speaking=True) == "interrupted"
    assert floor.speaker(None, 11.2, is_user_speaking=False) == "silence", "its playback has stopped"
    assert not floor.user_began(None, 11.3, interrupts=True)
    assert (floor.speaker(None, 11.4, is_user_speaking=True), floor.interrupts) == ("user", 1)


def test_speech_that_may_not_interrupt_does_not_count() -> None:
    floor, response = Floor(), answer(2.0)
    floor.sounded(response, 10.0)
    assert not floor.user_began(response, 11.0, interrupts=False)
    assert (floor.interrupts, floor.speaker(None, 11.1, is_user_speaking=False)) == (0, "model")
