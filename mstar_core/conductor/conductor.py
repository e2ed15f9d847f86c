"""Life cycle of requests: drives their programs, sends walks to ranks, finishes, cancels and fails them.

Called by `main.py` with one message at a time. Iterations of loops never involve the conductor.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import msgspec

from mstar_core.conductor.arriving import arriving_inputs, grown
from mstar_core.conductor.caches import CacheUse, cache_uses
from mstar_core.conductor.progress import Progress
from mstar_core.conductor.reading import reading_only
from mstar_core.conductor.request import (
    ConductorRequest,
    PartitionRun,
    PendingRun,
    facts_of,
    inline_bytes_of,
    run_message,
    signal_map,
)
from mstar_core.conductor.resume import with_delivered
from mstar_core.conductor.router import Router
from mstar_core.conductor.waiting import WaitingRequests
from mstar_core.config.deployment import Plan
from mstar_core.errors import EngineError, PeerStalled, TimedOut, TransportError, WorkerLost
from mstar_core.graph import KV_CACHE, StreamingGraphEdge, graph_nodes, loops
from mstar_core.messages.life import Cordon, Cordoned, PeerDown, PeerReady, Reload
from mstar_core.messages.names import API, SUPERVISOR, rank_of, worker_name
from mstar_core.messages.requests import (
    CancelRequest,
    EndSession,
    ErrorInfo,
    MoreInput,
    NewRequest,
    Reconcile,
    RequestFailed,
    RequestFinished,
    error_info,
)
from mstar_core.messages.wire import Message, Sender
from mstar_core.messages.work import (
    CloseRequest,
    EndStream,
    OpenRequest,
    ReleaseSignal,
    RunWalk,
    RunWalks,
    WalkDone,
    WorkFailed,
)
from mstar_core.plugin.check.run_check import RunCheck
from mstar_core.plugin.program import Answer, Receive, Run
from mstar_core.plugin.spec import ModelSpec, Partition
from mstar_core.process.failures import attempt, log_lost
from mstar_core.process.leftovers import Leftovers
from mstar_core.transport.message_parts import in_parts

log = logging.getLogger(__name__)

PEER_GRACE_S: Final = 0.5
"""Time in which the death of a process may follow errors of tensors that it lent, which the death explains."""

HOST_GRACE_S: Final = 3.0
"""The same if the request uses another host: a lost host is noticed up to this much later than by its readers."""


class Conductor:
    """All requests in flight. A bad message or program fails its own request only."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        send: Sender,
        *,
        max_seq_len: int,
        clock: Callable[[], float],
        has_prefix_caches: bool = True,
        read_plan: Callable[[], Plan] | None = None,
    ) -> None:
        self.spec = spec
        self.router = Router(spec, plan, has_prefix_caches)
        self.requests: dict[int, ConductorRequest] = {}
        self.unknown = 0
        self.finished = 0
        self.failed = 0
        self.leftovers = Leftovers()
        self.progress = Progress(spec)
        self._newest = 0
        self.waiting = WaitingRequests(clock)
        self._cordon_number = 0
        self._reported_idle: list[int] | None = None
        self._max_seq_len = max_seq_len
        self._send = send
        self._clock = clock
        self._read_plan = read_plan or (lambda: plan)
        self._producers = _producers(spec)
        self._stopping_walks = _walks_with_stop(spec)
        self._walks: dict[str, tuple[str, frozenset[str]]] = {}
        self._uses: dict[str, tuple[CacheUse, ...]] = {}
        self._checked = RunCheck(spec.streams)
        self._owners = {node.name: node.kv.branches for node in spec.nodes if node.kv is not None and node.of is None}

    def on(self, message: Message) -> None:
        """Handle one message. Never raises: an error fails the request of the message."""
        try:
            self._dispatch(message)
        except Exception as error:  # isolation boundary: one message, one request
            handle = getattr(message, "handle", None)
            if not isinstance(error, PeerStalled):
                log.exception("message %s failed", type(message).__name__)
            if isinstance(handle, int) and handle in self.requests:
                self._fail(handle, error)

    def _dispatch(self, message: Message) -> None:
        match message:
            case NewRequest():
                self._admit(message)
            case WalkDone():
                self._walk_done(message)
            case WorkFailed():
                self._work_failed(message)
            case CancelRequest():
                self._cancel(message)
            case MoreInput():
                self._more_input(message)
            case EndSession():
                self._end_session(message)
            case Reconcile():
                self._close_leftovers(message)
            case PeerReady():
                self._worker_ready(message)
            case PeerDown():
                self._peer_down(message)
            case Cordon():
                self._cordon(message)
            case Reload():
                self.router.replan(self._read_plan())
            case _:
                self.unknown += 1

    def expire(self) -> None:
        """Fail requests past their deadline, in case the api has not, and those whose error no death explains."""
        now = self._clock()
        late = TimedOut("the request took longer than its deadline", hint="raise timeout_s or ask for less")
        for handle in [handle for handle, request in self.requests.items() if request.deadline < now]:
            self._fail(handle, late)
        for handle in self.waiting.take_late():
            self._refuse(handle, late)
        for request in [request for request in self.requests.values() if request.has_failed(now)]:
            assert request.error is not None
            self._fail_with(request.handle, request.error)

    def reconcile(self) -> None:
        """Send each worker the handles of its live requests, so that it closes those whose end was lost."""
        for rank in sorted(self.router.ready):
            live = [handle for handle, request in self.requests.items() if rank in request.homes.ranks]
            with suppress(PeerStalled):  # the next one says the same
                self._send.send(worker_name(rank), Reconcile(live=live, newest=self._newest))

    def _end_session(self, message: EndSession) -> None:
        self.router.sessions.forget(message.session)
        for rank in sorted(self.router.ready):
            self._send.send(worker_name(rank), message)

    def _close_leftovers(self, message: Reconcile) -> None:
        for handle in self.leftovers.find(message, self.requests):
            log.warning("request %d is closed: the api does not know it any more", handle)
            self._end(self.requests[handle])

    # start of a request

    def _admit(self, message: NewRequest) -> None:
        if message.handle in self.requests or message.handle in self.waiting:
            self.unknown += 1
            return
        self._newest = max(self._newest, message.handle)
        try:
            facts = facts_of(message, self.spec)
            partitions = self.spec.active_partitions(facts)
            if message.reads_only:  # it has no output of any modality
                partitions = tuple(partition for partition in partitions if partition.wants is None)
            homes = self.router.choose(partitions, message)
        except WorkerLost as error:
            if message.resume is None:
                self._refuse(message.handle, error)
            else:
                self.waiting.add(message)
            return
        except Exception as error:  # noqa: BLE001  isolation boundary: a request that cannot begin
            self._refuse(message.handle, error)
            return
        programs = {p.name: p.program(facts) for p in partitions}
        if message.reads_only:
            programs = {name: reading_only(program, self._generates) for name, program in programs.items()}
        runs = {p.name: PartitionRun(p, programs[p.name]) for p in partitions}
        request = ConductorRequest(
            message,
            facts,
            homes,
            runs,
            deadline=self._clock() + message.deadline_s + 1.0,
            growing=arriving_inputs(message),
        )
        self.requests[message.handle] = request
        self.router.opened(homes)
        # The first runs of all programs determine how many candidates keep caches; ranks admit them as a whole or not.
        is_begun = all(self._advance(request, run, None, first=True) for run in runs.values())
        if is_begun:
            self._open_on_ranks(request)
        for run in runs.values() if is_begun else ():
            if message.handle in self.requests:
                self._take(request, run)

    def _open_on_ranks(self, request: ConductorRequest) -> None:
        message = request.message
        limit = getattr(request.facts.params, "max_output_tokens", None)
        tokens = self._max_seq_len if limit is None else min(self._max_seq_len, message.prompt_tokens + int(limit))
        candidates = 1
        for wish in (wish for run in request.partitions.values() for wish in run.runs):
            kept = self._kept_by_a_candidate(wish)
            if kept and wish.rows > candidates:
                candidates, tokens = wish.rows, wish.rows * kept
        opened = OpenRequest(
            handle=message.handle,
            params=message.params,
            seed=message.seed,
            homes=dict(request.homes.by_node),
            max_tokens=tokens,
            outputs=message.outputs,
            rows=candidates,
            salt=message.salt,
            adapter=message.adapter,
            session=message.session,
            lease_s=message.lease_s,
            is_heard=message.is_heard,
        )
        if not request.homes.by_walk:
            opened = with_delivered(opened, message)
        if len(request.homes.ranks) == 1:
            request.opening = opened  # sent with its first walks, which saves one message
            return
        split = self.router.split_streams((run.partition for run in request.partitions.values()), request.homes)
        opened = msgspec.structs.replace(opened, split_streams=split)
        for rank in sorted(request.homes.ranks):
            self._send.send(worker_name(rank), opened)

    def _kept_by_a_candidate(self, wish: Run) -> int:
        """Return the cached tokens of each candidate of a run beside the shared ones; 0 if they run in turn."""
        if not wish.row_passes:
            return wish.row_tokens
        _, walk = self.spec.walk(wish.walk)
        sizes = [use.attend.tokens or 0 for use in graph_nodes(walk) if use.attend is not None and use.attend.write]
        return wish.row_passes * max(sizes, default=0)

    # steps of its programs

    def _step(self, request: ConductorRequest, run: PartitionRun, answer: Answer) -> None:
        if self._advance(request, run, answer):
            self._take(request, run)

    def _advance(self, request: ConductorRequest, run: PartitionRun, answer: Answer, *, first: bool = False) -> bool:
        """Advance a program to its next wish. Returns False when it raised, which fails the request."""
        try:
            run.next_wish(answer, first=first)
        except Exception as error:  # noqa: BLE001  isolation boundary: one program, one request
            self._fail(request.handle, error)
            return False
        return True

    def _take(self, request: ConductorRequest, run: PartitionRun) -> None:
        """Carry out the wish of a program."""
        wish, wishes, is_over, run.batch = run.wish, run.runs, run.wish is None, isinstance(run.wish, list)
        run.wish = None  # drops the signals that it references
        try:
            if is_over:
                self._partition_ended(request, run)
            elif isinstance(wish, Receive):
                run.awaits = request.input(wish.name).name
                self._give_input(request, run)
            else:
                self._hand_out(request, run, wishes, run.forks)
        except Exception as error:  # noqa: BLE001  isolation boundary: one program, one request
            self._fail(request.handle, error)

    def _more_input(self, message: MoreInput) -> None:
        request = self.requests.get(message.handle)
        if request is None:
            if not self.waiting.change(message.handle, lambda waiting: grown(waiting, message)):
                self.unknown += 1
            return
        request.input(message.name).add(message.values, is_over=message.is_over)
        for run in request.partitions.values():
            if message.handle in self.requests and run.awaits == message.name:
                self._give_input(request, run)

    def _give_input(self, request: ConductorRequest, run: PartitionRun) -> None:
        """Answer a program that waits for an input, if there is more of it or its end is known."""
        arriving = request.growing[run.awaits]
        if arriving.is_ready:
            run.awaits = ""
            self._step(request, run, arriving.take())

    def _hand_out(
        self, request: ConductorRequest, run: PartitionRun, wishes: list[Run], forks: list[tuple[str, str]]
    ) -> None:
        if not wishes:
            self._step(request, run, [])
            return
        per_rank: dict[int, list[RunWalk]] = {}
        finishes = self._may_finish(request, run, wishes)
        for number, wish in enumerate(wishes):
            is_end = finishes and number == len(wishes) - 1
            self._checked.require(self.spec.walk(wish.walk)[1], wish)
            message = run_message(request, wish, forks if number == 0 else [], place=run.place, finishes=is_end)
            run.taken += 1
            partition, nodes = self._nodes_of(wish.walk)
            if partition != run.partition.name:
                raise EngineError(
                    f"the program of partition {run.partition.name} asked for walk {wish.walk} of {partition}"
                )
            homes = request.homes.of(wish.walk)
            ranks = {homes[node] for node in nodes}
            run.pending[message.run] = PendingRun(wish.walk, waiting=set(ranks))
            run.order.append(message.run)
            shares = dict.fromkeys(ranks, message)
            if len(request.homes.ranks) > 1:
                shares = request.caches.shares(message, self._cache_uses(wish.walk), homes, ranks, self._owners)
            for rank, share in shares.items():
                per_rank.setdefault(rank, []).append(share)
        for rank, messages in per_rank.items():
            for part in in_parts(messages, inline_bytes_of):
                walks = RunWalks(handle=request.handle, partition=run.partition.name, runs=part, opens=request.opening)
                request.opening = None
                self._send.send(worker_name(rank), walks)
        self.progress.changed(request.handle)

    def _generates(self, walk: str) -> bool:
        """Return whether a walk has a loop. Raises GraphError for an unknown walk."""
        return any(True for _ in loops(self.spec.walk(walk)[1]))

    def _nodes_of(self, walk: str) -> tuple[str, frozenset[str]]:
        """Return a walk's partition and nodes. Raises GraphError for an unknown walk."""
        known = self._walks.get(walk)
        if known is None:
            partition, body = self.spec.walk(walk)
            known = self._walks[walk] = (partition.name, frozenset(use.spec.name for use in graph_nodes(body)))
        return known

    def _cache_uses(self, walk: str) -> tuple[CacheUse, ...]:
        """Return the caches that a walk uses."""
        if walk not in self._uses:
            self._uses[walk] = cache_uses(self.spec.walk(walk)[1])
        return self._uses[walk]

    def _may_finish(self, request: ConductorRequest, run: PartitionRun, wishes: list[Run]) -> bool:
        """Whether the rank of the last runs has all facts of the request's end and may report it to the api."""
        is_whole = len(request.partitions) == 1 and len(request.homes.ranks) == 1
        is_cut = request.length_stop or any(wish.walk in self._stopping_walks for wish in wishes)
        return run.finishes and is_whole and not is_cut

    def _walk_done(self, done: WalkDone) -> None:
        request = self.requests.get(done.handle)
        run = None if request is None else request.waiting_for(done.run)
        if request is None or run is None:
            self.unknown += 1
            return
        request.take(done)
        pending = run.pending[done.run]
        if pending.waiting == {done.rank}:
            request.walks[pending.walk] = request.walks.get(pending.walk, 0) + 1
            self.progress.changed(request.handle)
        if done.reason == "length" and pending.walk in self._stopping_walks:
            request.length_stop = True
        for port, signal in signal_map(done).items():
            pending.signals[port] = signal
            weakref.finalize(signal, self._release, request.handle, signal.rank, signal.key)
        if run.report(done):
            self._step(request, run, run.answer())

    def _release(self, handle: int, rank: int, key: int) -> None:
        if handle in self.requests:
            self._send.send(worker_name(rank), ReleaseSignal(handle=handle, key=key))

    def _partition_ended(self, request: ConductorRequest, run: PartitionRun) -> None:
        if request.opening is not None and not request.is_finished:
            self._send.send(worker_name(min(request.homes.ranks)), request.opening)
            request.opening = None
        for stream, consumer in self._producers.get(run.partition.name, ()):
            rank = request.homes.by_node.get(consumer)
            if rank is not None:
                end = EndStream(handle=request.handle, stream=stream, total=request.stream_total(stream))
                self._send.send(worker_name(rank), end)
        if request.is_finished:
            self._finish(request)

    # end of a request

    def _finish(self, request: ConductorRequest) -> None:
        emitted = {worker_name(rank): count for rank, count in request.emitted.items() if count}
        finished = RequestFinished(
            handle=request.handle,
            reason="length" if request.length_stop else "stop",
            emitted=emitted,
            counts=request.counts,
            cached_tokens=request.cached_tokens,
        )
        self.finished += 1
        if not request.is_told:
            self._send.send(API, finished)  # before anything else, because a client waits
        self._end(request)

    def _cancel(self, message: CancelRequest) -> None:
        request = self.requests.get(message.handle)
        if request is not None:
            self._end(request)
        elif not self.waiting.drop(message.handle):
            self.unknown += 1
            return
        error = ErrorInfo(message="the request was cancelled", code="cancelled", status=499)
        self._send.send(API, RequestFailed(handle=message.handle, error=error))

    def _fail(self, handle: int, error: BaseException) -> None:
        self._fail_with(handle, error_info(error, "the model's program failed"))

    def _work_failed(self, message: WorkFailed) -> None:
        request = self.requests.get(message.handle)
        if request is not None and message.error.code == TransportError.code and (grace_s := self._grace_s(request)):
            request.error, request.error_until = message.error, self._clock() + grace_s
        else:
            self._fail_with(message.handle, message.error)

    def _grace_s(self, request: ConductorRequest) -> float:
        """Return the time in which a death may explain that a rank could not read a tensor."""
        ranks = request.homes.ranks
        if self.router.uses_other_hosts(ranks):
            return HOST_GRACE_S
        return PEER_GRACE_S if len(ranks) > 1 else 0.0

    def _fail_with(self, handle: int, error: ErrorInfo, lost: str = "", *, is_excused: bool = False) -> None:
        """Fail a request. lost: name of the process whose death is the cause."""
        request = self.requests.get(handle)
        if request is None:
            self.unknown += 1
            return
        self.failed += 1
        self._end(request)
        self._send.send(API, RequestFailed(handle=handle, error=error, lost=lost, is_excused=is_excused))

    def _refuse(self, handle: int, error: BaseException) -> None:
        self.failed += 1
        self._send.send(API, RequestFailed(handle=handle, error=error_info(error, "the model's program failed")))

    def _end(self, request: ConductorRequest) -> None:
        """Remove a request, free its ranks and close its generators. The only place where a request ends."""
        del self.requests[request.handle]
        attempt(self.progress.ended, request)
        attempt(self.router.closed, request.homes)
        for rank in request.homes.ranks:
            attempt(self._send.send, worker_name(rank), CloseRequest(handle=request.handle))
        for run in request.partitions.values():
            attempt(run.generator.close)
        if self.router.cordoned:
            attempt(self._report_cordons)

    # peers

    def _worker_ready(self, message: PeerReady) -> None:
        rank = rank_of(message.name)
        if rank is not None:
            self.router.ready.add(rank)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        for waiting in self.waiting.take_all():
            self._admit(waiting)

    def _peer_down(self, message: PeerDown) -> None:
        rank = rank_of(message.name)
        if rank is not None:
            self.router.ready.discard(rank)
            self.router.prefixes.forget(rank)
            self.router.sessions.left(rank)
            failed = self._requests_on(rank)
            log_lost(log, message, [request.message.request_id for request in failed])
            self._lose(failed, message.public, message.name, is_excused=message.is_excused)
        elif message.name == API:
            log_lost(log, message, [request.message.request_id for request in self.requests.values()])
            self.waiting.clear()
            for request in list(self.requests.values()):
                self._end(request)

    def _requests_on(self, rank: int) -> list[ConductorRequest]:
        return [request for request in self.requests.values() if rank in request.homes.ranks]

    def _lose(self, requests: Iterable[ConductorRequest], cause: str, worker: str, *, is_excused: bool) -> None:
        """Fail requests whose worker is lost to them. cause: for clients. is_excused: see PeerDown."""
        error = error_info(WorkerLost(cause), "")
        for request in requests:
            self._fail_with(request.handle, error, lost=worker, is_excused=is_excused)

    def _cordon(self, message: Cordon) -> None:
        self.router.cordoned = frozenset(message.ranks)
        self._cordon_number, self._reported_idle = message.number, None
        for rank in message.evict:
            cause = "its worker is taken out of service"
            self._lose(self._requests_on(rank), cause, worker_name(rank), is_excused=True)
        self._admit_waiting()
        self._report_cordons()

    def _report_cordons(self) -> None:
        idle = self.router.idle_cordons
        if idle != self._reported_idle:
            self._reported_idle = idle
            self._send.send(SUPERVISOR, Cordoned(number=self._cordon_number, ranks=idle))


def _producers(spec: ModelSpec) -> dict[str, list[tuple[str, str]]]:
    """Return the (stream, consuming node) pairs that a partition's walks feed, by partition."""
    producers: dict[str, list[tuple[str, str]]] = {}
    for partition in spec.partitions:
        streams = {edge.stream.name: edge.stream.into[0].name for edge in _stream_edges(partition)}
        producers[partition.name] = sorted(streams.items())
    return producers


def _stream_edges(partition: Partition) -> Iterable[StreamingGraphEdge]:
    for walk in partition.walks.values():
        edges = [edge for use in graph_nodes(walk) for edge in use.outputs]
        edges += [edge for loop in loops(walk) for edge in loop.outputs]
        yield from (edge for edge in edges if isinstance(edge, StreamingGraphEdge))


def _walks_with_stop(spec: ModelSpec) -> frozenset[str]:
    """Return the walks whose loop has a stop rule; reaching their limit is reported as `length`."""
    names = set()
    for partition in spec.partitions:
        for name, walk in partition.walks.items():
            samples = any(use.spec.engine is KV_CACHE for use in graph_nodes(walk))
            if samples and any(loop.stop is not None for loop in loops(walk)):
                names.add(name)
    return frozenset(names)
