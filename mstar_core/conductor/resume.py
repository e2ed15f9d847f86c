"""Facts of earlier attempts of a request, for the messages of its new attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mstar_core.messages.requests import NewRequest


def known_ids(message: NewRequest, place: str) -> dict[str, list[int]]:
    """Return the ids that earlier attempts drew in a run, by the name of the loop or node. place: of the run."""
    if message.resume is None:
        return {}
    start = f"{place}/"
    return {key.removeprefix(start): ids for key, ids in message.resume.ids.items() if key.startswith(start)}


def delivered_units(message: NewRequest) -> dict[str, int]:
    """Return the units by output port that the api has from earlier attempts."""
    return {} if message.resume is None else dict(message.resume.delivered)
