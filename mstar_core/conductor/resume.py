"""Facts of earlier attempts of a request, for the messages of its new attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mstar_core.messages.requests import NewRequest, SavedLoop
    from mstar_core.messages.work import OpenRequest


T = TypeVar("T")


def known_ids(message: NewRequest, place: str) -> dict[str, list[int]]:
    """Return the ids that earlier attempts drew in a run, by the name of the loop or node. place: of the run."""
    return {} if message.resume is None else _at(place, message.resume.ids)


def saved_loops(message: NewRequest, place: str) -> dict[str, SavedLoop]:
    """Return the states of loops that earlier attempts saved in a run, by the name of the loop. place: of the run."""
    return {} if message.resume is None else _at(place, message.resume.saved)


def with_delivered(opened: OpenRequest, message: NewRequest) -> OpenRequest:
    """Return the message that opens a request with what the api has from earlier attempts."""
    resume = message.resume
    if resume is None:
        return opened
    return msgspec.structs.replace(opened, delivered=dict(resume.delivered), chunks=dict(resume.chunks))


def _at(place: str, facts: Mapping[str, T]) -> dict[str, T]:
    """Return the facts of a place by the name of the loop or node."""
    start = f"{place}/"
    return {key.removeprefix(start): fact for key, fact in facts.items() if key.startswith(start)}
