"""Turns of models that take memory: by arrival, with a limited number of passes."""

from __future__ import annotations

from random import Random

import pytest

from mstar_core.gateway.fleet.turns import MOST_PASSES, MemoryTurn, MemoryTurns


class Wants:
    """Whether the memory of a turn is free."""

    def __init__(self, fits: bool = True) -> None:
        self.fits = fits

    def __call__(self) -> bool:
        return self.fits


def test_turns_wait_only_for_earlier_ones_of_their_devices() -> None:
    turns = MemoryTurns()
    wants = Wants(fits=False)
    first, second, other = (turns.enter(name, keys, wants) for name, keys in (("a", "01"), ("b", "12"), ("c", "3")))
    assert turns.may_take(first) and turns.may_take(other) and not turns.may_take(second)
    wants.fits = True
    assert not turns.may_take(second), "the first takes its memory now"
    turns.leave(first)
    assert turns.may_take(second)


def test_one_at_a_time_passes_a_turn_that_waits_for_room() -> None:
    turns = MemoryTurns()
    large, memory = turns.enter("large", "0", Wants(fits=False)), Wants()
    passing, next_one, giver = (turns.enter(name, "0", memory) for name in ("b", "c", "d"))
    large.givers.add("d")
    assert not turns.may_take(giver), "it would take back the memory that it has given"
    assert turns.may_take(passing) and turns.may_take(passing) and large.passes == 1
    assert turns.is_passed(large) and not turns.may_take(next_one)
    memory.fits = False
    assert not turns.may_take(passing) and not turns.is_passed(large), "its memory was taken: it waits"
    memory.fits = True
    assert turns.may_take(next_one) and (large.passes, passing.passes) == (2, 1)
    turns.leave(next_one)
    assert not turns.may_take(passing), f"{MOST_PASSES} have passed"


@pytest.mark.parametrize("seed", range(5))
def test_every_turn_comes_and_none_is_passed_too_often(seed: int) -> None:
    """Random arrivals of small models, which always fit, beside large ones, which fit at times."""
    random, turns = Random(seed), MemoryTurns()
    waiting: list[MemoryTurn] = []
    taken = 0
    for number in range(400):
        if number < 200:
            wants = (lambda: random.random() < 0.5) if random.random() < 0.3 else Wants()
            waiting.append(turns.enter("m", random.sample("012", random.randint(1, 2)), wants))
        for turn in random.sample(waiting, len(waiting)):
            if turns.may_take(turn) and turn.fits():
                assert turn.is_passing or not turns.ahead(turn)
                turns.leave(turn)
                waiting.remove(turn)
                taken += 1
            assert turn.passes <= MOST_PASSES
    assert not waiting and taken == 200
