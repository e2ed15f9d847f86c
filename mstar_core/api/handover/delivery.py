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
    """Counts the outputs of one item. In a replay it passes those of a mark, then those of a torn part, then all.

    Outputs of a port that is ahead wait for the other ports. counts: units that have passed, by port.
    """

    def __init__(self, stages: Sequence[Units] = ()) -> None:
        """stages: units by port at the end of each stage; everything passes after the last one."""
        self.counts: dict[str, int] = {}
        self._stages = list(stages)
        self._held: list[OutputItem] = []

    @property
    def is_open(self) -> bool:
        """Whether everything passes."""
        return not self._stages

    @property
    def is_reached(self) -> bool:
        """Whether all units of the current stage have passed."""
        return not self._stages or covers(self.counts, self._stages[0])

    @property
    def is_empty(self) -> bool:
        """Whether no output waits."""
        return not self._held

    def advance(self) -> None:
        """Begin with the next stage."""
        del self._stages[:1]

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
        if not self._stages:
            return item, None
        room = self._stages[0].get(item.port, 0) - self.counts.get(item.port, 0)
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
    """Outputs in the response of one request. Its items are numbered; most requests have one.

    Without a replay it only takes notes. is_continued: another process has begun the request. flush: writes the parts
    of the response that wait for the next iteration of the loop. pending: size of these parts. events: numbers the
    events of the response.
    """

    def __init__(
        self,
        transport: RecordedTransport,
        flush: Callable[[], None],
        pending: Callable[[], int],
        events: EventLog | None = None,
        is_continued: bool = False,
    ) -> None:
        self.is_continued = is_continued
        self._transport = transport
        self._recording = transport.recording
        self._flush = flush
        self._pending = pending
        self._events = events if events is not None else EventLog()
        self._units: list[Units] = []
        self._targets: list[Units] = []
        self._torn: list[Units] = []
        self._caught_up = asyncio.Event()
        self._whole = asyncio.Event()
        self._is_begun = transport.is_muted
        self._entries = self._recording.drawn()
        if transport.is_muted:
            self._replay()
        else:
            self._caught_up.set()
            self._whole.set()

    def _replay(self) -> None:
        record = self._recording.record
        self._targets = list(record.units)
        following = list(record.next_units)
        self._torn = following if any(not covers(_of(self._targets, n), f) for n, f in enumerate(following)) else []
        if not self._torn:
            self._whole.set()
        if not any(self._targets):
            self._transport.unmute(record.total - record.start - record.idle)  # keep-alives are not repeated
            self._caught_up.set()

    @property
    def is_begun(self) -> bool:
        """Whether the client has a part of the response from another process."""
        return self._is_begun

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
    def is_behind(self) -> bool:
        """Whether the client has more than this process has produced."""
        return self._transport.is_muted or self._transport.is_skipping

    def gate(self, index: int) -> UnitGate:
        """Return the gate for the outputs of an item."""
        target, torn = _of(self._targets, index), _of(self._torn, index)
        if DONE in target or not (self._targets or self._torn):
            return UnitGate()
        return UnitGate((target,) if covers(target, torn) else (target, torn))

    async def caught_up(self, index: int) -> None:
        """Wait until the response has all outputs that the client has, and an item may go on."""
        await self._caught_up.wait()
        if covers(_of(self._targets, index), _of(self._torn, index)):
            await self._whole.wait()  # the torn part is another item's, and comes first

    @property
    def firsts(self) -> tuple[float | None, float | None]:
        """Monotonic times at which an earlier process had the first output and the first sound; None before them."""
        first, first_sound = self._recording.record.firsts
        return first or None, first_sound or None

    def note_keepalive(self, size: int) -> None:
        """Note that a keep-alive is written next. size: its bytes with their framing."""
        self._recording.record.idle += size

    def note_firsts(self, first: float | None, first_sound: float | None) -> None:
        """Note these times, which are recorded with the next write."""
        self._recording.record.firsts = (first or 0.0, first_sound or 0.0)

    def sends(self, index: int, units: Units) -> None:
        """Note that outputs are handed to the writer. units: of the item so far, these included."""
        self._units += [{}] * (index + 1 - len(self._units))
        self._units[index] = dict(units)
        if not self._transport.is_muted:
            self._recording.sends(list(self._units))

    def sent(self) -> None:
        """Note that the writer has written everything that it was handed."""
        if self._transport.is_muted:
            self._check_caught_up()
            return
        self._whole.set()
        self._recording.mark(self._recording.record.total + self._pending(), list(self._units), self._events.count)

    def fail(self) -> None:
        """Pass what follows, because the replay cannot catch up and the response ends with an error."""
        if self._transport.is_muted:
            self._flush()
            self._events.restart(self._recording.record.events)
            self._transport.unmute()
        self._caught_up.set()
        self._whole.set()

    def _check_caught_up(self) -> None:
        if not all(covers(_of(self._units, index), target) for index, target in enumerate(self._targets)):
            return
        self._flush()  # what was produced so far is dropped
        record = self._recording.record
        self._events.restart(record.events)
        self._transport.unmute(record.total - record.mark)
        self._caught_up.set()
        log.info("the response goes on", extra={"facts": {"bytes": record.total - record.start}})


def _of(units: Sequence[Units], index: int) -> Units:
    return units[index] if index < len(units) else {}
