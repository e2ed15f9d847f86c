"""Contract between the worker's loop and the engines.

The worker submits jobs, chooses which node steps next, launches its step, and collects the one before. A runner owns
everything of its node on one device: module, slots, pages, and the batch that it will form next.
"""

# ruff: noqa: B027 an optional method does nothing by default

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from mstar_core.engine.base import NO_ADAPTER, Contention, MemoryUse
from mstar_core.engine.memory.node_memory import NodeMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec, Pressure, StepResult
    from mstar_core.engine.cuda_graphs.cache import GraphCounts
    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_core.engine.slack import Slack
    from mstar_core.graph.declare.sampling import SamplingParams
    from mstar_core.layers.lora import AdapterBank


class Running(Protocol):
    """A step in flight on the device; opaque to the worker."""


class NodeRunner(ABC):
    """Runs one node on one device. Every method is called from the worker's one thread.

    has_cache: whether its branches have a KV cache: they move between ranks by jobs with `Job.move`, and its loops take
    ids of streams.
    """

    name: str
    has_cache: ClassVar[bool] = False

    @property
    def adapters(self) -> AdapterBank | None:
        """LoRA adapters of its module, None if it takes none."""
        return None

    # -- requests and jobs -------------------------------------------------------------------------------------------

    @abstractmethod
    def open(
        self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1, adapter: int = NO_ADAPTER
    ) -> None:
        """Announce a request before its first job. max_tokens: most tokens that its caches may ever hold.

        rows: candidates that exist at once, which share those tokens equally. Raises TooLarge when they can never fit
        the pool or its slots, EngineError for a handle in use. adapter: row of its LoRA adapter, for a node with
        `adapters`.
        """

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queue a job. A job of a closed handle or of a failed request is dropped without an error."""

    @abstractmethod
    def close(self, handle: Handle) -> None:
        """Free everything of a request, at any time, any number of times. Never raises."""

    def lease(self, handle: Handle, session: str, seconds: float) -> None:
        """Keep the cached prefix of an open request for so long after its end, as the lease of a session."""

    def end_lease(self, session: str) -> None:
        """End the lease of a session, if it has one here. Never raises."""

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for a thread of this runner, whose end wakes no mailbox."""
        return False

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """Make branch `into` a copy-on-write copy of branch `source`, as of the jobs already done."""

    def feed(self, key: JobKey, ids: Sequence[int], ended: bool) -> None:
        """Give the loop of a submitted job its next ids, in order, see `LoopSpec.feed`. ended: no more follow.

        At any time after `submit`; ids of a loop that has ended are dropped. Cheap: called once per id or for many.
        """

    def journal_ports(self, loop: LoopSpec) -> Sequence[str] | None:
        """Return the outputs whose values follow each id in `LoopSpec.known`, or None: it takes no known ids."""
        return None

    def end_loops(self, handle: Handle) -> None:
        """Free what is kept for loops of this request, which have all ended. Never raises."""

    def holds(self, handle: Handle, branch: str) -> bool:
        """Return whether this branch of an open request has work or cached tokens here."""
        return False

    # -- warm-up -----------------------------------------------------------------------------------------------------

    def require_inputs(self, giver: str, inputs: Mapping[str, Tensor]) -> None:
        """Raise EngineError for an input that does not fit its declared port. giver: see `PortCheck`."""

    # -- steps -------------------------------------------------------------------------------------------------------

    def yield_to(self, slack: Slack) -> None:
        """Hold jobs with `Job.yields` back while `slack` has less time left than they are expected to take."""

    @abstractmethod
    def pressure(self) -> Pressure:
        """Return the backlog."""

    def contention(self) -> Contention:
        """Return which requests hold slots and which wait for slots or pages. Called when nothing runs."""
        return Contention()

    @abstractmethod
    def launch(self) -> Running | None:
        """Form a batch from the queue and start one step. Returns None when nothing can run."""

    @abstractmethod
    def collect(self, running: Running) -> StepResult:
        """Wait for a step and return its results. Called in launch order."""

    def is_done(self, running: Running) -> bool:
        """Return, without waiting, whether `collect` would not wait for the device. Always true on a CPU."""
        return True

    # -- CUDA graphs and other background work -----------------------------------------------------------------------

    def trace(self, compiling: Compiling) -> None:
        """Launch the kernels of the steps that `capture` captures, see `NodeModule.trace`."""

    def capture(self) -> None:
        """Capture the steps that are captured before the first request. Raises StartError if memory is short."""

    def capture_usual(self) -> None:
        """Capture what prompts of single requests use, of the steps that the warm-up has met.

        Also prepares what would hold up a first request: the vocabulary of grammars.
        """

    def queue_captures(self) -> None:
        """Queue the steps that `capture` captures: `idle` captures them while the node serves, the fullest first."""

    def compile_later(self) -> None:
        """Run each queued capture once on padding without capturing it, which compiles its kernels."""

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes: those of steps that were only traced hold no values."""

    def idle(self) -> bool:
        """Do one piece of background work, such as a capture, of at most a second or two. No step may be in flight.

        Returns whether more is left.
        """
        return False

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Hits and misses of captured steps, None where nothing is captured."""
        return None

    # -- sleep -------------------------------------------------------------------------------------------------------

    def node_memory(self) -> NodeMemory:
        """Return the memory that this node gives back while it sleeps."""
        return NodeMemory()

    def sleeps(self) -> None:
        """Forget what a sleep loses, such as cached prefixes and their leases. No request uses the node."""

    # -- telemetry ---------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryUse:
        """Return page and slot counts."""
        return MemoryUse()

    def pages_and_waits(self) -> dict[Handle, tuple[int, str]]:
        """Return by open request the pages of its caches, and in words what it waits for (empty: nothing). Cheap."""
        return {}

    def counters(self) -> dict[str, float]:
        """Return sums since the start, by name, besides those of its memory."""
        return {}
