"""Message link of the api: mailbox, courier and tensor transport. Runs on the api's event loop.

A message that cannot be handled fails only its own request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from mstar_core.api.api_metrics import Metrics
from mstar_core.api.errors import PeerError, lost
from mstar_core.api.output.fetches import Fetches
from mstar_core.api.output.queue import OutputQueue
from mstar_core.api.output.units import OutputItem
from mstar_core.api.requests.attempts import Attempts
from mstar_core.api.requests.registry import LiveRequest, Registry
from mstar_core.codec import BFLOAT16
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import Cancelled, EngineError, MstarError, TransportError, Unavailable, WorkerLost
from mstar_core.messages.adapters import AdapterDone, UnloadAdapter
from mstar_core.messages.flow import Output, Outputs, Saved, TensorFreed
from mstar_core.messages.life import (
    Drained,
    PeerDown,
    PeerReady,
    PeerUp,
    Reload,
    ServiceState,
    Telemetry,
)
from mstar_core.messages.names import API
from mstar_core.messages.requests import (
    CancelRequest,
    EndSession,
    MoreInput,
    NewRequest,
    Reconcile,
    RequestFailed,
    RequestFinished,
)
from mstar_core.messages.sleep import WakeWanted
from mstar_core.messages.telemetry import REALTIME, RequestNews, SessionNews, Span
from mstar_core.messages.tensors import InlineTensor, TensorRef
from mstar_core.messages.wire import Envelope, Message
from mstar_core.process.failures import log_lost
from mstar_core.process.life import SUPERVISOR, ChildArguments
from mstar_core.process.sockets import ChildSockets
from mstar_core.transport import Courier, Malformed, Spin
from mstar_core.transport.courier import REQUEST_BYTES
from mstar_core.transport.dtypes import Array
from mstar_core.transport.room import Room
from mstar_core.transport.tensors import inline, loan_of

TURN_S: Final = 0.1
"""Interval of telemetry while there are requests."""

SLEEPING: Final = "sleeping"
WANT_S: Final = 1.0
"""Interval at which requests ask for the wake of a deployment that sleeps."""

DEATH_S: Final = 3.0
"""Time in which the death of a worker on another host may follow a fetch that failed, which the death explains."""

log = logging.getLogger("mstar.api.link")


class Link:
    """Sends requests to the conductor and distributes outputs to the output queues. Owned by the api process."""

    def __init__(
        self,
        spec: DeploymentSpec,
        incarnation: int,
        supervisor: str,
        registry: Registry,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        spin: Spin | None = None,
    ) -> None:
        """Open the mailbox. Raises TransportError. spin: busy-poll window, restarted by request messages."""
        self.deployment = DeploymentState(wakes_on_request=spec.api.wake_on_request)
        self.output_queues: dict[int, OutputQueue] = {}
        self.on_stop: Callable[[str], None] | None = None
        self.on_reload: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] | None = None
        self.on_state: Callable[[DeploymentState], None] = lambda state: None
        self.running: Callable[[], int] = lambda: len(registry)
        self.unserved: Callable[[], int] = lambda: 0
        self.take_back: Callable[[], None] = lambda: None
        self.gauges: Callable[[], dict[str, float]] = dict
        self.news: Callable[[], tuple[list[RequestNews], list[Span]]] = lambda: ([], [])
        self.sessions: Callable[[], list[SessionNews]] = list
        self.spin = spin or Spin()
        self._spec = spec
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        arguments = ChildArguments(API, spec, incarnation, supervisor)
        self._sockets = ChildSockets(arguments, message_bytes=REQUEST_BYTES, clock=clock)
        self._courier: Courier = self._sockets.courier
        self.life = self._sockets.life
        try:
            self._tensors = self._sockets.open_tensors()
            self._mailbox = self._sockets.open_mailbox()
        except BaseException:
            self._sockets.close()
            raise
        self._fetches = Fetches(self._tensors, self._courier)
        self.attempts = Attempts(
            registry=registry,
            queues=self.output_queues,
            metrics=metrics,
            submit=self.submit,
            put=self.put,
            release=self.release,
            send=self._tell,
            clock=clock,
        )
        self._room = Room(self._tensors.arena)
        self._settled = asyncio.Event()
        self._next_reconcile = clock() + spec.reconcile_s
        self._reported_levels: set[int] = set()
        self._unloading: set[int] = set()  # numbers of adapters that accept no more requests
        self._next_want = 0.0
        self._reported: dict[str, float] = {}
        self._reported_sessions: list[SessionNews] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to receive, and announce the process."""
        self._loop = loop
        self._mailbox.attach(loop, self._receive)
        self._turn()

    async def wait_open(self, limit_s: float) -> None:
        """Wait at most `limit_s` until the supervisor has reported that requests are accepted, or refused for good."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), limit_s)

    def close(self) -> None:
        """Close all sockets and transports. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sockets.close(0.2)

    @property
    def loans(self) -> int:
        """Return the number of tensors on loan."""
        return self._tensors.live

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of all tensors sent so far."""
        return self._tensors.sent_bytes

    def put(self, array: Array, dtype: str | None = None) -> TensorRef:
        """Lend an array to a request until `release`, whichever processes run it or die meanwhile. Raises ArenaFull.

        dtype: the true name if NumPy lacks the type.
        """
        return self._tensors.put(array, REQUEST, dtype=dtype)

    def has_room(self, arrays: Sequence[Array]) -> bool:
        """Return whether these arrays can be lent at once."""
        sizes = self._lent_bytes(arrays)
        return not sizes or self._room.has(sizes)

    async def wait_for_room(self, arrays: Sequence[Array]) -> None:
        """Wait until these arrays can be lent. Raises ArenaFull if they can never be."""
        await self._room.wait(self._lent_bytes(arrays))

    def _lent_bytes(self, arrays: Sequence[Array]) -> list[int]:
        return [array.nbytes for array in arrays if array.nbytes > self._tensors.inline_bytes]

    def release(self, refs: Sequence[TensorRef]) -> None:
        """Free the tensors of a request that has ended, whichever process still holds them."""
        for ref in refs:
            loan = loan_of(ref)
            if loan is not None:
                self._tensors.release(loan.slot, loan.generation)
        self._room.freed()

    def submit(self, request: NewRequest) -> None:
        """Send a request to the conductor. Raises WorkerLost if it is gone, TransportError if its queue is full."""
        try:
            sent = self._courier.send(CONDUCTOR, request)
        except (OverflowError, TypeError) as error:
            raise TransportError("the request cannot be serialized", str(error)) from error
        if not sent:
            raise lost("the conductor is not available")

    def cancel(self, handle: int, why: str) -> None:
        """Tell the conductor to cancel a request."""
        self._tell(CancelRequest(handle=handle, why=why))

    def end_session(self, name: str) -> None:
        """Tell the conductor that a session has ended. Its lease otherwise ends with its time."""
        self._tell(EndSession(session=name))

    def _tell(self, message: CancelRequest | EndSession | MoreInput) -> None:
        try:
            self._courier.send(CONDUCTOR, message)
        except MstarError as error:
            log.error("a message of type %s could not be sent: %s", type(message).__name__, error)

    def note_change(self) -> None:
        """Handle a change of requests, connections or levels: report a drain, pause or handover that has ended.

        So is an adapter that is unloaded once no request uses it.
        """
        deployment, requests = self.deployment, len(self._registry)
        left = {
            deployment.drain: requests,
            deployment.pause: self.running(),
            deployment.handover: requests + (self.unserved() if deployment.handover else 0),
        }
        for number, count in left.items():
            if number and not count and number not in self._reported_levels:
                self._reported_levels.add(number)
                self._notify_supervisor(Drained(drain=number))
        for adapter in self._unloading - {live.adapter for live in self._registry}:
            self._unloading.discard(adapter)
            self._notify_supervisor(AdapterDone(number=adapter))

    def want_wake(self) -> None:
        """Ask for the wake of a deployment that sleeps, for requests that wait. Those that have failed do not wait."""
        deployment = self.deployment
        if deployment.state != SLEEPING or not deployment.wakes_on_request or self._clock() < self._next_want:
            return
        if all(live.error is not None for live in self._registry):
            return
        self._next_want = self._clock() + WANT_S
        self._notify_supervisor(WakeWanted())

    def _notify_supervisor(self, message: Message) -> None:
        try:
            self._courier.send(SUPERVISOR, message)
        except MstarError as error:
            log.error("a message to the supervisor could not be sent: %s", error)

    def _turn(self) -> None:
        assert self._loop is not None
        self.life.beat(self._clock())  # without work_ready: the api has no steps that could stall
        has_news = self._report()
        self._reconcile()
        self.want_wake()
        if self.deployment.handover:
            self.note_change()  # connections that end without a request report nothing
        self._check_stop()
        talks = any(session.kind == REALTIME and not session.is_lost for session in self._reported_sessions)
        is_calm = not (has_news or talks or len(self._registry) or self.deployment.handover)
        wait_s = self.life.wait_s(self._clock()) if is_calm else TURN_S
        self._timer = self._loop.call_later(wait_s, self._turn)

    def note_news(self) -> None:
        """Report within `TURN_S`. Without requests and news, turns follow the heartbeat."""
        if self._timer is not None and self._loop is not None and self._timer.when() > self._loop.time() + TURN_S:
            self._timer.cancel()
            self._timer = self._loop.call_later(TURN_S, self._turn)

    def _report(self) -> bool:
        """Send the supervisor what has changed. Returns whether anything has."""
        if not self.life.known:
            return False
        values = self.gauges()
        news, spans = self.news()
        samples = self._metrics.news(self._clock())
        events = self.attempts.take_events()
        sessions = self.sessions()
        are_new = sessions != self._reported_sessions
        if news or spans or samples or events or are_new or values != self._reported:
            self._reported, self._reported_sessions = values, sessions
            told = sessions if are_new else None
            self.life.telemetry(values, news, spans, samples=samples, events=events, sessions=told)
            return True
        return False

    def _reconcile(self) -> None:
        """Send the conductor the live requests once a minute, so that it closes those whose end was lost."""
        if self._clock() < self._next_reconcile:
            return
        self._next_reconcile = self._clock() + self._spec.reconcile_s
        message = Reconcile(live=[live.handle for live in self._registry], newest=self._registry.newest)
        with suppress(TransportError):  # the next one says the same
            self._courier.send(CONDUCTOR, message)

    def _check_stop(self) -> None:
        if self.life.stop_reason is not None and self.on_stop is not None:
            stop, self.on_stop = self.on_stop, None
            stop(self.life.stop_reason)

    def _receive(self, batch: Sequence[Envelope | Malformed]) -> None:
        for envelope in batch:
            if isinstance(envelope, Malformed):
                log.error("a message could not be decoded: %s", envelope.error)
                continue
            try:
                self._handle(envelope)
            except Exception:  # isolation boundary: one message
                log.exception("a message of %s was not handled", envelope.sender)
        if not self._settled.is_set():
            problem = self.deployment.problem()
            if problem is None or problem.code in ("draining", "unavailable"):
                self._settled.set()
        self._check_stop()

    def _handle(self, envelope: Envelope) -> None:
        if self.life.accepts(envelope):
            for message in self.life.receive(envelope):
                self._dispatch(envelope.sender, message)

    def _dispatch(self, sender: str, message: Message) -> None:
        if isinstance(message, Outputs | RequestFinished | RequestFailed):
            self.spin.rouse()
        match message:
            case Outputs():
                self._outputs(message)
            case RequestFinished():
                self._finished(message)
            case RequestFailed():
                self._failed(message)
            case TensorFreed():
                for slot, generation in message.slots:
                    self._tensors.release(slot, generation)
                self._room.freed()
            case PeerUp():
                self._peer_up(message)
            case PeerDown():
                self._peer_down(message)
            case PeerReady():
                self.deployment.down.pop(message.name, None)
            case ServiceState():
                self._service_state(message)
            case CancelRequest():
                cancelled = self._registry.get_first(message.handle)
                if cancelled is not None:
                    cancelled.fail(Cancelled("the request was cancelled by an operator"))
            case Reload():
                self.on_reload()
            case UnloadAdapter():
                self._unloading.add(message.number)
                self.note_change()
            case Telemetry():
                self._metrics.take_samples(message.samples)
            case _:
                log.error("%s sent a message that the api does not accept: %s", sender, type(message).__name__)

    def _outputs(self, message: Outputs) -> None:
        freed: dict[str, list[tuple[int, int]]] = {}
        for drawn in message.drawn:
            self.attempts.drawn(drawn)
        for saved in message.saved:
            if self._fetches.is_needed(saved.loop.values):
                self._fetches.begin(saved.loop.values, partial(self._saved_came, saved))
                continue
            self._saved(saved)
            for taken in filter(None, map(loan_of, saved.loop.values.values())):
                freed.setdefault(taken.owner, []).append((taken.slot, taken.generation))
        for output in message.items:
            live = self._registry.get(output.handle)
            if live is None:
                self._metrics.late.inc()
            elif self._tensors.is_remote(output.ref):
                self._fetch(message.worker, output)
                continue
            else:
                try:
                    self._output(message.worker, output, live)
                except Exception:  # isolation boundary: one output of a message with outputs of many requests
                    log.exception("an output of %s was not accepted", message.worker)
                    live.fail(EngineError("an output was lost", node=message.worker))
            loan = loan_of(output.ref)
            if loan is not None:
                freed.setdefault(loan.owner, []).append((loan.slot, loan.generation))
        for finished in message.finished:
            self._finished(finished)
        for owner, slots in freed.items():
            self._courier.send(owner, TensorFreed(slots=slots))

    def _output(self, worker: str, output: Output, live: LiveRequest) -> None:
        try:
            # Inline data belongs to this message, so it can be kept without a copy.
            is_inline = isinstance(output.ref, InlineTensor)
            array = self._tensors.get(output.ref) if is_inline else self._tensors.copy(output.ref)
        except MstarError as error:
            log.error("an output of %s could not be read: %s", worker, error)
            self._unreadable(live, worker)
            return
        self._put(worker, output, array)

    def _put(self, worker: str, output: Output, array: Array) -> None:
        output_queue = self.output_queues.get(output.handle)
        if output_queue is None:
            self._metrics.late.inc()
            return
        dtype = output.ref.dtype if output.ref.dtype == BFLOAT16 else None
        item = OutputItem(modality=output.modality, port=output.port, array=array, meta=output.meta, dtype=dtype)
        output_queue.put(worker, output.seq, item, output.skipped)

    def _fetch(self, worker: str, output: Output) -> None:
        """Fetch an output from another host. Later ones may come before it."""
        output_queue = self.output_queues.get(output.handle)
        if output_queue is not None:
            output_queue.expect(worker, output.seq)
        self._fetches.begin({output.port: output.ref}, partial(self._output_came, worker, output))

    def _output_came(self, worker: str, output: Output, came: Mapping[str, Array] | TransportError) -> None:
        live = self._registry.get(output.handle)
        if live is None:
            self._metrics.late.inc()
        elif isinstance(came, TransportError):
            log.error("an output of %s could not be fetched: %s", worker, came)
            if worker in self.deployment.down or self._loop is None:
                self._unreadable(live, worker)
            else:
                self._loop.call_later(DEATH_S, self._not_explained, output.handle, worker)
        else:
            self.spin.rouse()
            self._put(worker, output, came[output.port])

    def _not_explained(self, handle: int, worker: str) -> None:
        """End a request whose output could not be fetched, unless it has been sent again meanwhile."""
        live = self._registry.get(handle)
        if live is not None:
            self._unreadable(live, worker)

    def _unreadable(self, live: LiveRequest, worker: str) -> None:
        """Handle an output that cannot be read. If its worker has died, the memory has gone with it."""
        if worker in self.deployment.down:
            self._lost(live, self.deployment.down[worker])
        else:
            live.fail(EngineError("an output was lost", node=worker))

    def _saved(self, message: Saved) -> None:
        """Copy the state of a loop. One whose memory has gone with its worker is not kept."""
        if self._registry.get(message.handle) is None:
            return
        try:
            values = {port: self._copied(ref) for port, ref in message.loop.values.items()}
        except MstarError as error:
            log.info("a saved state could not be read: %s", error)
            return
        self._keep_saved(message, values)

    def _saved_came(self, message: Saved, came: Mapping[str, Array] | TransportError) -> None:
        """Keep the state of a loop from another host."""
        if isinstance(came, TransportError):
            log.info("a saved state could not be fetched: %s", came)
            return
        dtypes = {port: ref.dtype for port, ref in message.loop.values.items()}
        self._keep_saved(message, {port: inline(array, dtypes[port]) for port, array in came.items()})

    def _keep_saved(self, message: Saved, values: Mapping[str, TensorRef]) -> None:
        state = msgspec.structs.replace(message.loop, values=dict(values))
        self.attempts.saved(msgspec.structs.replace(message, loop=state))

    def _copied(self, ref: TensorRef) -> TensorRef:
        return self._tensors.read(ref, lambda array: inline(array, ref.dtype))

    def _lost(self, live: LiveRequest, death: PeerDown) -> None:
        """Handle outputs that were lost with their worker, whose death the conductor may not know yet."""
        if live.is_sent and not live.is_over:
            self.cancel(live.handle, "lost")
        self.attempts.lost_with(live, death)

    def _finished(self, message: RequestFinished) -> None:
        live, output_queue = self._registry.get(message.handle), self.output_queues.get(message.handle)
        if live is None or output_queue is None:
            self._metrics.late.inc()
            return
        live.is_over = True
        output_queue.finish(message)
        for worker in message.emitted:
            if worker in self.deployment.down:
                output_queue.worker_down(self.deployment.down[worker])

    def _failed(self, message: RequestFailed) -> None:
        live = self._registry.get(message.handle)
        if live is None:
            self._metrics.late.inc()
            return
        if message.error.code == WorkerLost.code:
            self.attempts.lost(live, message.lost, message.error.message, is_excused=message.is_excused)
            return
        live.is_over = True
        if message.error.detail:  # a death has none: it is logged once, with all requests that it fails
            log.error("a request failed: %s", message.error.detail, extra={"facts": {"request": live.request_id}})
        live.fail(PeerError(message.error))

    def _fallen_asleep(self, problem: MstarError | None) -> None:
        """Let requests that have come meanwhile wake the deployment, or refuse them."""
        if problem is None:
            self.want_wake()
            return
        for live in self._registry:
            live.fail(problem)

    def _peer_up(self, message: PeerUp) -> None:
        deployment = self.deployment
        if deployment.up.get(message.name, -1) >= message.incarnation:
            return
        deployment.up[message.name] = message.incarnation
        if message.fd_endpoint:
            blobs = self.life.blobs_of(message)
            self._tensors.connect(message.name, message.fd_endpoint, message.incarnation, blobs)
        self._metrics.component_up[(message.name,)] = 1
        if message.name == CONDUCTOR:
            deployment.down.pop(CONDUCTOR, None)
            self.attempts.conductor_is_up()

    def _peer_down(self, message: PeerDown) -> None:
        deployment = self.deployment
        if deployment.up.get(message.name, message.incarnation) > message.incarnation:
            return
        deployment.up.pop(message.name, None)
        deployment.down[message.name] = message
        self._metrics.component_up[(message.name,)] = 0
        interrupted: list[LiveRequest] = []
        if message.name == CONDUCTOR:
            interrupted = [live for live in self._registry if live.is_sent and not live.is_over]
        log_lost(log, message, [live.request_id for live in interrupted])
        for live in interrupted:
            self.attempts.lost_with(live, message)
        for output_queue in self.output_queues.values():
            output_queue.worker_down(message)
        self._tensors.reclaim(message.name, message.incarnation)
        self._room.freed()

    def _service_state(self, message: ServiceState) -> None:
        deployment = self.deployment
        deployment.state, deployment.phase, deployment.reason = message.state, message.phase, message.reason
        deployment.drain, deployment.pause, deployment.handover = message.drain, message.pause, message.handover
        if not message.handover:
            self.take_back()
        self.on_state(deployment)
        self.note_change()
        if message.state == SLEEPING:
            self._fallen_asleep(deployment.problem())
        if message.state == "unhealthy" and (problem := deployment.problem()) is not None:
            self.attempts.give_up(problem)
        if message.state == "ready":
            deployment.down = {name: death for name, death in deployment.down.items() if name == CONDUCTOR}
            if self.on_ready is not None:
                ready, self.on_ready = self.on_ready, None
                ready()


CONDUCTOR: Final = "conductor"
REQUEST: Final = "request"
"""Borrower of the inputs of requests, in place of a process."""

UNHEALTHY_HINT: Final = "its operator has to restart it"


@dataclass(slots=True)
class DeploymentState:
    """Deployment state as reported by the supervisor. Owned by the link.

    state: starting, ready, sleeping, draining, unhealthy. wakes_on_request: whether requests wake it. reason: why,
    for clients. drain, pause, handover: number of the one in progress, 0 without one. is_closing: this process ends.
    down: deaths by name of lost process.
    """

    state: str = "starting"
    wakes_on_request: bool = True
    phase: str = ""
    reason: str = ""
    drain: int = 0
    pause: int = 0
    handover: int = 0
    is_closing: bool = False
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, PeerDown] = field(default_factory=dict)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused while those in flight finish."""
        return self.is_closing or bool(self.drain) or self.state == "draining"

    def problem(self) -> MstarError | None:
        """Return why requests are refused; None if they are accepted."""
        if self.state == "unhealthy":
            reason = f": {self.reason}" if self.reason else ""
            return Unavailable(f"the deployment is unhealthy{reason}", hint=UNHEALTHY_HINT, code="unavailable")
        if self.state == SLEEPING and not self.wakes_on_request:
            return Unavailable("the deployment sleeps", hint="it serves again once it is woken", code=SLEEPING)
        if self.is_draining:
            return Unavailable("the deployment is draining", hint="new requests are not accepted", code="draining")
        if self.pause:
            return None  # they wait in the queue
        if self.down and CONDUCTOR not in self.up:
            death = self.down.get(CONDUCTOR)
            return WorkerLost(death.public if death else "the conductor is gone", hint="it is restarting")
        if self.state == "starting":
            if self.down:
                return WorkerLost(next(iter(self.down.values())).public, hint="it is restarting")
            phase = f", phase {self.phase}" if self.phase else ""
            return Unavailable(f"the deployment is starting{phase}", hint=self.reason, code="starting")
        if self.state != "ready":
            return Unavailable(f"the deployment is {self.state}", hint=self.reason, code="unavailable")
        if CONDUCTOR not in self.up:
            return Unavailable("the conductor has not started yet", code="starting")
        return None
