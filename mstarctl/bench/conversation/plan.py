"""Plan of spoken conversations: turns, pauses and interrupts of each session, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from mstarctl.talk.turns import SoundTurn

LEAST_PAUSE_S = 0.5
MOST_PAUSE_S = 1.5
LEAST_HEARD_S = 0.3
MOST_HEARD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """A turn. pause_s: silence before it. interrupt_s: the next turn begins when this much of the answer was heard."""

    sound: SoundTurn
    pause_s: float
    interrupt_s: float | None = None


def planned(
    sounds: Sequence[SoundTurn], *, session: int, turns: int | None, interrupt_share: float, seed: int
) -> Iterator[PlannedTurn]:
    """Yield the turns of a session, without end for None. The last turn of a session is not interrupted."""
    chance = random.Random(f"{seed}/{session}")
    for number in count() if turns is None else range(turns):
        is_interrupted = chance.random() < interrupt_share and (turns is None or number < turns - 1)
        heard_s = chance.uniform(LEAST_HEARD_S, MOST_HEARD_S)
        yield PlannedTurn(
            sound=sounds[chance.randrange(len(sounds))],
            pause_s=chance.uniform(LEAST_PAUSE_S, MOST_PAUSE_S),
            interrupt_s=heard_s if is_interrupted else None,
        )
