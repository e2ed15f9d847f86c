"""Captured passes of one node: a table of buckets by kind, which learns the kinds of passes that arrive.

The first pass of a kind runs uncaptured, and its buckets are captured when the node is idle; prompts of ids are planned
before the first request. A loop that only reads its cache runs whole in one replay. A loop that appends runs one
iteration per replay, or several of few sequences ahead of the host. Used by the model runner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.cuda_graphs import kinds
from mstar_core.engine.cuda_graphs.cache import Size, up_to
from mstar_core.engine.cuda_graphs.kinds import StepFamily, StepKind
from mstar_core.engine.cuda_graphs.ragged import DRAWN, BucketSize, RaggedStep
from mstar_core.engine.steps.device import AHEAD_TOKENS, DrawnIds, StepLimits
from mstar_core.graph.declare.nodes import EngineHints

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache, StepBuckets
    from mstar_core.engine.cuda_graphs.ragged import CapturedNode
    from mstar_core.engine.steps.plan import PassPlan, StepPlan
    from mstar_core.graph.declare.nodes import NodeSpec

MOST_KINDS: Final = {StepFamily.IDS: 4, StepFamily.LOOP: 16, StepFamily.PREFIX: 2, StepFamily.PROMPT: 8}
"""Kinds that a node captures; later ones run uncaptured and count as misses."""

MOST_SIGNATURES: Final = 1024
"""Signatures of passes whose kinds are cached."""

MOST_BYTES: Final = 256 << 20
"""Most bytes of one bucket's inputs: passes with a whole clip per sequence are captured for few sequences."""

MOST_EXACT: Final = 2
"""Exact sizes that a kind gets buckets for, besides the sizes that the node names."""

MOST_PADDING: Final = 2048
"""Tokens of padding that cost more than one more replay: they take longer to compute than the weights to read."""

MOST_SHORT: Final = 128
"""Buckets of prompts up to this size take any fewer tokens: weights, not tokens, decide their time."""

USUAL_PROMPTS: Final = (MOST_SHORT, 768)
"""Buckets that prompts of single requests use: a short text, and an image of 768 pixels a side. Captured first."""

PROMPT_ITEMS: Final = (1, 2, 4, 8, 16, 32)
"""Batch items of the buckets of prompts with a fixed number of tokens each."""

ITEM_TOKENS: Final = {StepFamily.IDS: (8, 32), StepFamily.PROMPT: (8, 32), StepFamily.PREFIX: (4, 128)}
"""A bucket of ragged passes takes at least so many passes, or one per so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One replay. passes: their indices in the step. outputs: copies of the packed outputs that some pass wants.

    tokens: packed tokens in use. iterations: of each pass that were computed. later: outputs of
    further iterations. drawn: ids of the passes, None if nothing was drawn. Their host copy is launched at once: the
    next replay of any graph overwrites them. given: names of all outputs of its forwards.
    """

    passes: list[int]
    outputs: dict[str, Tensor]
    tokens: int
    iterations: int = 1
    later: Sequence[dict[str, Tensor]] = ()
    drawn: DrawnIds | None = None
    given: tuple[str, ...] = ()


@dataclass(slots=True)
class _Kind:
    """Buckets of one kind. exact: sizes that passes of several iterations have asked for."""

    kind: StepKind
    buckets: StepBuckets[RaggedStep]
    exact: set[int] = field(default_factory=set)


class CapturedPasses:
    """The captured passes of one node. Owned by its `NodeGraphs`."""

    def __init__(
        self, spec: NodeSpec, node: CapturedNode, cache: GraphCache, *, id_port: str, token_budget: int, ids: bool
    ) -> None:
        """ids: whether prompts of ids are captured by `plan_ids`."""
        slots = node.slots.count
        self.counts = cache.counts
        self._node = node
        self._cache = cache
        self._samples = node.sampler is not None
        self._packed = frozenset(node.packed_ports)
        # Kernels of captured passes read no memories: at such a node only decode steps are captured.
        hints = EngineHints() if node.has_memory else spec.hints
        self._loop_items = [items for (items,) in up_to(slots, hints.capture_sizes, [])]
        self._prefix_tokens = [tokens for (tokens,) in up_to(token_budget, hints.capture_tokens, [])]
        self._prompt_tokens = [tokens for (tokens,) in up_to(token_budget, hints.capture_prompts, [])]
        self._most_pages = node.pages
        self._kinds: dict[StepKind, _Kind] = {}
        self._signatures: dict[tuple[object, ...], StepKind | None] = {}
        self._limits: tuple[int, StepLimits] | None = None
        self._ids: _Kind | None = None
        if ids:
            self._ids = self._add(kinds.ids_kind(id_port, node.slots.position_dtype))

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> dict[StepKind, list[Size]]:
        """Captured buckets by kind, ascending: (tokens, batch items, pages)."""
        return {kind: entry.buckets.sizes for kind, entry in self._kinds.items()}

    @property
    def limits(self) -> StepLimits:
        """See StepLimits. They change with captures only."""
        captured = self.counts.captured
        if self._limits is None or self._limits[0] != captured:
            self._limits = captured, self._present_limits()
        return self._limits[1]

    def _present_limits(self) -> StepLimits:
        largest = (entry.buckets.largest for entry in self._of(StepFamily.LOOP) if entry.kind.writes)
        ids = self._ids.buckets.largest if self._ids is not None else None
        return StepLimits(
            captures_passes=bool(self._loop_items or self._prefix_tokens),
            appending=max((size[1] for size in largest if size is not None), default=0),
            prompt_tokens=ids[0] if ids is not None else 0,
            prompts=ids[1] if ids is not None else 0,
        )

    def plan_ids(self, sizes: Iterable[int], budget: int) -> None:
        """Queue buckets of prompts of ids. Of the sizes that the budget cannot fill only the smallest is taken."""
        if self._ids is not None:
            buckets = self._ids.buckets
            known = [(tokens,) for tokens, _, _ in (*buckets.sizes, *buckets.planned)]
            buckets.plan(self._ragged_size(StepFamily.IDS, tokens) for (tokens,) in up_to(budget, sizes, known))

    def is_prompt(self, buckets: object) -> bool:
        """Return whether these are buckets of prompts with any inputs."""
        return any(entry.buckets is buckets for entry in self._of(StepFamily.PROMPT))

    def buckets_of(self, kind: StepKind) -> StepBuckets[RaggedStep]:
        """Return the buckets of a kind that the leader of a tensor-parallel group captures; new ones are empty."""
        return (self._kinds.get(kind) or self._add(kind)).buckets

    def _of(self, family: StepFamily) -> list[_Kind]:
        return [entry for entry in self._kinds.values() if entry.kind.family is family]

    def _ragged_size(self, family: StepFamily, tokens: int) -> Size:
        fewest, each = ITEM_TOKENS[family]
        return tokens, max(fewest, tokens // each), 0 if family is StepFamily.PREFIX else self._most_pages

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan, chosen: Sequence[int]) -> tuple[list[Replay], list[int]]:
        """Replay what buckets take of the chosen passes of a plan. Returns the replays and the passes that are left.

        Kinds that have no buckets yet are queued for capture, and count as misses.
        """
        passes = plan.passes
        groups: dict[StepKind, list[int]] = {}
        rest: list[int] = []
        last, members = None, list[int]()
        for index in chosen:
            kind = self._kind(passes[index])
            if kind is None:
                rest.append(index)
                continue
            if kind is not last:  # hashing a kind costs more than this comparison
                last, members = kind, groups.setdefault(kind, [])
            members.append(index)
        replays: list[Replay] = []
        missed = any(self._misses(passes[index]) for index in rest)
        prompts = [passes[index].count for index in rest if self._misses_prompt(passes[index])]
        self.counts.prefill_misses += bool(prompts)
        self.counts.prefill_tokens += sum(prompts)
        for kind, members in groups.items():
            replayed, left = self._run_kind(kind, plan, members)
            replays += replayed
            rest += left
            missed |= self._count(kind, passes, replayed, left)
        self.counts.misses += missed
        return replays, sorted(rest)

    def _misses(self, planned: PassPlan) -> bool:
        """Return whether a pass without a kind counts as a miss."""
        return bool(self._loop_items) and kinds.is_of_loop(planned) and planned.item_tokens <= kinds.MOST_TOKENS

    def _misses_prompt(self, planned: PassPlan) -> bool:
        """Return whether a pass without a kind counts as a miss of prompts."""
        if planned.is_ids:
            return self._ids is not None and bool(self._ids.buckets)
        return bool(self._prompt_tokens) and planned.loop is None

    def _count(self, kind: StepKind, passes: Sequence[PassPlan], replayed: list[Replay], left: list[int]) -> bool:
        """Count replays and passes without a bucket. Returns whether the step has missed."""
        if kind.family in (StepFamily.IDS, StepFamily.PROMPT):
            self.counts.prefill_hits += len(replayed)
            self.counts.prefill_misses += bool(left)
            left_tokens = sum(passes[index].count for index in left)
            self.counts.prefill_tokens += sum(replay.tokens for replay in replayed) + left_tokens
            return False
        self.counts.hits += sum(1 + len(replay.later) for replay in replayed)
        return bool(left)

    def _run_kind(self, kind: StepKind, plan: StepPlan, members: list[int]) -> tuple[list[Replay], list[int]]:
        entry, passes = self._learned(kind), plan.passes
        if entry is None:
            return [], members
        if kind.family is StepFamily.LOOP:
            self._learn_exact(entry, [passes[index] for index in members])
            step = self._step_ahead(kind, [passes[index] for index in members])
            if step is not None:
                return [_replay(step, plan, members)], []
        if kind.family is StepFamily.IDS and (kind.adjusts or kind.masks):
            self._request(entry, [passes[index] for index in members])
        replays = []
        while members:
            step, count = self._next(entry, [passes[index] for index in members])
            if step is None:
                break
            batch, members = members[:count], members[count:]
            replays.append(_replay(step, plan, batch))
        if members:
            entry.buckets.missed(sum(passes[index].count for index in members), len(members))
        return replays, members

    def _request(self, entry: _Kind, passes: Sequence[PassPlan]) -> None:
        """Queue the bucket of a variant of prompts of ids that holds these passes, or as many as the largest does."""
        assert self._ids is not None
        tokens = sum(planned.count for planned in passes)
        sizes = self._ids.buckets.sizes
        fits = [size for size in sizes if size[0] >= tokens and size[1] >= len(passes)]
        entry.buckets.request(min(fits, default=sizes[-1]))

    def _next(self, entry: _Kind, passes: Sequence[PassPlan]) -> tuple[RaggedStep | None, int]:
        """Return the bucket of the first passes, and how many of them it takes."""
        largest = entry.buckets.largest
        if largest is None:
            return None, 0
        if entry.kind.family is StepFamily.LOOP:
            step = self._loop_step(entry, passes)
            return step, 0 if step is None else _fitting(passes, step.size.tokens, step.size.items)
        count = _fitting(passes, largest[0], largest[1])
        step = self._ragged_step(entry, passes[:count]) if count else None
        return step, count if step is not None else 0

    def _ragged_step(self, entry: _Kind, passes: Sequence[PassPlan]) -> RaggedStep | None:
        """Return the smallest bucket for these passes, None if more than a third of it would be padding."""
        tokens, kind = sum(planned.count for planned in passes), entry.kind
        fits = [size for size in entry.buckets.sizes if size[0] >= tokens and size[1] >= len(passes)]
        most = tokens * 3 // 2 if kind.family is StepFamily.PREFIX else max(MOST_SHORT, tokens * 3 // 2)
        if not fits or (min(fits)[0] > most and kind.family is not StepFamily.IDS and not kind.item_tokens):
            return None
        return entry.buckets[min(fits)]

    def _loop_step(self, entry: _Kind, passes: Sequence[PassPlan]) -> RaggedStep | None:
        """Return the smallest bucket for these passes, or a smaller, full one if much of it would be padding."""
        kind = entry.kind
        often = kind.iterations if kind.writes else 0
        page_size = self._node.page_size
        pages = -(-max(planned.cached + planned.count * often for planned in passes) // page_size)
        fits = [size for size in entry.buckets.sizes if size[2] >= pages]
        if not fits:
            return None
        count = sum(planned.iterations for planned in passes)
        items = items_taken(count, kind.item_tokens if kind.writes else 0, {size[1] for size in fits})
        return entry.buckets[min(size for size in fits if size[1] == items)]

    def _step_ahead(self, single: StepKind, passes: Sequence[PassPlan]) -> RaggedStep | None:
        """Return the bucket that runs several iterations of all these passes, whose kind is `single`."""
        kind = kinds.passes_ahead(passes, single)
        entry = self._learned(kind) if kind is not None else None
        step = self._loop_step(entry, passes) if entry is not None and entry.buckets else None
        return step if step is not None and step.size.items >= len(passes) else None

    # -- kinds -------------------------------------------------------------------------------------------------------

    def _kind(self, planned: PassPlan) -> StepKind | None:
        """Return the kind of a pass that may have buckets, None for any other."""
        if planned.sampling is not None and planned.sampling.logprobs is not None:
            return None  # captured draws give ids alone
        kind: StepKind | None = None
        if self._ids is not None and (kind := kinds.prompt_of_ids(planned, self._node.slots.position_dtype)):
            largest = self._ids.buckets.largest
            if largest is not None and planned.count <= largest[0]:
                return kind
        signature = self._signature(planned)
        if signature not in self._signatures:
            if len(self._signatures) >= MOST_SIGNATURES:
                self._signatures.clear()
            self._signatures[signature] = self._new_kind(planned)
        kind = self._signatures[signature]
        loop = planned.loop
        if kind is None or kind.family is not StepFamily.LOOP or kind.writes or loop is None:
            return kind
        return kinds.whole_loop(planned, kind) if loop.is_fused and not loop.emits else kind

    def _signature(self, planned: PassPlan) -> tuple[object, ...]:
        attend = planned.attend
        given = planned.given
        tokens = planned.count if planned.attend.mask == "full" or planned.per_item else planned.is_whole
        return (
            kinds.shapes_of(planned.ports) if planned.attend.mask == "full" or planned.per_item else _forms(planned),
            tokens,
            planned.iterations,
            (attend.mask, attend.write, attend.positions),
            (planned.is_replay, planned.is_whole, bool(planned.cached), planned.loop is None),
            (bool(planned.wants), planned.sampling is None, planned.adjusts, planned.mask is None),
            isinstance(planned.position, float),
            None if given is None else (given.dtype, given.dim()),
        )

    def _new_kind(self, planned: PassPlan) -> StepKind | None:
        kind = kinds.loop_pass(planned) if self._loop_items else None
        if kind is None and self._prefix_tokens:
            kind = kinds.prefix(planned, self._packed)
        if kind is None and self._prompt_tokens:
            kind = kinds.prompt(planned, samples=self._samples)
        return kind

    def _learned(self, kind: StepKind) -> _Kind | None:
        """Return the entry of a kind; a new one's buckets are queued. None if the node has too many kinds."""
        if kind in self._kinds:
            return self._kinds[kind]
        if len(self._of(kind.family)) >= MOST_KINDS[kind.family]:
            return None
        entry = self._add(kind)
        entry.buckets.plan(self._sizes(kind))
        return entry

    def _sizes(self, kind: StepKind) -> list[Size]:
        """Return the bucket sizes of a new kind."""
        match kind.family:
            case StepFamily.LOOP:
                return self._loop_sizes(kind, self._loop_items)
            case StepFamily.IDS:
                return []  # planned, or requested one by one
            case StepFamily.PREFIX:
                return [self._ragged_size(kind.family, tokens) for tokens in self._prefix_tokens]
            case _ if kind.item_tokens:
                counts = [items for items in PROMPT_ITEMS if items * kind.item_tokens <= max(self._prompt_tokens)]
                return [(items * kind.item_tokens, items, self._most_pages) for items in counts]
            case _:
                return [self._ragged_size(kind.family, tokens) for tokens in self._prompt_tokens]

    def _loop_sizes(self, kind: StepKind, counts: Sequence[int]) -> list[Size]:
        """Return the bucket sizes of a loop's passes that are worth a graph, for all page counts."""
        pages = self._node.attention.pass_pages(self._most_pages)
        counts = loop_items(kind, counts)
        return [(items * kind.item_tokens, items, most) for items in counts for most in pages]

    def _learn_exact(self, entry: _Kind, passes: Sequence[PassPlan]) -> None:
        """Queue a bucket of the exact size of a pass that holds several iterations, which requests tend to repeat.

        Padding is not free there: one frame more may start another round of GEMM tiles.
        """
        items = passes[0].iterations
        is_known = items in entry.exact or items in self._loop_items or len(entry.exact) >= MOST_EXACT
        if len(passes) > 1 or items == 1 or is_known:
            return
        if items < max(loop_items(entry.kind, self._loop_items)):
            entry.exact.add(items)
            entry.buckets.plan(self._loop_sizes(entry.kind, [items]))

    def _add(self, kind: StepKind) -> _Kind:
        """Make the buckets of a kind, of which there are none yet."""
        shared = dict[str, "Tensor"]()
        build = _builder(self._node, kind, self._sizes_for_shared(kind), shared)
        family = kind.family
        is_loop = family is StepFamily.LOOP
        entry = _Kind(
            kind,
            self._cache.buckets(
                build,
                lambda size: _title(kind, size),
                lambda size: (family.value, size[1], size[2]) if is_loop else (family.value, -size[0]),
                kind,
            ),
        )
        self._kinds[kind] = entry
        return entry

    def is_usual(self, buckets: object, size: Size) -> bool:
        """Return whether a bucket is one of those that prompts of single requests use."""
        entry = next((entry for entry in self._of(StepFamily.PROMPT) if entry.buckets is buckets), None)
        if entry is None:
            return False
        return size[1] == 1 if entry.kind.item_tokens else size[0] in USUAL_PROMPTS

    def _sizes_for_shared(self, kind: StepKind) -> Size | None:
        """Return the size of the inputs that all buckets of a kind share, None if each has its own."""
        return max(self._sizes(kind)) if kind.family in (StepFamily.PREFIX, StepFamily.PROMPT) else None


def _title(kind: StepKind, size: Size) -> str:
    if kind.family is StepFamily.LOOP:
        return f"pass graph of {size[1]} sequences, {kind}, {size[2]} pages"
    return f"{kind} graph of {size[0]} tokens"


def _builder(
    node: CapturedNode, kind: StepKind, most: Size | None, shared: dict[str, Tensor]
) -> Callable[[Size], RaggedStep]:
    """Return a function that makes the step of a size. most: size of the inputs that buckets share."""

    def build(size: Size) -> RaggedStep:
        if most is not None and not shared:
            for form in kind.inputs:
                if not form.is_staged:
                    shape = form.size(form.count(most[0], most[1]))
                    shared[form.name] = torch.zeros(shape, dtype=form.dtype, device=node.device)
        return RaggedStep(node, kind, BucketSize(*size), shared)

    return build


def _replay(step: RaggedStep, plan: StepPlan, members: list[int]) -> Replay:
    """Run one replay. Outputs that some pass wants are copied out of the graph's memory."""
    batch = [plan.passes[index] for index in members]
    wanted = frozenset[str]().union(*(planned.wants for planned in batch))
    items, size = step.load(batch, plan.tables), step.size
    for ahead, later in enumerate(step.later, start=1):
        later.load(batch, plan.tables, ahead)
    iterations = step.run()
    tokens = sum(planned.count for planned in batch)
    used = {size.items: items, size.tokens: tokens}
    ports = sorted(wanted & iterations[0].keys())
    if step.later:
        # One kernel per port copies the values of all iterations.
        whole = {
            port: torch.stack([outputs[port][: used.get(len(outputs[port]))] for outputs in iterations])
            for port in ports
        }
        copies = [{port: values[index] for port, values in whole.items()} for index in range(len(iterations))]
    else:
        values = iterations[-1]
        copies = [{port: values[port][: used.get(len(values[port]))].clone() for port in ports}]
    drawn = iterations[-1].get(DRAWN)
    return Replay(
        passes=members,
        outputs=copies[0],
        tokens=tokens,
        iterations=1 if step.later else step.kind.iterations,
        later=copies[1:],
        drawn=DrawnIds.of(drawn[: len(batch)]) if drawn is not None and any(each.sampling for each in batch) else None,
        given=tuple(iterations[-1]),
    )


def _forms(planned: PassPlan) -> tuple[object, ...]:
    """Return names, dtypes and shapes without the token axis of a pass's ports."""
    return tuple([(name, value.dtype, value.shape[1:], planned.axes[name]) for name, value in planned.ports.items()])


def _fitting(passes: Sequence[PassPlan], tokens: int, items: int) -> int:
    """Return how many passes, from the first on, fit into so many tokens and batch items."""
    for index, planned in enumerate(passes):
        tokens -= planned.count
        items -= planned.iterations
        if tokens < 0 or items < 0:
            return index
    return len(passes)


def loop_items(kind: StepKind, counts: Sequence[int]) -> list[int]:
    """Return the bucket sizes that are worth a graph: the smallest, and others whose inputs are not too large."""
    if kind.runs_ahead:
        return [count for count in counts if count * kind.item_tokens * kind.iterations <= AHEAD_TOKENS]
    item_bytes = sum(port.size_bytes * port.count(kind.item_tokens, 1) for port in kind.ports)
    most = MOST_BYTES // max(1, item_bytes)
    if not kind.writes:
        most = min(most, 3 * kinds.MOST_TOKENS // kind.item_tokens)
    return [count for count in counts if count <= most or count == min(counts)]


def items_taken(count: int, tokens: int, sizes: Collection[int]) -> int:
    """Return the size of the bucket that takes some or all of `count` batch items of `tokens` tokens each."""
    holds = min((size for size in sizes if size >= count), default=max(sizes))
    if (holds - count) * tokens < MOST_PADDING:
        return holds
    return max((size for size in sizes if size <= count), default=holds)
