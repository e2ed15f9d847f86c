"""The admission queue never leaks a place or slot, keeps the order of arrival, and always advances."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.api.admission import AdmissionQueue
from mstar_core.errors import Overloaded

MOVES = st.lists(st.tuples(st.sampled_from(["come", "go", "cancel", "break"]), st.integers(0, 20)), max_size=60)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3), st.integers(0, 3), MOVES)
def test_places_and_slots_add_up_after_every_move(slots: int, queue: int, moves: list[tuple[str, int]]) -> None:
    asyncio.run(_play(slots, queue, moves))


async def _play(slots: int, queue: int, moves: list[tuple[str, int]]) -> None:
    admission = AdmissionQueue(slots, queue)
    alive: list[tuple[asyncio.Task[None], asyncio.Future[bool]]] = []
    order: list[int] = []

    async def request(number: int, end: asyncio.Future[bool]) -> None:
        with admission.place() as place:
            await place.run()
            order.append(number)
            if await end:
                raise ValueError("the request broke")

    for number, (move, pick) in enumerate(moves):
        if move == "come":
            end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            if admission.places >= slots + queue:
                with pytest.raises(Overloaded) as over:
                    admission.check()
                assert 1 <= over.value.retry_after_s <= 60
            else:
                alive.append((asyncio.create_task(request(number, end)), end))
        elif alive:
            task, end = alive.pop(pick % len(alive))
            if move == "cancel":
                task.cancel()
            else:
                end.set_result(move == "break")
                if not task.done():
                    await asyncio.sleep(0)
            if move != "cancel" and not task.done():
                task.cancel()  # it was still waiting for a slot
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert admission.places == len(alive)
        assert admission.running == min(slots, len(alive))
        assert admission.waiting == len(alive) - admission.running
    for task, _ in alive:
        task.cancel()
    await asyncio.gather(*(task for task, _ in alive), return_exceptions=True)
    assert (admission.places, admission.running, admission.waiting) == (0, 0, 0)
    assert order == sorted(order)


async def test_a_paused_queue_gives_no_slot_and_goes_on_in_order() -> None:
    admission = AdmissionQueue(2, 1)
    with admission.place() as running, admission.place() as first, admission.place() as second:
        running.enter()
        admission.pause(is_paused=True)
        waits = [first.enter(), second.enter()]
        assert not admission.is_free and not any(turn.done() for turn in waits)
        with pytest.raises(Overloaded):
            admission.check()
        running.leave()
        assert admission.running == 0 and not any(turn.done() for turn in waits)
        admission.pause(is_paused=False)
        assert all(turn.done() for turn in waits) and admission.running == 2


async def test_new_limits_keep_places_and_admit_what_waits() -> None:
    admission = AdmissionQueue(1, 2)
    with admission.place() as first, admission.place() as second, admission.place() as third:
        turns = [first.enter(), second.enter(), third.enter()]
        admission.limit(2, 0, 0)
        assert [turn.done() for turn in turns] == [True, True, False]
        with pytest.raises(Overloaded):
            admission.check()


async def test_the_time_to_wait_follows_how_fast_requests_end() -> None:
    now = [0.0]
    admission = AdmissionQueue(1, 3, clock=lambda: now[0])
    for _ in range(5):
        with admission.place():
            now[0] += 4.0
    with admission.place(), admission.place(), admission.place(), admission.place(), pytest.raises(Overloaded) as over:
        admission.check()
    assert 10 <= over.value.retry_after_s <= 20
