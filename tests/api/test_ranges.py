"""Byte ranges of files."""

from __future__ import annotations

import pytest

from mstar_core.api.errors import RangeNotSatisfiable, reply_of
from mstar_core.api.http.ranges import asked_range

SIZE = 100


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=10-19", (10, 20)),
        ("bytes=90-200", (90, 100)),
        ("bytes=99-", (99, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
    ],
)
def test_one_range_is_found(header: str, expected: tuple[int, int]) -> None:
    assert asked_range(header, SIZE) == expected


@pytest.mark.parametrize(
    "header", [None, "", "bytes=-", "bytes=20-10", "bytes=0-1,5-6", "lines=0-1", "bytes=a-b", "0-1"]
)
def test_what_is_not_one_range_of_bytes_is_the_whole_file(header: str | None) -> None:
    assert asked_range(header, SIZE) is None


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_behind_the_end_is_refused_with_the_size(header: str) -> None:
    with pytest.raises(RangeNotSatisfiable) as refused:
        asked_range(header, SIZE)
    reply = reply_of(refused.value, "id")
    assert (reply.status, reply.headers) == (416, {"Content-Range": "bytes */100"})
