"""Facts of earlier attempts of a request, for the messages of its new attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from mstar_core.messages.requests import NewRequest
    from mstar_core.messages.work import OpenRequest


def known_ids(message: NewRequest, place: str) -> dict[str, list[int]]:
    """Return the ids that earlier attempts drew in a run, by the name of the loop or node. place: of the run."""
    if message.resume is None:
        return {}
    start = f"{place}/"
    return {key.removeprefix(start): ids for key, ids in message.resume.ids.items() if key.startswith(start)}


def with_delivered(opened: OpenRequest, message: NewRequest) -> OpenRequest:
    """Return the message that opens a request with what the api has from earlier attempts."""
    resume = message.resume
    if resume is None:
        return opened
    return msgspec.structs.replace(opened, delivered=dict(resume.delivered), chunks=dict(resume.chunks))
