"""Base of the modules of nodes: their offers beside a forward. Read by the engines and by the worker at its start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from mstar_core.graph.declare.nodes import Attend

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import LoopSpec
    from mstar_core.engine.cuda_graphs.cache import GraphCache, GraphCounts
    from mstar_core.engine.cuda_graphs.compilation import Compiling


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStep:
    """One job of a warm-up request; the fields are those of `Job`.

    inputs: of one request, by port, without a batch dimension. They must fit the declared ports.
    """

    inputs: dict[str, Tensor]
    attend: Attend = field(default_factory=Attend)
    loop: LoopSpec | None = None
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRequest:
    """A synthetic warm-up request. tokens: the most that its cache holds; title: a few words for the operator.

    is_value_free: whether the request, and the captures that it causes, may be gone through with meaningless numbers:
    no Triton kernel makes an index for another operation, the host reads no value, and no kernel is chosen by timing.
    """

    title: str
    tokens: int
    steps: tuple[WarmupStep, ...]
    is_value_free: bool = False


class NodeModule:
    """Base of a node's module, behind `nn.Module`: everything that it may offer, with defaults.

    A module that does not derive from it may have attributes of the same names, see `node_module`.

    host_ports: (stateless) inputs that stay on the host, as numpy arrays [B, ...] (a list of B where shapes differ);
    numbers as int64 (booleans too) or float64. `seeds` and `counters` may be among them.
    listed_ports: (stateless) inputs given as a list of B tensors, because they are too large to stack.
    host_outputs: outputs that are copied to the host, one copy per step. Those of a stateless node go into buffers that
    are reused three steps later, and on CUDA the module may compute them in a buffer that its next step overwrites.
    device_outputs: (stateless) outputs that other nodes of this device read, in memory of their own. A step that gives
    nothing else is done when the one before it is; its readers are launched behind it.
    most_values: (stateless) values of the inputs of one step, 0 for any number. A node that others wait for then
    computes what their next step takes, and not all that waits. A single job may have more.
    streamed_outputs: (KV) loop outputs that are copied to the host only for iterations that the loop emits.
    head_ports: (KV) outputs of `forward`, one value per row of `hidden`, that `head` takes by keyword beside `hidden`:
    the logits hook. A head may change logits by them, for instance by what a sequence has written so far. Temperature,
    penalties, masks and `suppress` apply after it, so the head computes in every variant of a captured step.
    known_ports: (KV) integer outputs of fixed shape of the node's resident loop that, with the drawn id, determine an
    iteration. A request that goes on after a death takes those of earlier attempts in one pass over many iterations of
    one sequence: the module gets `known`, int64 [T, values of these ports], its stream's items [T], and the state
    before them, [1, ...] each. It returns hidden states and the state after each iteration, [T, ...].
    packed_ports: (KV) inputs among `row_ports` with one vector per token of a batch item. Captured passes on empty
    caches get them as one tensor [T, ...]: the tokens of all items in order, each as `item_parts` divides them. Other
    passes get them by item.
    rounds_inputs: a float8 quantization of its weights may also round the inputs of products of many tokens, one scale
    per token. Such products are bound by arithmetic, which float8 halves; products of few tokens keep their inputs.
    unquantized: names of submodules whose layers a quantization leaves as they are.
    """

    host_ports: Collection[str] = ()
    listed_ports: Collection[str] = ()
    host_outputs: Collection[str] = ()
    device_outputs: Collection[str] = ()
    most_values: int = 0
    streamed_outputs: Collection[str] = ()
    known_ports: Sequence[str] = ()
    head_ports: Sequence[str] = ()
    packed_ports: Collection[str] = ()
    rounds_inputs: bool = False
    unquantized: Collection[str] = ()

    def item_parts(self, port: str, value: Tensor) -> Sequence[Tensor]:
        """Return the vectors of all tokens of a batch item, [n, ...] each, in order. port: one of `packed_ports`.

        `Attend.extra` tokens of an item have no vectors in its value; the module gives them here.
        """
        return (value,)

    def working_bytes(self, tokens: int) -> int:
        """Return the bytes of the largest step besides weights and cache: intermediate values and outputs.

        tokens: most tokens of one step, at a node with a cache.
        """
        return 0

    def trace(self, compiling: Compiling) -> None:
        """Launch the kernels of the steps that are captured before the first request, on padding.

        They are compiled there instead of run. May return after its first steps if `compiling.has_missed` is still
        false: the cache has their kernels.
        """

    def warm_up(self) -> None:
        """Load and compile what the first request needs."""

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """Return the requests to run before the first real one, in order."""
        return ()

    def idle(self) -> bool:
        """Do one piece of background work, such as a capture. Returns whether more is left."""
        return False

    def compile_later(self) -> None:
        """Run each queued capture once on padding without capturing it, which compiles its kernels."""

    def counters(self) -> dict[str, float]:
        """Return sums since the start, by metric name."""
        return {}

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Counts of its CUDA graphs, None without any."""
        return None

    @property
    def warms_itself(self) -> bool:
        """Whether it has a warm-up of its own, so that no sample of the model has to warm it up."""
        kind = type(self)
        return kind.warm_up != NodeModule.warm_up or kind.warmup_requests != NodeModule.warmup_requests


ATTRIBUTES = tuple(
    name for name, value in vars(NodeModule).items() if not name.startswith("_") and not isinstance(value, property)
)
"""Offers of a module that does not derive from NodeModule."""


def node_module(module: object) -> NodeModule:
    """Return the offers of a module: itself if it derives from NodeModule, else those of its attributes that it has."""
    if isinstance(module, NodeModule):
        return module
    offers = {name: getattr(module, name) for name in ATTRIBUTES if hasattr(module, name)}
    methods = {name: staticmethod(offer) if callable(offer) else offer for name, offer in offers.items()}
    return cast("NodeModule", type(type(module).__name__, (NodeModule,), methods)())


class CapturesFunction(NodeModule, ABC):
    """Base of a stateless module with one captured function, `_replayed`."""

    _replayed: CapturedFunction

    @abstractmethod
    def capture(self, captures: GraphCache) -> None:
        """Use CUDA graphs of this cache. Called once the weights are loaded, on CUDA only."""

    def idle(self) -> bool:
        """Capture the next missing bucket. Returns whether more are missing."""
        return self._replayed.capture_next()

    def compile_later(self) -> None:
        """Run the function once for each missing bucket."""
        self._replayed.compile_later()

    def counters(self) -> dict[str, float]:
        """Return the counters of the CUDA graphs."""
        return self._replayed.counters()

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Counts that `counters` reports, None before `capture`."""
        return self._replayed.graph_counts
