"""Long strings of a JSON body, mostly media in base64: cut out of its bytes before the rest is parsed.

`json.loads` copies a string character by character, 1 ms per megabyte with the interpreter locked.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

import numpy as np

LONG_BYTES: Final = 16 * 1024
"""Strings that are surely cut have twice this length; shorter ones may stay."""

_KEY: Final = re.compile(rb'[{,]\s*"[^"\\]{1,64}"\s*:\s*$')
_KEY_BYTES: Final = 128
_QUOTE: Final = b'"'
_BACKSLASH: Final = b"\\"
_FIRST_PRINTABLE: Final = 0x20


def cut(body: bytes | bytearray) -> tuple[bytes | bytearray, dict[str, str]]:
    """Return the body with a mark in place of each long string that is a value of an object, and the strings by mark.

    Only strings are cut that mean themselves: ASCII without escapes and control characters. A body that is not valid
    JSON can be cut at the wrong quotes; it stays invalid, at another position.
    """
    pieces: list[bytes | bytearray | memoryview] = []
    strings: dict[str, str] = {}
    view, done = memoryview(body), 0
    nonce = f"cut-{secrets.token_hex(8)}-"
    for start, end in _runs(body):
        if not _KEY.search(body[max(0, start - 1 - _KEY_BYTES) : start - 1]):
            continue
        content = _plain_text(view[start:end]) if body.find(_BACKSLASH, start, end) < 0 else None
        if content is None:
            continue
        mark = f"{nonce}{len(strings)}"
        strings[mark] = content
        pieces += [view[done:start], mark.encode()]
        done = end
    return (b"".join([*pieces, view[done:]]), strings) if strings else (body, strings)


def _runs(body: bytes | bytearray) -> list[tuple[int, int]]:
    """Return begin and end of all runs between two quotes that have at least twice the long length."""
    runs = []
    place = LONG_BYTES
    while place < len(body):
        quote = body.rfind(_QUOTE, place - LONG_BYTES, place)
        if quote >= 0:
            place = quote + 1 + LONG_BYTES
            continue
        start, end = body.rfind(_QUOTE, 0, place) + 1, body.find(_QUOTE, place)
        if end < 0:
            break
        if start:
            runs.append((start, end))
        place = end + 1 + LONG_BYTES
    return runs


def _plain_text(content: memoryview) -> str | None:
    """Return the text of ASCII without control characters, None for any other content."""
    if np.frombuffer(content, np.uint8).min() < _FIRST_PRINTABLE:
        return None
    try:
        return str(content, "ascii")
    except UnicodeDecodeError:
        return None
