"""Distribution of replicas over hosts."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.config.packing import pack


def test_replicas_fill_the_first_host_and_then_as_few_others_as_possible() -> None:
    packed = pack([[1]] * 5, {"a": 1, "b": 2, "c": 4}, {"a": 0})
    assert [columns[0][0] for columns in packed] == ["a", "c", "c", "c", "c"]


def test_spread_replicas_go_round() -> None:
    packed = pack([[1]] * 5, {"a": 2, "b": 2, "c": 4}, {"a": 0}, spread=True)
    assert [columns[0][0] for columns in packed] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    ("replicas", "room", "expected"),
    [
        ([[2, 1]], {"a": 2, "b": 3}, [[("b", "b"), ("b",)]]),
        ([[2, 1]], {"a": 2, "b": 1}, [[("a", "a"), ("b",)]]),
        ([[1, 2]], {"a": 2, "b": 1}, [[("b",), ("a", "a")]]),
        ([[1], [2]], {"a": 2, "b": 1}, [[("b",)], [("a", "a")]]),
        ([[2, 1]], {"a": 1, "b": 1, "c": 1}, [[("a", "b"), ("c",)]]),
        ([[2, 1], [2, 1]], {"a": 3, "b": 2, "c": 1}, [[("a", "a"), ("a",)], [("b", "b"), ("c",)]]),
    ],
    ids=["whole", "group whole", "group whole, later", "search goes back", "group divided", "one of two whole"],
)
def test_replicas_and_groups_stay_on_one_host_if_any_placement_allows_it(
    replicas: list[list[int]], room: dict[str, int], expected: list[list[tuple[str, ...]]]
) -> None:
    assert pack(replicas, room, {"a": 0}) == expected


@given(
    replicas=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=4),
    rooms=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    spread=st.booleans(),
)
def test_no_host_gets_more_than_its_room(replicas: list[list[int]], rooms: list[int], *, spread: bool) -> None:
    room = {f"h{index}": size for index, size in enumerate(rooms)}
    room["last"] = max(0, sum(map(sum, replicas)) - sum(rooms))
    packed = pack(replicas, room, {"h0": 0}, spread=spread)
    assert [[len(column) for column in columns] for columns in packed] == replicas
    used = Counter(host for columns in packed for column in columns for host in column)
    assert all(used[host] <= size for host, size in room.items())


def test_a_large_cluster_is_planned_in_bounded_time() -> None:
    started = time.monotonic()
    packed = pack([[2, 3]] * 40, {f"h{index}": 7 for index in range(30)}, {"h0": 0})
    assert len(packed) == 40
    assert time.monotonic() - started < 20
