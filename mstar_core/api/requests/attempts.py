"""Manager of attempts: after the death of a process it sends the requests that were there again. Owned by the link.

A lost request is parked and gets a new handle at once, so that late messages of the old attempt are dropped. The new
attempt goes to the conductor as soon as there is one, and the conductor keeps it until a replica is ready. Everything
else stays with the request: its place, the tensors of its inputs, its deadline, and its ways to end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mstar_core.api.api_metrics import Metrics
from mstar_core.api.errors import lost
from mstar_core.api.output.queue import OutputQueue
from mstar_core.api.requests.limits import last_error, process_kind
from mstar_core.api.requests.record import Attempt, AttemptRecord
from mstar_core.api.requests.registry import LiveRequest, Registry
from mstar_core.errors import ArenaFull, MstarError, WorkerLost
from mstar_core.messages.flow import Drawn, Saved
from mstar_core.messages.life import PeerDown
from mstar_core.messages.requests import MoreInput, NewRequest, Resume, SavedLoop
from mstar_core.messages.tensors import InlineTensor, TensorRef
from mstar_core.transport.dtypes import Array
from mstar_core.transport.tensors import inline_array

FIRST: Final = 1
"""Number of the attempt before those that know ids."""

RESUMING: Final = "resuming"
"""State of a request from the loss of an attempt to the first new output of the next one."""

log = logging.getLogger("mstar.api.attempts")


@dataclass(slots=True, kw_only=True)
class Attempts:
    """Sends each request, first and again. submit, put, release: those of `Link`.

    send: sends more of its input; a failure is followed by the news that the conductor is gone. on_resumed: called with
    a request, and the start and end of its pause.
    """

    registry: Registry
    queues: dict[int, OutputQueue]
    metrics: Metrics
    submit: Callable[[NewRequest], None]
    put: Callable[[Array, str], TensorRef]
    release: Callable[[Sequence[TensorRef]], None]
    send: Callable[[MoreInput], None]
    clock: Callable[[], float] = time.monotonic
    on_resumed: Callable[[LiveRequest, float, float], None] = lambda live, start, end: None
    _events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def begin(self, live: LiveRequest, request: NewRequest, unresumable: str) -> None:
        """Send a request for the first time. unresumable: why it has one attempt only; empty if it can have more.

        Raises WorkerLost if it has one only and the conductor is gone, TransportError if it cannot be sent.
        """
        delivered = self.queues[live.handle].delivered
        live.record = record = AttemptRecord(
            request=request, deadline=live.deadline, delivered=delivered, unresumable=unresumable
        )
        if live.drawn_before is not None and live.drawn_before.places:
            record.journal = live.drawn_before
            request = msgspec.structs.replace(request, resume=Resume(attempt=FIRST + 1, ids=record.journal.ids()))
        if live.saved_before is not None and live.saved_before.places:
            record.saved = live.saved_before
            request = self._message(live, record)
        try:
            self.submit(request)
        except WorkerLost:
            if unresumable:
                raise
            self._park(live, record)
            return
        self._sent(live, record)

    def grow(self, live: LiveRequest, name: str, values: Sequence[int], *, is_over: bool = False) -> None:
        """Add values to a growing input of a request that has begun. Later attempts get all of them at once."""
        record = live.record
        if record is None or live.error is not None:
            return
        more = MoreInput(handle=live.handle, name=name, values=list(values), is_over=is_over)
        record.grow(more)
        if live.is_sent and not live.is_over and not live.is_parked:
            self.send(more)

    def drawn(self, message: Drawn) -> None:
        """Add ids to the journal of their request. Those of earlier attempts are dropped."""
        live = self.registry.get(message.handle)
        if live is not None and live.record is not None:
            live.record.journal.add(message)
            if live.on_drawn is not None:
                live.on_drawn(message)

    def saved(self, message: Saved) -> None:
        """Keep the state of a loop, whose tensors are inline. Those of earlier attempts are dropped."""
        live = self.registry.get(message.handle)
        if live is not None and live.record is not None:
            live.record.saved.keep(message.place, message.loop)
            if live.on_saved is not None:
                live.on_saved(message)

    def lost(self, live: LiveRequest, process: str, cause: str, *, is_excused: bool = False) -> None:
        """Start the next attempt of a request after a death, or fail it if that was its last one.

        process: name of the dead process, empty if no replica was ready and the attempt has not begun. cause: of the
        death, one sentence for clients. is_excused: see `Attempt`.
        """
        record = live.record
        if record is None or live.error is not None or live.is_parked:
            return
        attempt = record.attempts[-1]
        error: WorkerLost | None
        if process:
            attempt.lost, attempt.lost_at, attempt.cause = process, self.clock(), cause
            attempt.is_excused = is_excused
            error = last_error(record)
        else:
            record.attempts.pop()
            error = lost(cause) if record.unresumable else None
        if error is not None:
            live.is_over = True  # at the conductor: nothing is left to cancel
            if error.detail:
                log.error("%s", error.detail, extra={"facts": {"request": live.request_id}})
            live.fail(error)
            return
        if process:
            facts = {"request": live.request_id, "attempt": len(record.attempts), "process": process, "cause": cause}
            self._events.append(("request.parked", facts))
        self._park(live, record)
        self._resume(live, record)

    def lost_with(self, live: LiveRequest, death: PeerDown) -> None:
        """Start the next attempt of a request after the announced death of a process, see `lost`."""
        self.lost(live, death.name, death.public, is_excused=death.is_excused)

    def conductor_is_up(self) -> None:
        """Send the parked requests."""
        for live in self.registry:
            if live.is_parked and live.record is not None and live.error is None:
                self._resume(live, live.record)

    def give_up(self, error: MstarError) -> None:
        """Fail the requests that wait for a process which will not come back."""
        for live in self.registry:
            if live.state == RESUMING:
                live.fail(error)

    def take_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events since the last call, for the supervisor's feed."""
        events, self._events = self._events, []
        return events

    def _park(self, live: LiveRequest, record: AttemptRecord) -> None:
        old = live.handle
        self.registry.renew(live)
        self.queues[live.handle] = output_queue = self.queues.pop(old)
        output_queue.renew(lambda: self._resumed(live, record))
        live.is_sent, live.is_over, live.is_parked = False, False, True
        if live.state != RESUMING:
            live.state, live.parked_at = RESUMING, self.clock()

    def _resume(self, live: LiveRequest, record: AttemptRecord) -> None:
        message = self._message(live, record)
        try:
            self.submit(message)
        except WorkerLost:
            return  # until the next conductor is up
        except MstarError as error:
            live.fail(error)
            return
        self._sent(live, record)

    def _message(self, live: LiveRequest, record: AttemptRecord) -> NewRequest:
        """Return the message of the next attempt. Saved states are lent until the one after it, or the end.

        A state for which the shared memory has no room is left out: its loop begins anew.
        """
        message = record.message(live.handle, self.clock())
        self.release(live.lent)
        live.lent = []
        states: dict[str, SavedLoop] = {}
        assert message.resume is not None
        for place, state in reversed(message.resume.saved.items()):
            try:
                values = {port: self._lent(live, ref) for port, ref in state.values.items()}
            except ArenaFull as error:
                log.warning("a loop begins anew", extra={"facts": {"place": place, "why": str(error)}})
                continue
            states[place] = SavedLoop(iteration=state.iteration, values=values)
        return msgspec.structs.replace(message, resume=msgspec.structs.replace(message.resume, saved=states))

    def _lent(self, live: LiveRequest, ref: TensorRef) -> TensorRef:
        assert isinstance(ref, InlineTensor), "states are kept inline"
        live.lent.append(self.put(inline_array(ref), ref.dtype))
        return live.lent[-1]

    def _sent(self, live: LiveRequest, record: AttemptRecord) -> None:
        if record.attempts:
            self.metrics.attempts.labels(process_kind(record.attempts[-1].lost)).inc()
        record.attempts.append(Attempt(handle=live.handle, began=self.clock()))
        live.is_sent, live.is_parked = True, False

    def _resumed(self, live: LiveRequest, record: AttemptRecord) -> None:
        """Note the first new output of an attempt, or its end without one."""
        now = self.clock()
        live.state, attempt = "running", record.attempts[-1]
        attempt.pause_s = now - live.parked_at
        self.metrics.pause_s.observe(attempt.pause_s)
        if len(record.attempts) > 1:
            facts = {
                "request": live.request_id,
                "attempt": len(record.attempts),
                "pause_s": round(attempt.pause_s, 3),
            }
            self._events.append(("request.resumed", facts))
        self.on_resumed(live, live.parked_at, now)
