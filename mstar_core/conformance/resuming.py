"""Silver check: a new attempt that is given facts of an earlier one gives the answer of an undisturbed request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.conformance.equality import joined_values, require_equal, require_same_bytes
from mstar_core.conformance.miniature import miniature
from mstar_core.errors import EngineError
from mstar_core.messages.requests import Resume
from mstar_core.plugin.conformance import Subject
from mstar_core.plugin.surface import SERIES

if TYPE_CHECKING:
    from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest

SHARES: Final = (0.4, 1.0)
"""Shares of the journal that a new attempt is given: a death during the answer, and one just before its end."""


def goes_on(subject: Subject) -> None:
    """Compare new attempts with the request served alone. What a client has is left out, and nothing is drawn twice.

    Loops that save begin in the first and in the last state that they saved.
    """
    small = miniature(subject)
    runtime = small.runtime()
    for ask in small.asks:
        expected = small.alone(ask)
        (first,) = runtime.ask(replace(ask, is_journaled=True))
        require_same_bytes(expected, first, f"{ask.name} with a journal")
        for share in SHARES:
            again = replace(ask, is_journaled=True, resume=Resume(attempt=2, ids=known_ids(first, share)))
            (second,) = runtime.ask(again)
            what = f"{ask.name} from {share:.0%} of its ids on"
            require_equal(expected, second, what)
            if second.drawn != first.drawn:
                raise EngineError(f"{what}: the journal differs", f"{second.drawn} instead of {first.drawn}")
        for number, which in ((0, "first"), (-1, "last")) if first.saved else ():
            saved = {place: states[number] for place, states in first.saved.items()}
            again = replace(ask, is_journaled=True, resume=Resume(attempt=2, ids=dict(first.drawn), saved=saved))
            require_equal(expected, runtime.ask(again)[0], f"{ask.name} from the {which} states of its loops on")
        _require_rest(expected, runtime.ask(_delivered(again, expected))[0], ask.name)


def known_ids(outcome: RequestOutcome, share: float) -> dict[str, list[int]]:
    """Return a share of the ids of each place, in whole iterations."""
    counts = {place: int(len(ids) / outcome.widths[place] * share) for place, ids in outcome.drawn.items()}
    return {place: ids[: counts[place] * outcome.widths[place]] for place, ids in outcome.drawn.items()}


def _delivered(ask: SampleRequest, expected: RequestOutcome) -> SampleRequest:
    """Return the attempt of a request of which the client has half of each series."""
    assert ask.resume is not None
    ports = {item.port for item in expected.items if item.modality in SERIES}
    half = {port: joined_values(expected.of(port)).size // 2 for port in ports}
    return replace(ask, resume=Resume(attempt=2, ids=ask.resume.ids, delivered=half))


def _require_rest(expected: RequestOutcome, actual: RequestOutcome, name: str) -> None:
    """Raise EngineError unless the answer lacks nothing but what it says it has left out."""
    for port in {item.port for item in expected.items if item.modality in SERIES}:
        whole, rest = joined_values(expected.of(port)), joined_values(actual.of(port))
        skipped = actual.skipped.get(port, 0)
        if skipped > whole.size // 2 or skipped + rest.size != whole.size:
            raise EngineError(
                f"{name}: port {port} lacks units that the client does not have",
                f"{skipped} left out and {rest.size} sent of {whole.size}, of which the client has {whole.size // 2}",
            )
        if whole.dtype.kind == "i" and whole.dtype.itemsize > 2 and not np.array_equal(whole[skipped:], rest):
            raise EngineError(f"{name}: port {port} goes on with other ids")
