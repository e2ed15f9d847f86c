"""Engine for nodes with a paged KV cache: a NodeRunner, made of the node's scheduler and its model runner.

Sequences in resident loops run in every step; other jobs join as passes within the token budget. Under memory pressure
the youngest request is preempted: its pages are freed and recomputed later from its log, so results equal those of an
undisturbed run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from mstar_core.engine.base import NO_ADAPTER, Contention, Handle
from mstar_core.engine.cache.loop_values import LoopValues
from mstar_core.engine.cache.memory import KVMemory
from mstar_core.engine.cache.page_pool import PagePool
from mstar_core.engine.cache.page_table import PageTables
from mstar_core.engine.cache.prefix_cache import PrefixCache
from mstar_core.engine.cache.slots import Slots
from mstar_core.engine.cuda_graphs.compilation import compile_in_parallel
from mstar_core.engine.kv.model_runner import ModelRunner
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.memory.node_memory import NodeMemory
from mstar_core.engine.module import node_module
from mstar_core.engine.port_check import PortCheck
from mstar_core.engine.ports import position_dtype
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.scheduling.device_share import DeviceShare, device_share
from mstar_core.engine.scheduling.inputs import InputProcessor
from mstar_core.engine.scheduling.scheduler import Scheduler
from mstar_core.engine.scheduling.step import HostTransfer, KVStep
from mstar_core.engine.transfers import HostCopy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.engine.base import Job, JobKey, LoopSpec, MemoryUse, Pressure, StepResult
    from mstar_core.engine.cuda_graphs.cache import GraphCache, GraphCounts
    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_core.engine.group.link import PlanSender
    from mstar_core.engine.kv.follower import NodeFollower
    from mstar_core.engine.runner import Running
    from mstar_core.engine.slack import Slack
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.graph.declare.sampling import SamplingParams
    from mstar_core.layers.kv_view import KVModule
    from mstar_core.layers.lora import AdapterBank
    from mstar_core.parallel.collectives import TorchCollectives

Faults = Callable[[Sequence[Handle]], None]
"""Called with the requests of a forward before it runs; a test makes it raise."""


class KVCacheEngine(NodeRunner):
    """Runs one KV node on one device. A step is done when its copies of `host_outputs` are, see NodeModule."""

    has_cache = True

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        settings: KVSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        faults: Faults | None = None,
        report: Callable[[str, str], None] | None = None,
        captures: GraphCache | None = None,
        to_host: Callable[[Tensor], HostTransfer] = HostCopy,
        is_captured: bool = True,
        share: DeviceShare | None = None,
    ) -> None:
        """report: called with the phase (`kernels` or `capture`) and the step, for each step captured here.

        captures: the cache of captured steps, by default a new one. to_host: starts a copy to the host. is_captured:
        False leaves it to the caller to call `capture`, for instance after the kernels of several nodes are compiled.
        share: divides device time between image passes and text; by default by `image_share`, for this device.
        """
        settings.check(spec)
        self.name = spec.name
        self._ports = PortCheck(spec)
        self._to_host = to_host
        self._host_outputs = frozenset(node_module(module).host_outputs)
        self._streamed_outputs = frozenset(node_module(module).streamed_outputs)
        known_ports = tuple(node_module(module).known_ports) if settings.loop is not None else ()
        self._known_ports = known_ports
        self._loop_ports = settings.loop
        self._adapters = settings.adapters
        self._grammars = settings.grammars
        self._module = cast("nn.Module", module)  # see `node_memory`
        self._memory = _memory(spec, settings, clock)
        self._runner = ModelRunner(
            spec,
            module,
            settings,
            faults=None if faults is None else lambda slots: faults(self._scheduler.handles(slots)),
            report=report,
            captures=captures,
            clock=clock,
        )
        self._scheduler = Scheduler(
            spec,
            self._memory,
            InputProcessor(spec, module, settings.device, settings.dtype),
            self._runner,
            share or device_share(settings.image_share, settings.device, clock),
            vocab=settings.vocab,
            token_budget=settings.token_budget,
            lookahead=settings.lookahead,
            steps_at_once=settings.steps_at_once,
            clock=clock,
            known_ports=known_ports,
            head_ports=tuple(node_module(module).head_ports),
            grammars=settings.grammars,
        )
        if is_captured:
            if settings.device.type == "cuda":
                compile_in_parallel(self.trace, f"node {self.name}")
            self.capture()

    # -- before the first request ------------------------------------------------------------------------------------

    def trace(self, compiling: Compiling) -> None:
        """See NodeRunner: goes through the steps that `capture` captures."""
        self._runner.trace(compiling)

    def capture(self) -> None:
        """Capture the steps of the settings. Raises StartError if memory is short for all sizes of a kind."""
        self._runner.capture()

    def capture_usual(self) -> None:
        """See NodeRunner."""
        self._runner.capture_usual()
        self._prepare_grammars()  # later it would hold up a first request for most of a second

    def queue_captures(self) -> None:
        """See NodeRunner."""
        self._runner.queue_captures()

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes: those of steps that were only traced hold no values."""
        self._memory.pool.evict_cached()

    # -- tensor parallelism ------------------------------------------------------------------------------------------

    def lead(self, sender: PlanSender, collectives: TorchCollectives, size: int) -> None:
        """Publish every plan of this node to the followers of a group of `size` ranks."""
        self._runner.lead(sender, collectives, size)

    def follower(self, collectives: TorchCollectives) -> NodeFollower:
        """Return the executor of a leader's plans on this node, whose own scheduler then stays empty."""
        return self._runner.follower(collectives)

    # -- sleep -------------------------------------------------------------------------------------------------------

    def node_memory(self) -> NodeMemory:
        """See NodeRunner: the module, its LoRA adapters, and the pools of the cache."""
        kept = () if self._adapters is None else tuple(self._adapters.stacks())
        return NodeMemory(module=self._module, kept=kept, scratch=self._runner.pools)

    def sleeps(self) -> None:
        """See NodeRunner."""
        if (prefixes := self._memory.prefixes) is not None:
            prefixes.leases.end_all()
        self.forget_prefixes()

    # -- the worker's calls, see NodeRunner --------------------------------------------------------------------------

    @property
    def adapters(self) -> AdapterBank | None:
        """See NodeRunner."""
        return self._adapters

    def open(
        self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1, adapter: int = NO_ADAPTER
    ) -> None:
        """See NodeRunner. Raises TooLarge when the request could never fit, EngineError for a handle in use."""
        self._scheduler.open(handle, sampling, max_tokens, rows, NO_ADAPTER if self._adapters is None else adapter)

    def lease(self, handle: Handle, session: str, seconds: float) -> None:
        """See NodeRunner."""
        self._scheduler.lease(handle, session, seconds)

    def end_lease(self, session: str) -> None:
        """See NodeRunner."""
        self._scheduler.end_lease(session)

    @property
    def is_compiling(self) -> bool:
        """See NodeRunner: grammars of requests."""
        return self._scheduler.is_compiling

    def submit(self, job: Job) -> None:
        """See NodeRunner."""
        self._scheduler.submit(job)

    def require_inputs(self, giver: str, inputs: Mapping[str, Tensor]) -> None:
        """See NodeRunner."""
        self._ports.require_inputs(giver, inputs)

    def feed(self, key: JobKey, ids: Sequence[int], ended: bool) -> None:
        """See NodeRunner."""
        self._scheduler.feed(key, ids, ended)

    def journal_ports(self, loop: LoopSpec) -> Sequence[str] | None:
        """See NodeRunner. A loop that keeps state takes known ids only with a module that has `known_ports`."""
        if self._loop_ports is None:
            return ()
        is_resident = set(loop.carry.values()) == {into for into, _ in self._loop_ports.states} | {
            self._loop_ports.id_port
        }
        takes_all = bool(self._known_ports) and set(loop.emit) <= set(self._known_ports)
        return self._known_ports if is_resident and takes_all else None

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """See NodeRunner. Does nothing at a node without these branches. Raises EngineError for a busy one."""
        self._scheduler.fork(handle, source, into)

    def holds(self, handle: Handle, branch: str) -> bool:
        """See NodeRunner."""
        return self._scheduler.holds(handle, branch)

    def end_loops(self, handle: Handle) -> None:
        """See NodeRunner."""
        self._scheduler.end_loops(handle)

    def close(self, handle: Handle) -> None:
        """See NodeRunner."""
        self._scheduler.close(handle)

    def yield_to(self, slack: Slack) -> None:
        """See NodeRunner."""
        self._scheduler.yield_to(slack)

    def pressure(self) -> Pressure:
        """See NodeRunner."""
        return self._scheduler.pressure()

    def contention(self) -> Contention:
        """See NodeRunner."""
        return self._scheduler.contention()

    def launch(self) -> KVStep | None:
        """See NodeRunner."""
        step = self._scheduler.plan()
        plan = step.plan if step is not None else None
        if step is None or plan is None:
            return step
        while plan is not None:
            plan = self._scheduler.settle(step, self._runner.launch(plan))
        step.copy_to_host(self._host_outputs, self._streamed_outputs, self._to_host)
        return step

    def is_done(self, running: Running) -> bool:
        """See NodeRunner."""
        assert isinstance(running, KVStep)
        return running.is_done

    def collect(self, running: Running) -> StepResult:
        """See NodeRunner. Steps must be collected in launch order."""
        assert isinstance(running, KVStep)
        for copy in running.copies:
            copy.wait()
        return self._scheduler.commit(running)

    def idle(self) -> bool:
        """See NodeRunner: captures the next queued bucket. Without requests, also prepares for the first grammar."""
        assert not self._scheduler.in_flight, "a busy engine does not capture"
        if not self._scheduler.has_requests:
            self._prepare_grammars()
        return self._runner.idle()

    def _prepare_grammars(self) -> None:
        grammars = self._grammars
        if grammars is not None and not grammars.is_prepared:
            grammars.prepare()
            self._runner.queue_masking()

    def compile_later(self) -> None:
        """See NodeRunner."""
        self._runner.compile_later()

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Hits and misses of captured steps; None where nothing is captured."""
        return self._runner.graph_counts

    def counters(self) -> dict[str, float]:
        """See NodeRunner and GraphCounts; empty where nothing is captured."""
        return self.graph_counts.as_counters() if self.graph_counts is not None else {}

    def memory(self) -> MemoryUse:
        """See NodeRunner."""
        return self._memory.use()

    def pages_and_waits(self) -> dict[Handle, tuple[int, str]]:
        """See NodeRunner."""
        return self._scheduler.pages_and_waits()


def _memory(spec: NodeSpec, settings: KVSettings, clock: Callable[[], float]) -> KVMemory:
    """Return the host state of a node's cache."""
    pool = PagePool(settings.num_pages, settings.page_size)
    slots, tokens = settings.max_slots, settings.max_seq_len
    values = None
    if settings.loop is not None:
        values = LoopValues(spec, settings.loop, slots, settings.dtype, tokens + 1)
    return KVMemory(
        pool,
        PageTables(pool, slots, tokens),
        Slots(slots, tokens, settings.vocab if spec.sampling else 0, position_dtype(spec)),
        # The ids of a prompt do not determine the cache of a node that also reads a memory.
        PrefixCache(pool, clock) if settings.prefix_cache and spec.kv is not None and not spec.kv.memory else None,
        values,
    )
