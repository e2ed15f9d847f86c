"""In-process runtime: a real conductor, one real worker per rank and real engines, without message sockets.

Used by the conformance checks and by tests. It applies everything that a process boundary does to messages and
tensors: messages pass the wire format, tensors are loans that must be released.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from mstar_core.api.preprocess.child import load_processor
from mstar_core.conductor.conductor import HOST_GRACE_S, Conductor
from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from mstar_core.conformance.clock import FakeClock
from mstar_core.conformance.fake_api import FakeApi, RequestOutcome, SampleRequest, SentRequest
from mstar_core.conformance.mailbox import FakeMailbox, MailboxNetwork
from mstar_core.conformance.nodes import BuiltNode, Faults, RuntimeSettings, build_nodes, make_runners
from mstar_core.engine.base import Handle
from mstar_core.errors import EngineError, MstarError
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.messages.life import PeerReady
from mstar_core.messages.names import API, CONDUCTOR, worker_name
from mstar_core.plugin.processor import Processor
from mstar_core.plugin.spec import ModelSpec
from mstar_core.transport import RemoteAccess, make_keys
from mstar_core.transport.arena import MIB
from mstar_core.transport.shm import TensorTransport
from mstar_core.worker.executor import Executor
from mstar_core.worker.incoming.blobs import BlobReads
from mstar_core.worker.incoming.reads import Incoming, TensorReads
from mstar_core.worker.loop import Worker
from mstar_core.worker.outbox import Outbox
from mstar_core.worker.peer_memory.transport import PeerMemory
from mstar_core.worker.start.build import own_nodes
from mstar_core.worker.steps import FairShare, Steps

if TYPE_CHECKING:
    from mstar_core.messages.wire import Envelope, Message
    from mstar_core.process.life import ChildLife
    from mstar_core.transport import Mailbox

TICK_S: Final = 1e-4
"""Time that passes with each reading of the clock, so that shares of device time are the same in every run."""

FETCH_NAP_S: Final = 2e-4
"""Wait of an idle runtime for tensors from other hosts."""

MOST_STEPS: Final = 20_000
"""A run that takes more turns than this is treated as endless."""


class QuietLife:
    """Process life-cycle of a worker without a supervisor."""

    stop_reason: str | None = None

    def __init__(self, name: str, is_elsewhere: Callable[[str], bool]) -> None:
        self.name = name
        self.is_elsewhere = is_elsewhere

    def accepts(self, envelope: Envelope) -> bool:
        """Accept every message: all peers live as long as the runtime."""
        return True

    def receive(self, envelope: Envelope) -> tuple[Message, ...]:
        """Return the message for its owner to handle."""
        return (envelope.body,)

    def beat(self, now: float, *, work_ready: bool = False, steps: int = 0) -> None:
        """Discard the report."""

    def wait_s(self, now: float) -> float:
        """Return 0: this runtime never sleeps."""
        return 0.0

    def telemetry(self, values: dict[str, float], *_: object, **__: object) -> None:
        """Discard the report."""


class LocalRuntime:
    """One deployment of a model in this process.

    ranks: number of ranks that the nodes are spread over. plan: placement to use instead; tensors between ranks that it
    puts on different hosts are fetched by TCP.
    built: nodes that are already built, to be shared. slow: links whose messages arrive one turn later.
    """

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        settings: RuntimeSettings | None = None,
        *,
        ranks: int = 1,
        plan: Plan | None = None,
        built: Mapping[str, BuiltNode] | None = None,
        processor: Processor | None = None,
        faults: Faults | None = None,
        slow: Collection[tuple[str, str]] = (),
        peer_memory: Callable[[str, Collection[str]], PeerMemory] | None = None,
    ) -> None:
        """peer_memory: makes a worker's transport to its peers, by name, through device memory."""
        settings = settings or RuntimeSettings()
        self.settings = replace(settings, max_seq_len=min(settings.max_seq_len, spec.max_seq_len))
        self.clock = FakeClock(1.0, tick=TICK_S)
        plan = spread(spec, ranks) if plan is None else plan
        self.post = MailboxNetwork(slow)
        folder_of_sockets = Path(tempfile.mkdtemp(prefix="mstar-"))
        names = [API, *(worker_name(rank.rank) for rank in plan.ranks)]
        self._hosts = {worker_name(rank.rank): rank.host for rank in plan.ranks}
        access = RemoteAccess("127.0.0.1", make_keys()) if any(self._hosts.values()) else None
        self.transports = {name: _transport(name, folder_of_sockets, access) for name in names}
        for owner, each in self.transports.items():
            for name, peer in self.transports.items():
                each.connect(name, peer.endpoint, 1, peer.blob_endpoint if self._are_apart(owner, name) else "")
        weakref.finalize(self, _free, list(self.transports.values()), folder_of_sockets)
        self.steps = 0
        self._probed = 0  # handles up to this one have been checked
        box = FakeMailbox(self.post, CONDUCTOR)
        self._inbox = box
        self.conductor = Conductor(spec, plan, box, max_seq_len=self.settings.max_seq_len, clock=self.clock)
        nodes = build_nodes(spec, folder) if built is None else built
        self._peer_memory = peer_memory
        self._names = [worker_name(rank.rank) for rank in plan.ranks]
        self.workers = [self._worker(spec, rank, nodes, faults) for rank in plan.ranks]
        for rank in plan.ranks:
            self.conductor.on(PeerReady(name=worker_name(rank.rank), incarnation=1))
        processor = processor or load_processor(str(spec.processor), folder, spec.model_kwargs)
        box = FakeMailbox(self.post, API)
        self.api = FakeApi(spec, processor, box, self.transports[API], self.settings.max_seq_len)

    # -- requests ---------------------------------------------------------------------------------------------

    def request(
        self,
        text: str | None = None,
        params: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (),
        **more: Any,
    ) -> RequestOutcome:
        """Run one request to its end. Raises RequestError if it is refused."""
        return self.ask(SampleRequest(text=text, params=params or {}, outputs=outputs, **more))[0]

    def ask(self, *asks: SampleRequest) -> list[RequestOutcome]:
        """Send requests together and run all of them to their ends."""
        calls = [self.send(ask) for ask in asks]
        self.run()
        return [ended(call) for call in calls]

    def send(self, ask: SampleRequest) -> SentRequest:
        """Start a request. Raises RequestError if it is refused."""
        return self.api.send(ask)

    def grow(self, call: SentRequest, name: str, values: Sequence[int], *, is_over: bool = False) -> None:
        """Add values to a growing input of a request, once all work that was possible without them is done."""
        self._turn_until_idle()
        self.api.grow(call, name, values, is_over=is_over)

    def cancel(self, call: SentRequest) -> None:
        """Disconnect the client of a request."""
        self.api.cancel(call)

    # -- turning ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one turn of the conductor, each worker and the client side. Returns False once no work is left."""
        self.steps += 1
        self.post.turn()
        for transport in self.transports.values():
            transport.deliver()
        letters = self._inbox.drain()
        for letter in letters:
            self.conductor.on(letter.body)
        before = sum(worker.steps.collected for worker in self.workers)
        with one_thread():
            for worker in self.workers:
                worker.turn()
        moved = sum(worker.steps.collected for worker in self.workers) > before
        is_moving = moved or any(worker.steps.count for worker in self.workers)
        has_mail = self.api.turn()
        copies = any(
            worker.outbox.is_waiting or (worker.arrivals is not None and worker.arrivals.is_waiting)
            for worker in self.workers
        )
        is_active = bool(letters) or is_moving or has_mail or self.post.waiting > 0
        fetches = any(worker.executor.inputs.waiting or reading(worker) for worker in self.workers)
        if fetches and not is_active:
            time.sleep(FETCH_NAP_S)
        return is_active or copies or fetches

    def run(self) -> None:
        """Take turns until no work is left. Raises EngineError if that never happens or a request has no end."""
        self._turn_until_idle()
        if any(request.error is not None for request in self.conductor.requests.values()):
            self.clock.sleep(HOST_GRACE_S)  # no process dies here that would explain the error
            self.expire()
            self._turn_until_idle()
        if self.api.calls:
            waiting = ", ".join(call.ask.name or f"request {call.handle}" for call in self.api.calls.values())
            raise EngineError(f"no work is left, but these requests have not ended: {waiting}")

    def _turn_until_idle(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.step():
                return
        raise EngineError(f"the work does not end within {MOST_STEPS} turns")

    def expire(self) -> None:
        """Check all deadlines."""
        self.conductor.expire()

    # -- what is left -----------------------------------------------------------------------------------------

    def leaks(self) -> list[str]:
        """List the resources that are still held although no request is in flight."""
        leaks = [f"the conductor holds request {handle}" for handle in self.conductor.requests]
        leaks += [f"the router counts {n} requests on rank {r}" for r, n in self.conductor.router.load.items() if n]
        for worker in self.workers:
            leaks += self._worker_leaks(worker)
        leaks += [
            f"{transport.live} tensors of {owner} are lent"
            for owner, transport in self.transports.items()
            if transport.live
        ]
        if not leaks:
            self._probed = self.api.sent
        return leaks

    def _worker_leaks(self, worker: Worker) -> list[str]:
        name = worker.life.name
        leaks = [f"{name} holds request {handle}" for handle in worker.executor.requests]
        jobs = len(worker.executor._jobs.under_way)  # a wrong end would leave entries in this table
        if jobs:
            leaks.append(f"{name} holds {jobs} jobs")
        lent = 0 if worker.peer_memory is None else worker.peer_memory.live
        if lent or reading(worker):
            leaks.append(f"{name} lends {lent} tensors to peers and reads {reading(worker)}")
        for node, runner in worker.runners.items():
            memory, pressure = runner.memory(), runner.pressure()
            held = {"pages": memory.pages_used, "slots": memory.slots_used, "jobs": pressure.ready + pressure.waiting}
            leaks += [f"node {node} on {name} holds {count} {what}" for what, count in held.items() if count]
            for handle in range(self._probed + 1, self.api.sent + 1):
                try:
                    runner.open(Handle(handle), SamplingParams(), 1)
                except MstarError:
                    leaks.append(f"node {node} on {name} knows request {handle}")
                runner.close(Handle(handle))
        return leaks

    # -- parts ------------------------------------------------------------------------------------------------

    def _are_apart(self, name: str, other: str) -> bool:
        """Return whether two processes are on different hosts."""
        return self._hosts.get(name, "") != self._hosts.get(other, "")

    def _worker(self, spec: ModelSpec, rank: RankPlan, built: Mapping[str, BuiltNode], faults: Faults | None) -> Worker:
        name = worker_name(rank.rank)
        box, transport = FakeMailbox(self.post, name), self.transports[name]
        names = [node.name for node in own_nodes(spec, rank)]
        runners = make_runners(built, names, self.settings, self.clock, faults)
        memory = self._peer_memory(name, self._names) if self._peer_memory is not None else None
        kinds: list[TensorReads] = [] if memory is None else [memory]
        is_elsewhere = partial(self._are_apart, name)
        incoming = Incoming([*kinds, BlobReads(transport, is_elsewhere)])
        outbox = Outbox(
            name, rank.rank, box, transport, peer_memory=memory, incoming=incoming, is_elsewhere=is_elsewhere
        )
        # The fake mailbox has the methods of a mailbox that the loop calls.
        return Worker(
            mailbox=cast("Mailbox", box),
            transport=transport,
            life=cast("ChildLife", QuietLife(name, is_elsewhere)),
            outbox=outbox,
            runners=runners,
            executor=Executor(
                spec, rank.rank, runners, outbox, transport, self.clock, self.settings.feature_cache_bytes, incoming
            ),
            peer_memory=memory,
            incoming=incoming,
            steps=Steps(
                runners=runners,
                scheduler=FairShare(runners, clock=self.clock),
                lookahead=self.settings.lookahead,
                clock=self.clock,
            ),
            yields_to_sound=self.settings.yields_to_sound,
            first_sound_requests=self.settings.first_sound_requests,
        )


def reading(worker: Worker) -> int:
    """Return the number of tensors that a worker reads from other GPUs and hosts."""
    return 0 if worker.incoming is None else worker.incoming.reading


def _transport(name: str, folder: Path, access: RemoteAccess | None) -> TensorTransport:
    """Return a transport that lends every tensor, of whatever size, so that each must be released."""
    return TensorTransport(name, 1, folder, segment_bytes=MIB, inline_bytes=-1, remote=access, remote_inline_bytes=-1)


def _free(transports: Sequence[TensorTransport], folder: Path) -> None:
    for transport in transports:
        transport.close()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: a miniature's operations are too small to split, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ended(call: SentRequest) -> RequestOutcome:
    """Return the outcome of a request that has ended."""
    if call.outcome is None:
        raise EngineError(f"request {call.ask.name or call.handle} has not ended")
    return call.outcome


def spread(spec: ModelSpec, ranks: int) -> Plan:
    """Assign the model's nodes to ranks in turn; a node on a cache branch stays with its parent."""
    roots = [node.name for node in spec.nodes if node.of is None]
    rank_of = {name: index % ranks for index, name in enumerate(roots)}
    placements = tuple(NodePlacement(node=name, replicas=((rank,),)) for name, rank in rank_of.items())
    plans = tuple(
        RankPlan(rank=rank, device="cpu", nodes=tuple(n for n, r in rank_of.items() if r == rank))
        for rank in range(min(ranks, len(roots)))
    )
    return Plan(ranks=plans, placements=placements)
