"""Errors of the api about a field, with the flag of `mstarctl call` that sets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mstar_core.client import ClientError
from mstarctl.call.ask import Card

FLAGS: Final = {
    "text": '--text "..."',
    "image": "--image FILE",
    "images": "--image FILE",
    "video": "--video FILE",
    "audio": "--audio FILE",
    "robot_state": "--state FILE",
    "states": "--state FILE",
    "voice": "--voice NAME",
}
"""Flags by the field that an error names. Every other parameter is set by --param."""

MEDIA: Final = ("image", "video", "audio")
"""Kinds of files. Each has a flag of its name."""


@contextmanager
def flags_named(card: Card) -> Iterator[None]:
    """Add the flag to the hint of an error that names a field of the request."""
    try:
        yield
    except ClientError as error:
        field = (error.param or "").partition("[")[0].partition(".")[0]
        flag = flag_of(card, field, is_missing=error.code == "missing_field")
        if flag and flag.partition(" ")[0] not in error.hint:
            error.hint = f"{flag}{f' ({error.hint})' if error.hint else ''}"
        raise


def flag_of(card: Card, field: str, *, is_missing: bool) -> str:
    """Return the flag that sets a field, empty if there is none. A missing medium may be of any accepted kind."""
    if field in MEDIA and is_missing:
        return " or ".join(FLAGS[kind] for kind in MEDIA if kind in card.inputs)
    if field in FLAGS:
        return FLAGS[field]
    return f"--param {field}=VALUE" if field in card.parameters else ""
