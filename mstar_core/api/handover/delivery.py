"""Delivery of one response: which outputs its bytes hold so far, and how a replay catches up with them.

Created by the exchange of a recorded connection; used by sessions and groups. An api that continues a request runs it
again from the beginning. Until it has produced the outputs that the client has, nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from mstar_core.api.handover.recording import Units
from mstar_core.api.handover.transport import RecordedTransport
from mstar_core.api.output.kept_events import EventLog
from mstar_core.api.output.units import OutputItem, ids_or_samples
from mstar_core.api.requests.record import Journal
from mstar_core.messages.flow import Drawn
from mstar_core.plugin.surface import units_of

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, Drawn])

DONE: Final = "done"
"""Unit of an item whose end has been written; not the name of a port."""

log = logging.getLogger("mstar.api.handover")


class UnitGate:
    """Counts the outputs of one item. In a replay it passes those that the client has, then all.

    Outputs of a port that is ahead wait for the other ports. counts: units that have passed, by port.
    """

    def __init__(self, target: Units | None = None) -> None:
        """target: units that the client has, by port; None: everything passes."""
        self.counts: dict[str, int] = {}
        self._target = target
        self._held: list[OutputItem] = []

    @property
    def is_open(self) -> bool:
        """Whether everything passes."""
        return self._target is None

    @property
    def is_reached(self) -> bool:
        """Whether all units that the client has have passed."""
        return self._target is None or covers(self.counts, self._target)

    @property
    def is_empty(self) -> bool:
        """Whether no output waits."""
        return not self._held

    def open(self) -> None:
        """Pass everything from now on."""
        self._target = None

    def take(self, items: Sequence[OutputItem]) -> list[OutputItem]:
        """Return what may pass now of these outputs and of those that wait."""
        waiting, self._held = [*self._held, *items], []
        passed: list[OutputItem] = []
        for item in waiting:
            now, later = self._split(item)
            if now is not None:
                self.counts[item.port] = self.counts.get(item.port, 0) + _units(now)
                passed.append(now)
            if later is not None:
                self._held.append(later)
        return passed

    def _split(self, item: OutputItem) -> tuple[OutputItem | None, OutputItem | None]:
        if self._target is None:
            return item, None
        room = self._target.get(item.port, 0) - self.counts.get(item.port, 0)
        if room >= _units(item):
            return item, None
        if room <= 0:
            return None, item
        array = ids_or_samples(item)
        return replace(item, array=array[:room]), replace(item, array=array[room:])


def covers(counts: Units, target: Units) -> bool:
    """Return whether these units include all of a target."""
    return all(counts.get(port, 0) >= count for port, count in target.items())


def _units(item: OutputItem) -> int:
    return units_of(item.modality, item.array.shape)


class Delivery:
    """Parts of the response of one request, and the outputs in them. Its items are numbered; most requests have one.

    A part is recorded as a whole: a chunk of sound, or several events that hold the same outputs. So the next process
    goes on between two parts. It repeats the request, drops what it produces until the response holds what the client
    has, and then writes. Bytes are not compared: a repeated part may be cut otherwise.

    is_continued: another process has begun the request. flush: writes the parts of the response that wait for the next
    iteration of the loop. events: numbers the events of the response.
    """

    def __init__(
        self,
        transport: RecordedTransport,
        flush: Callable[[], None],
        events: EventLog | None = None,
        is_continued: bool = False,
    ) -> None:
        self.is_continued = is_continued
        self.is_begun = transport.is_muted
        """Whether the client has a part of the response from another process, its head at least."""

        self._transport = transport
        self._recording = transport.recording
        self._flush = flush
        self._events = events if events is not None else EventLog()
        self._units: list[Units] = []
        self._lines = 0
        self._holds_outputs = False
        self._targets: list[Units] = list(self._recording.record.units) if self.is_begun else []
        self._has_head = not self.is_begun
        self._caught_up = asyncio.Event()
        self._entries = self._recording.drawn()
        self._check_units()

    def drawn(self, index: int, drawn: Drawn) -> None:
        """Record ids that a loop of an item has drawn."""
        self._recording.draw(_encoder.encode((index, drawn)))

    def journal(self, index: int) -> Journal:
        """Return the ids that an item has drawn in another process."""
        journal = Journal()
        for entry in self._entries:
            item, drawn = _decoder.decode(entry)
            if item == index:
                journal.add(drawn)
        return journal

    @property
    def is_replay(self) -> bool:
        """Whether what is written now is dropped, because the client has got it from another process."""
        return self._transport.is_muted

    @property
    def events_type(self) -> str:
        """Content type of a response of events that another process has begun, else empty."""
        return self._recording.record.events_type

    def note_events(self, content_type: str) -> None:
        """Note that the response consists of events, so that it can end with an error."""
        self._recording.record.events_type = content_type  # recorded with the next part

    def gate(self, index: int) -> UnitGate:
        """Return the gate for the outputs of an item."""
        target = _of(self._targets, index)
        return UnitGate() if DONE in target or not self._targets else UnitGate(target)

    async def caught_up(self) -> None:
        """Wait until all items have produced the outputs that the client has, and one may go on."""
        await self._caught_up.wait()

    @property
    def firsts(self) -> tuple[float | None, float | None]:
        """Monotonic times at which an earlier process had the first output and the first sound; None before them."""
        first, first_sound = self._recording.record.firsts
        return first or None, first_sound or None

    def note_firsts(self, first: float | None, first_sound: float | None) -> None:
        """Note these times, which are recorded with the next part."""
        self._recording.record.firsts = (first or 0.0, first_sound or 0.0)

    def sends(self, index: int, units: Units) -> None:
        """Note that outputs are handed to the writer. units: of the item so far, these included."""
        self._units += [{}] * (index + 1 - len(self._units))
        self._units[index] = dict(units)
        self._holds_outputs = True

    def sent(self) -> None:
        """Note that the writer has written everything that it was handed."""
        self._holds_outputs = False
        self._check_units()
        self._check()

    def writes(self) -> None:
        """Note that the next bytes are a whole part, with the outputs that were handed to the writer, if any."""
        if not self._holds_outputs:
            self._lines += 1
        if not self.is_replay:
            self._recording.holds(list(self._units), self._lines, self._events.count)

    def written(self) -> None:
        """Note that the writer has written the part."""
        if not self._holds_outputs:
            self._check()

    def passed_head(self) -> None:
        """Note that the head of a response that another process has begun was repeated."""
        self._has_head = True
        self._check()

    def fail(self) -> None:
        """Pass what follows, because the response ends with an error instead of the repeated outputs."""
        if self.is_replay:
            self._unmute()

    def _check_units(self) -> None:
        if all(covers(_of(self._units, index), target) for index, target in enumerate(self._targets)):
            self._caught_up.set()

    def _check(self) -> None:
        """Write from now on, if the replay has produced everything that the client has."""
        record = self._recording.record
        if self.is_replay and self._has_head and self._caught_up.is_set() and self._lines >= record.lines:
            self._unmute()
            log.info("the response goes on", extra={"facts": {"bytes": record.total - record.start}})

    def _unmute(self) -> None:
        self._flush()  # what was produced so far is dropped
        self._events.restart(self._recording.record.events)
        self._transport.unmute()


def _of(units: Sequence[Units], index: int) -> Units:
    return units[index] if index < len(units) else {}
