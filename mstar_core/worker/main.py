"""Process of a worker: loads its rank's nodes, warms up and runs until the supervisor stops it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from mstar_core.config.deployment import DeploymentSpec, RankPlan
from mstar_core.engine.cuda_graphs.kernel_log import KernelLog
from mstar_core.engine.device import resolve_device
from mstar_core.engine.group.link import GroupEnded, PlanSender
from mstar_core.engine.group.plans import StopPlans
from mstar_core.engine.late_warmup import LateWarmup, serves_first
from mstar_core.errors import ConfigError
from mstar_core.host.wait_spin import wait_spin_s
from mstar_core.messages.names import worker_name
from mstar_core.parallel.groups import RankGroup
from mstar_core.plugin.loader import bound_model
from mstar_core.process.life import ChildArguments, ChildLife, start_child
from mstar_core.process.sockets import ChildSockets
from mstar_core.process.system import keep_freed_memory, keep_start, set_exact_timers
from mstar_core.transport import Courier, Mailbox, Spin
from mstar_core.transport.shm import TensorTransport
from mstar_core.worker.adapters import RankAdapters, banks_of
from mstar_core.worker.executor import Executor
from mstar_core.worker.incoming.blobs import BlobReads
from mstar_core.worker.incoming.reads import Incoming, TensorReads
from mstar_core.worker.loop import Worker
from mstar_core.worker.outbox import Outbox
from mstar_core.worker.peer_memory.memory import CudaMemory
from mstar_core.worker.peer_memory.mooncake import MooncakeMemory, open_engine
from mstar_core.worker.peer_memory.transport import PeerMemory
from mstar_core.worker.start.build import GroupLead, build_runners, lookahead_on, open_device
from mstar_core.worker.start.group import join_place
from mstar_core.worker.start.sleep import hold_memory, rank_sleep, sleeper_of
from mstar_core.worker.steps import FairShare, Steps, ranges_on

if TYPE_CHECKING:
    import torch

    from mstar_core.plugin.spec import ModelSpec

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    """Entry point: `python -m mstar_core.worker SPEC --rank R --incarnation N --supervisor ENDPOINT`."""
    arguments = start_child("worker", argv)
    spec = arguments.spec
    set_exact_timers()  # waits for steps are short naps
    keep_freed_memory()
    with ChildSockets(arguments) as sockets:
        life, transport = sockets.life, sockets.open_tensors()
        with life.guarded():
            rank = rank_plan(spec, arguments.rank)
            device = open_device(rank, life)
            mailbox = sockets.open_mailbox()
            with leading(arguments, rank, device, life) as lead, ends_with_group():
                worker = _worker(spec, rank, life, mailbox, sockets.courier, transport, device, lead)
                keep_start()
                life.phase("ready", facts=capacity(worker))
                with (spec.transport.protocol != "SHM" and worker.peer_memory) or nullcontext():
                    worker.run()


@contextmanager
def leading(
    arguments: ChildArguments, rank: RankPlan, device: torch.device, life: ChildLife
) -> Iterator[GroupLead | None]:
    """Join and leave the group that this rank leads, if there is one."""
    plan = arguments.spec.plan.group_of(rank.rank)
    if plan is None or plan.leader != rank.rank:
        yield None
        return
    place = join_place(arguments, plan, life)
    with PlanSender(place) as sender:
        sender.accept()
        with RankGroup(place, device) as group:
            yield GroupLead(group=group, sender=sender, nodes=plan.nodes)
            with suppress(GroupEnded):  # followers that are gone need no notice
                sender.publish(StopPlans(reason=life.stop_reason or ""))


@contextmanager
def ends_with_group() -> Iterator[None]:
    """Turn the end of this process's group into the error that ends the process."""
    try:
        yield
    except GroupEnded as ended:
        raise ended.error from ended


def rank_plan(spec: DeploymentSpec, rank: int) -> RankPlan:
    """Return the plan of one rank. Raises ConfigError when the deployment has no such rank."""
    for plan in spec.plan.ranks:
        if plan.rank == rank:
            return plan
    raise ConfigError(f"the deployment has no rank {rank}", f"it has {len(spec.plan.ranks)}")


def _worker(
    spec: DeploymentSpec,
    rank: RankPlan,
    life: ChildLife,
    mailbox: Mailbox,
    courier: Courier,
    transport: TensorTransport,
    device: torch.device,
    lead: GroupLead | None,
) -> Worker:
    model = bound_model(spec.plugin, spec.model, spec.folder, spec.model_kwargs)
    spec = spec.fitted(model)
    kernels = KernelLog()
    late = LateWarmup() if device.type == "cuda" else None
    sleeper = sleeper_of(device, spec)
    first = late if serves_first(life.incarnation) else None
    runners = build_runners(spec, model, rank, life, device, kernels, lead, first, partial(hold_memory, sleeper))
    if late is not None:
        late.runners = runners
    adapters = RankAdapters(banks_of(runners))
    adapters.load_all(spec.adapters, is_first=life.incarnation == 1)
    kernels.serve()
    peer_memory = peer_memory_of(spec, rank, life)
    incoming = incoming_of(spec, life, transport, peer_memory)
    outbox = Outbox(
        life.name,
        rank.rank,
        courier,
        transport,
        peer_memory=peer_memory,
        incoming=incoming,
        is_elsewhere=life.is_elsewhere,
    )
    executor = Executor(
        model, rank.rank, runners, outbox, transport, time.monotonic, spec.feature_cache_bytes, incoming, adapters
    )
    spin = Spin(wait_spin_s(spec))
    steps = Steps(
        runners=runners,
        scheduler=FairShare(runners),
        lookahead=lookahead_on(resolve_device(rank.device)),
        ranges=ranges_on(rank.device, is_wanted=spec.nvtx),
        spin_s=spin.span_s,
        split=executor.split,
    )
    sleep = rank_sleep(
        spec,
        model,
        rank,
        runners,
        device,
        sleeper,
        life.answer,
        group=None if lead is None else lead.group,
        shared=frozenset() if lead is None else frozenset(lead.nodes),
        steps=steps,
    )
    return Worker(
        mailbox=mailbox,
        transport=transport,
        life=life,
        executor=executor,
        outbox=outbox,
        runners=runners,
        steps=steps,
        spin=spin,
        kernels=kernels,
        peer_memory=peer_memory,
        incoming=incoming,
        shown=shown_names(model, rank),
        late=late,
        sleep=sleep,
        wakes_on_request=spec.api.wake_on_request,
        yields_to_sound=spec.yield_to_sound,
        first_sound_requests=spec.first_sound_requests,
    )


def shown_names(model: ModelSpec, rank: RankPlan) -> dict[str, str]:
    """Return the name under which each node reports that this rank holds only for a cache branch."""
    branches = [node for node in map(model.node, rank.nodes) if node.of is not None]
    return {node.owner.name: node.name for node in reversed(branches) if node.owner.name not in rank.nodes}


def peer_memory_of(spec: DeploymentSpec, rank: RankPlan, life: ChildLife) -> PeerMemory | None:
    """Return the transport to other workers: the configured one, or CUDA IPC between the GPUs of a host, or neither."""
    if spec.transport.protocol != "SHM":
        return over_network(spec, rank, life)
    peers = [
        worker_name(other.rank)
        for other in spec.plan.ranks
        if other.device.startswith("cuda") and other.host == rank.host and other is not rank
    ]
    if not rank.device.startswith("cuda") or not peers:
        return None
    return PeerMemory(life.name, life.incarnation, CudaMemory(resolve_device(rank.device)), peers)


def incoming_of(
    spec: DeploymentSpec, life: ChildLife, transport: TensorTransport, peer_memory: PeerMemory | None
) -> Incoming | None:
    """Return the reads of tensors that are not in the shared memory of this host; None if there are none."""
    kinds: list[TensorReads] = [] if peer_memory is None else [peer_memory]
    if spec.hosts:
        kinds.append(BlobReads(transport, life.is_elsewhere))
    return Incoming(kinds) if kinds else None


def over_network(spec: DeploymentSpec, rank: RankPlan, life: ChildLife) -> PeerMemory | None:
    """Return the transport to all other workers by TCP or RDMA, None without any."""
    peers = [worker_name(other.rank) for other in spec.plan.ranks if other is not rank]
    if not peers:
        return None
    engine, session = open_engine(spec.transport, rank.rank, life.incarnation, spec.address)
    log.info("tensors for other ranks: %s at %s", spec.transport.protocol, session)
    memory = MooncakeMemory(engine, session, resolve_device(rank.device))
    return PeerMemory(life.name, life.incarnation, memory, peers)


def capacity(worker: Worker) -> dict[str, object]:
    """Return the pages and slots of this rank by node, for admission and for display."""
    return {
        name: {"pages": memory.pages_total, "slots": memory.slots_total}
        for name, runner in worker.runners.items()
        if (memory := runner.memory()).slots_total
    }
