"""Pages of a KV node: which branches get them, from the prefix cache or the pool, and which requests are preempted.

Part of the scheduler. Older requests go first; memory pressure preempts the youngest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar_core.engine.cache.page_pool import OutOfPages
from mstar_core.engine.cache.prefix_cache import ContentChain
from mstar_core.engine.scheduling.candidates import tokens_ahead
from mstar_core.engine.scheduling.sequence import Branch, ForwardPass, KVRequest
from mstar_core.errors import EngineError, TooLarge

if TYPE_CHECKING:
    from mstar_core.engine.cache.prefix_cache import PrefixCache
    from mstar_core.engine.scheduling.candidates import Candidates
    from mstar_core.engine.scheduling.loops import Loops
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.engine.steps.device import Device
    from mstar_core.graph.declare.nodes import NodeSpec


class Pages:
    """Reserves pages and preempts for them. It keeps no state."""

    def __init__(
        self, spec: NodeSpec, requests: Requests, loops: Loops, candidates: Candidates, device: Device
    ) -> None:
        self._port = spec.sampling.port if spec.sampling else None
        self._attached = frozenset(each.port for each in spec.kv.attached) if spec.kv is not None else frozenset()
        self._device = device
        self._requests = requests
        self._memory = requests.memory
        self._loops = loops
        self._candidates = candidates

    def reserve(self, branch: Branch) -> bool:
        """Get the pages of a branch's current pass. Only the oldest request with work preempts others for them."""
        if branch.parent is not None and not self._candidates.attach(branch):
            return False
        if branch.is_evicted and not branch.replay and branch.saved is None:
            self._loops.rebuild(branch)
            branch.is_evicted = bool(branch.replay)
        self._adopt_prefix(branch)
        tokens = sum(forward.left for forward in branch.replay) + branch.is_decoding
        tokens += branch.logged if branch.saved is not None else 0
        if branch.forward is not None and branch.forward.attend.write:
            tokens += branch.forward.left
            if branch.parent is not None:
                # A candidate gets the pages of its whole loop, so that it ends and others take its place.
                tokens = min(tokens + tokens_ahead(branch), self._room(branch))
        if self._would_thrash(branch, tokens):
            self._requests.waits_for_pages = True
            return False
        while True:
            try:
                if tokens:
                    self._memory.ensure(branch.slot, tokens)
                self._restore_read(branch)
            except OutOfPages as shortage:
                if not self._make_room(branch, shortage):
                    return False
            except (TooLarge, EngineError) as error:
                assert branch.job is not None
                self._requests.fail(branch, branch.job, error)
                return False
            else:
                if branch.saved is not None:
                    self._memory.restore_pages(branch.saved, branch.slot, branch.logged)
                    branch.saved, branch.is_evicted = None, False
                branch.is_reserved = True
                return True

    def _restore_read(self, branch: Branch) -> None:
        """Restore the memory that a branch reads, if it was preempted.

        Raises OutOfPages, and EngineError for a memory that no pass has filled.
        """
        memory = branch.request.memory_of(branch)
        if memory is None:
            return
        if memory.saved is not None:
            self._memory.ensure(memory.slot, memory.logged)
            self._memory.restore_pages(memory.saved, memory.slot, memory.logged)
            memory.saved, memory.is_evicted = None, False
        elif not self._memory.tables.length[memory.slot]:
            raise EngineError(
                f"branch {branch.name!r} of node {self._requests.node} reads an empty memory",
                hint=f"run a pass on branch {memory.name!r} first, on the same rank",
                node=self._requests.node,
            )

    def reset(self, branch: Branch) -> None:
        """Empty a branch: its next pass begins at position 0. The draws of its request count on."""
        branch.chain = ContentChain(self._memory.pool.page_size)
        branch.log, branch.logged, branch.rollback, branch.saved = [], 0, None, None
        branch.replay.clear()
        branch.is_evicted = branch.is_reserved = False
        branch.saves_pages = branch.name == branch.request.memory
        if branch.slot >= 0:
            self._memory.tables.release(branch.slot)
            self._memory.slots.restart(branch.slot)

    def reserve_ahead(self, slot: int, tokens: int) -> bool:
        """Get pages for more tokens of a slot without preempting. Returns whether they are there."""
        tables = self._memory.tables
        if int(tables.length[slot]) + tokens > tables.max_tokens:
            return False
        if tables.missing(slot, tokens) > self._memory.pool.available:
            return False
        self._memory.ensure(slot, tokens)
        return True

    def grow(self, branch: Branch) -> None:
        """Give a decoding sequence a page for its next token. Pressure preempts the youngest request."""
        while branch.job is not None and int(branch.job.key) in self._requests.active:
            try:
                self._memory.ensure(branch.slot, 1)
            except OutOfPages as shortage:
                victim = self._youngest()
                others = (request for request, _ in self._requests.page_holders() if request is not branch.request)
                if victim is None or (victim is branch.request and not any(others)):
                    self._requests.fail(branch, branch.job, self._outgrown(shortage))
                else:
                    self._preempt(victim)
            else:
                return

    def _room(self, branch: Branch) -> int:
        """Return the tokens that a branch can still take, but at least those of its pass, which may be too many."""
        left = sum(forward.left for forward in branch.replay) + (branch.forward.left if branch.forward else 0)
        return max(left, self._memory.tables.max_tokens - int(self._memory.tables.length[branch.slot]))

    def _would_thrash(self, branch: Branch, tokens: int) -> bool:
        """Return whether the decode batch would soon take these pages back. Never for the oldest request with work."""
        active, memory = len(self._requests.active), self._memory
        if not active or memory.pool.available >= memory.tables.missing(branch.slot, tokens) + active:
            return False
        return branch.request.order != self._requests.oldest_with_work()

    def _make_room(self, branch: Branch, shortage: OutOfPages) -> bool:
        """Preempt for a branch. False when it has to wait, or has failed because nothing can make room for it."""
        if branch.request.order == self._requests.oldest_with_work():
            victim = self._youngest(apart_from=branch.request)
            if victim is not None:
                self._preempt(victim)
                return True
            candidate = self._candidates.victim(branch)
            if candidate is not None:
                self.evict(candidate)
                return True
            if not self._candidates.another_runs(branch) and not self._requests.in_flight and branch.job is not None:
                self._requests.fail(branch, branch.job, self._outgrown(shortage))
                return False
        self._requests.waits_for_pages = True
        return False

    # -- prefixes and forks ------------------------------------------------------------------------------------------

    def _adopt_prefix(self, branch: Branch) -> None:
        """Take over pages of the prefix cache: at the start of an empty cache, and where a further pass starts."""
        memory, slot = self._memory, branch.slot
        if memory.prefixes is None or branch.saved or self._adopt_whole(branch, memory.prefixes):
            return
        if memory.tables.count[slot] or memory.tables.length[slot]:
            self._adopt_further(branch, memory.prefixes)
            return
        tokens = sum(forward.tokens for forward in branch.replay)
        forward = branch.forward
        if forward is not None and branch.job is not None and forward.attend.write:
            tokens += forward.tokens if self._is_kept(branch, forward) else 0
        pages = memory.prefixes.match(branch.chain.keys, tokens) if tokens else []
        if not pages:
            return
        memory.tables.adopt(slot, pages)
        skipped = len(pages) * memory.pool.page_size
        while branch.replay and skipped >= branch.replay[0].tokens:
            skipped -= branch.replay.popleft().tokens
        if branch.replay:
            branch.replay[0].done = skipped
            return
        if skipped and forward is not None:
            self._skip(branch, forward, skipped)
        branch.is_evicted = False

    def _adopt_further(self, branch: Branch, prefixes: PrefixCache) -> None:
        """Take over pages where a pass begins behind cached tokens: the text after an image, or the image itself."""
        tables, forward = self._memory.tables, branch.forward
        if forward is None or not self._may_adopt(branch, forward):
            return
        before = int(tables.length[branch.slot])
        full = before // self._memory.pool.page_size
        pages = prefixes.match(branch.chain.keys, before + forward.tokens)[full:]
        if not pages or before != forward.base:
            return
        tables.adopt(branch.slot, pages)
        self._skip(branch, forward, int(tables.length[branch.slot]) - before)

    def _adopt_whole(self, branch: Branch, prefixes: PrefixCache) -> bool:
        """Take over all tokens of a pass that draws nothing, so that nothing of it is computed."""
        tables, forward, job = self._memory.tables, branch.forward, branch.job
        if forward is None or job is None or job.loop is not None or branch.parent is not None or branch.is_evicted:
            return False
        draws = job.sample and self._port is not None
        if draws or not self._may_adopt(branch, forward) or int(tables.length[branch.slot]) != forward.base:
            return False
        tokens = forward.base + forward.tokens
        pages = prefixes.whole(branch.chain, tokens)
        if pages is None:
            return False
        tables.adopt(branch.slot, pages[forward.base // self._memory.pool.page_size :], tokens)
        self._skip(branch, forward, forward.tokens)
        return True

    def _may_adopt(self, branch: Branch, forward: ForwardPass) -> bool:
        """Return whether tokens of a branch's next pass may come from the cache."""
        if branch.job is None or forward.done or branch.replay or not branch.chain.is_open:
            return False
        if not forward.attend.write or forward.must_be_whole or branch.in_flight:
            return False
        return self._is_kept(branch, forward)

    def _is_kept(self, branch: Branch, forward: ForwardPass) -> bool:
        """Return whether the pages of a pass, and rows beside them, hold all that its job wants."""
        return not branch.wants or (branch.wants <= self._attached and not forward.is_ids)

    def _skip(self, branch: Branch, forward: ForwardPass, count: int) -> None:
        """Count the first tokens of a pass as computed, and take their attached rows from the pages."""
        forward.done = branch.cached_tokens = count
        for port in branch.wants:
            pages = self._memory.tables.pages(branch.slot)
            forward.chunk_outputs[port] = [self._device.attached_rows(port, pages, forward.base, count)]

    def offer_prefix(self, branch: Branch) -> None:
        """Offer the full pages of a branch to the prefix cache."""
        memory = self._memory
        if memory.prefixes is not None and branch.chain.keys:
            full = int(memory.tables.length[branch.slot]) // memory.pool.page_size
            pages = memory.tables.pages(branch.slot)[:full]
            memory.prefixes.insert(branch.chain.keys[:full], pages, branch.chain.ends)

    def offer_answer(self, branch: Branch) -> None:
        """Offer the full pages of a branch whose request ends, up to the last id of its loop that is in the cache."""
        if branch.slot < 0:
            return
        if branch.is_decoding and branch.job is not None and not branch.is_evicted and not branch.replay:
            coming = sum(step.decodes(int(branch.job.key)) for step in self._requests.in_flight)
            length = int(self._memory.tables.length[branch.slot]) - coming
            self._loops.extend_by_loop(branch, length if branch.forward is None else branch.logged)
        self.offer_prefix(branch)
        if self._memory.prefixes is not None:
            # The page that is partly filled, too: nothing is written to it any more.
            length = int(self._memory.tables.length[branch.slot])
            ends = {tokens: key for tokens, key in branch.chain.ends.items() if tokens <= length}
            keys = branch.chain.keys[: length // self._memory.pool.page_size]
            self._memory.prefixes.insert(keys, self._memory.tables.pages(branch.slot), ends)

    def lease(self, request: KVRequest) -> None:
        """Give the session of a request that ends the cached pages of its branches."""
        prefixes = self._memory.prefixes
        if prefixes is None or not request.session:
            return
        pages = dict.fromkeys(page for branch in request.branches.values() for page in prefixes.pages_of(branch.chain))
        if pages:  # a request that was closed before it began changes nothing
            prefixes.leases.renew(request.session, list(pages), request.lease_s)

    def fork(self, source: Branch, into: Branch) -> None:
        """Make a branch a copy-on-write copy of another one, as of the jobs already done."""
        memory = self._memory
        memory.tables.release(into.slot)
        memory.copy_slot(source.slot, into.slot)
        into.matcher = source.matcher.copy() if source.matcher is not None else None
        into.log, into.logged, into.chain = list(source.log), source.logged, source.chain.copy()
        into.replay.clear()
        is_incomplete = source.is_evicted or bool(source.replay) or source.job is not None
        if not is_incomplete:
            memory.tables.fork(source.slot, into.slot)
        into.is_evicted = is_incomplete and into.logged > 0
        into.saves_pages, into.saved = source.saves_pages, source.saved
        if into.is_evicted and into.saves_pages and into.saved is None:
            into.saved = memory.save_pages(source.slot, source.logged)

    # -- preemption --------------------------------------------------------------------------------------------------

    def _youngest(self, apart_from: KVRequest | None = None) -> KVRequest | None:
        """Return the youngest request that holds pages and has nothing in flight."""
        able = [
            request
            for request, _ in self._requests.page_holders()
            if request is not apart_from and not any(branch.in_flight for branch in request.sequences())
        ]
        return max(able, key=lambda request: request.order, default=None)

    def _preempt(self, request: KVRequest) -> None:
        """Take all pages of a request, which recomputes them when it is admitted again."""
        self._memory.note_preemption(request.handle, request.slots)
        for branch in request.sequences():
            if branch.slot >= 0:
                self.evict(branch)

    def evict(self, branch: Branch) -> None:
        """Take the pages of one branch. They are copied to the host if its log cannot recompute them."""
        self._loops.sync_log(branch)
        if branch.saves_pages and branch.logged and branch.saved is None:
            branch.saved = self._memory.save_pages(branch.slot, branch.logged)
        self._memory.tables.release(branch.slot)
        branch.replay.clear()
        branch.is_evicted = branch.logged > 0
        branch.is_reserved = False
        branch.cached_tokens = 0
        if branch.forward is not None:
            branch.forward.restart()
        if branch.is_decoding and branch.job is not None:
            self._requests.leave_decode(int(branch.job.key))
            self._requests.await_pages(branch)
        if branch.runs_candidates:
            self._requests.pending[branch.key] = branch
        if self._requests.in_flight:
            # Its last id may not have arrived; the log is complete once that step is collected.
            branch.in_flight += 1
            self._requests.in_flight[-1].held.append(branch)

    def _outgrown(self, shortage: OutOfPages) -> TooLarge:
        return TooLarge(
            f"the request outgrew the cache of node {self._requests.node}",
            shortage.detail,
            "lower the output limit or give the deployment more cache",
            node=self._requests.node,
        )
