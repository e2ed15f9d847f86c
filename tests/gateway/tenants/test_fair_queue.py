"""Fair order of tenants that wait for a model: by weight, bounded, and untouched by requests that leave."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.errors import Overloaded
from mstar_core.gateway.tenants.fair_queue import FairQueue, Ticket
from mstar_core.gateway.tenants.lanes import Lane

COSTS = st.integers(min_value=1, max_value=4096)
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 5.0])


def fill(queue: FairQueue[int], tenant: str, count: int, weight: float = 1.0, cost: float = 1.0) -> list[Ticket[int]]:
    tickets = [Ticket(tenant, weight, cost, number) for number in range(count)]
    for ticket in tickets:
        assert queue.push(ticket) is None
    return tickets


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(WEIGHTS, st.lists(COSTS, min_size=1, max_size=40)), min_size=2)
)
def test_tenants_that_wait_get_work_by_their_weights(tenants: dict[str, tuple[float, list[int]]]) -> None:
    """While two tenants wait, their served work over weight differs by at most one request of each."""
    queue: FairQueue[int] = FairQueue(limit=1000)
    for name, (weight, costs) in tenants.items():
        for cost in costs:
            queue.push(Ticket(name, weight, cost, 0))
    served = Counter[str]()
    while (ticket := queue.pop()) is not None:
        served[ticket.tenant] += ticket.cost  # type: ignore[assignment]  # counts work
        waiting = [name for name in tenants if queue.waiting(name)]
        for one in waiting:
            for other in waiting:
                bound = max(tenants[one][1]) / tenants[one][0] + max(tenants[other][1]) / tenants[other][0]
                assert abs(served[one] / tenants[one][0] - served[other] / tenants[other][0]) <= bound + 1e-9
    assert all(served[name] == sum(costs) for name, (_, costs) in tenants.items())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["push", "cancel", "pop"]), COSTS), max_size=80))
def test_cancelled_requests_leave_nothing_behind(steps: list[tuple[str, str, int]]) -> None:
    """The order of the others is the one of a queue that the cancelled requests never entered."""
    cancelled: set[int] = set()
    with_cancels = run(steps, cancelled)
    without = [step if number not in cancelled else ("a", "skip", 1) for number, step in enumerate(steps)]
    assert with_cancels == run([step if step[1] != "cancel" else ("a", "skip", 1) for step in without], set())


def run(steps: list[tuple[str, str, int]], cancelled: set[int]) -> list[int]:
    """Return the order in which requests are served, and add those that were cancelled."""
    queue: FairQueue[int] = FairQueue(limit=1000)
    waiting: list[Ticket[int]] = []
    served: list[int] = []
    for number, (tenant, step, cost) in enumerate(steps):
        if step == "push":
            waiting.append(Ticket(tenant, 1.0, cost, number))
            queue.push(waiting[-1])
        elif step == "cancel" and waiting:
            ticket = waiting.pop(cost % len(waiting))
            if queue.remove(ticket):
                cancelled.add(ticket.item)
        elif step == "pop" and len(queue):
            served.append(queue.pop().item)  # type: ignore[union-attr]  # some wait
    while (last := queue.pop()) is not None:
        served.append(last.item)
    return served


def test_requests_of_one_tenant_keep_their_order() -> None:
    queue: FairQueue[int] = FairQueue(limit=10)
    fill(queue, "a", 4)
    assert [queue.pop().item for _ in range(4)] == [0, 1, 2, 3]  # type: ignore[union-attr]  # four wait


def test_a_tenant_that_arrives_late_does_not_wait_for_the_backlog_of_another() -> None:
    queue: FairQueue[int] = FairQueue(limit=200)
    fill(queue, "greedy", 100)
    for _ in range(10):
        queue.pop()
    fill(queue, "late", 1)
    assert "late" in [queue.pop().tenant for _ in range(2)]  # type: ignore[union-attr]  # more wait


def test_an_idle_tenant_saves_nothing_up() -> None:
    queue: FairQueue[int] = FairQueue(limit=200)
    fill(queue, "busy", 60)
    for _ in range(50):
        queue.pop()
    fill(queue, "idle", 60)
    assert Counter(queue.pop().tenant for _ in range(10)) == {"busy": 5, "idle": 5}  # type: ignore[union-attr]  # more wait


def test_a_full_queue_drops_the_newest_of_the_tenant_with_the_most() -> None:
    queue: FairQueue[int] = FairQueue(limit=5)
    greedy = fill(queue, "greedy", 5)
    dropped = queue.push(Ticket("modest", 1.0, 1.0, 0))
    assert dropped is greedy[-1]
    own = Ticket("greedy", 1.0, 1.0, 9)
    assert queue.push(own) is own
    assert len(queue) == 5


async def test_a_lane_runs_as_many_as_it_has_room_for() -> None:
    room = 2
    lane = Lane("m", lambda: room, limit=10)
    running, most = 0, 0

    async def request() -> None:
        nonlocal running, most
        await lane.enter("a", 1.0, 1.0)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        lane.leave()

    await asyncio.gather(*(request() for _ in range(10)))
    assert most == 2 and lane.is_empty


async def test_a_lane_that_grows_lets_waiting_requests_run() -> None:
    room: int | None = 0
    lane = Lane("m", lambda: room, limit=10)
    waiting = [asyncio.create_task(lane.enter("a", 1.0, 1.0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert lane.waiting == 3
    room = None
    lane.admit()
    await asyncio.gather(*waiting)
    assert lane.running == 3


@pytest.mark.parametrize("late", [False, True])
async def test_a_cancelled_request_frees_its_place(late: bool) -> None:
    """late: the request is cancelled in the moment in which its turn comes."""
    lane = Lane("m", lambda: 1, limit=10)
    await lane.enter("a", 1.0, 1.0)
    waiting = asyncio.create_task(lane.enter("a", 1.0, 1.0))
    await asyncio.sleep(0)
    if late:
        lane.leave()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not late:
        lane.leave()
    assert lane.is_empty


async def test_a_full_lane_refuses_with_a_time_to_retry() -> None:
    lane = Lane("m", lambda: 0, limit=1)
    first = asyncio.create_task(lane.enter("a", 1.0, 1.0))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await lane.enter("a", 1.0, 1.0)
    assert refused.value.retry_after_s >= 1 and "'m'" in refused.value.public
    first.cancel()
