"""Multipart parser: accepts any valid body, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.api.http.multipart import (
    MAX_PARTS,
    PartHeader,
    boundary_of,
    parse_part_header,
    parts_of,
)
from mstar_core.errors import MstarError, RequestError

BOUNDARY = b"bound"


def body_of(parts: Iterable[tuple[str, bytes]]) -> bytes:
    made = b"".join(
        b'--bound\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), data)
        for name, data in parts
    )
    return made + b"--bound--\r\n"


def parsed(body: bytes) -> list[tuple[str, bytes]]:
    return [(header.name, bytes(data)) for header, data in parts_of(body, BOUNDARY)]


# Data consists of characters of boundaries, so that near misses are frequent.
DATA = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--", b"--boun", b"\r\n--boun", b"bound", b"x", b"\0"])).map(
    b"".join
)
PARTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c d"]), DATA.filter(lambda d: b"\r\n--bound" not in b"\r\n" + d)), max_size=5
)


@settings(deadline=None, max_examples=150)
@given(PARTS.filter(bool), st.sampled_from([b"", b"preamble\r\n", b"\r\n"]))
def test_any_valid_body_gives_its_parts(parts: list[tuple[str, bytes]], preamble: bytes) -> None:
    assert parsed(preamble + body_of(parts) + b"epilogue") == parts


@settings(deadline=None, max_examples=150)
@given(PARTS.filter(bool), st.data())
def test_a_body_cut_anywhere_is_refused(parts: list[tuple[str, bytes]], data: st.DataObject) -> None:
    body = body_of(parts)
    end = data.draw(st.integers(0, len(body) - 3))  # the last line break is optional
    with pytest.raises(RequestError):
        parsed(body[:end])


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_are_parts_or_a_refusal(data: bytes) -> None:
    for body in (data, b"--bound\r\n" + data, body_of([("a", b"")])[:-9] + data):
        try:
            parsed(body)
        except MstarError as error:
            assert error.status in (400, 413)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Content-Disposition: form-data",
        b'Content-Disposition: attachment; name="a"',
        b'Content-Disposition: form-data; name="a"; name="b"',
        b'Content-Disposition: form-data; name="a"\r\nContent-Disposition: form-data; name="b"',
        b"no colon",
        b'Content-Disposition : form-data; name="a"',
        b'Content-Disposition: form-data; name="\xff"',
        b'Content-Disposition: form-data; name="a"\r\nContent-Transfer-Encoding: base64',
    ],
)
def test_part_headers_that_could_mean_two_things_are_refused(block: bytes) -> None:
    with pytest.raises(RequestError):
        parse_part_header(block)


def test_names_and_file_names_are_read_as_clients_write_them() -> None:
    begin = parse_part_header(
        b'Content-Disposition: form-data; name="f\\"1"; filename="../a;b.png"\r\nContent-Type: image/png'
    )
    assert begin == PartHeader(name='f"1', filename="../a;b.png", content_type="image/png")
    assert parse_part_header(b'content-disposition: form-data; name="a"; filename=""').filename == ""


def test_limits_hold() -> None:
    with pytest.raises(MstarError) as many:
        parsed(body_of([("a", b"")] * (MAX_PARTS + 1)))
    assert (many.value.status, many.value.code) == (413, "too_many_files")
    with pytest.raises(MstarError) as long:
        parsed(b"--bound\r\nX: " + b"y" * 9000)
    assert long.value.status == 413


@pytest.mark.parametrize(
    "kind", ["multipart/form-data", "multipart/form-data; boundary=", 'a/b; boundary="x "', f"a/b; boundary={'x' * 71}"]
)
def test_content_types_without_a_usable_boundary_are_refused(kind: str) -> None:
    with pytest.raises(RequestError):
        boundary_of(kind)


def test_boundaries_may_be_quoted() -> None:
    assert boundary_of('multipart/form-data; charset=utf-8; Boundary="a b"') == b"a b"
