"""Plan of spoken conversations: turns, pauses and interrupts of each session, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

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
    sounds: Sequence[SoundTurn], *, sessions: int, turns: int, interrupt_share: float, seed: int
) -> list[list[PlannedTurn]]:
    """Return the turns of each session. The last turn of a session is not interrupted."""
    plans = []
    for session in range(sessions):
        chance = random.Random(f"{seed}/{session}")
        plan = []
        for number in range(turns):
            is_interrupted = chance.random() < interrupt_share and number < turns - 1
            heard_s = chance.uniform(LEAST_HEARD_S, MOST_HEARD_S)
            plan.append(
                PlannedTurn(
                    sound=sounds[chance.randrange(len(sounds))],
                    pause_s=chance.uniform(LEAST_PAUSE_S, MOST_PAUSE_S),
                    interrupt_s=heard_s if is_interrupted else None,
                )
            )
        plans.append(plan)
    return plans
