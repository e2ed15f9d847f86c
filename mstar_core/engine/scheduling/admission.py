"""Choice of what runs in the next step of a KV node: starts jobs, gives slots, and divides the token budget.

Part of the scheduler. Older requests go first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mstar_core.engine.base import Done
from mstar_core.engine.scheduling.device_share import TEXT, DeviceShare
from mstar_core.engine.slack import HOLD_LIMIT_S, Slack, StepCost

if TYPE_CHECKING:
    from mstar_core.engine.base import Job
    from mstar_core.engine.scheduling.candidates import Candidates
    from mstar_core.engine.scheduling.known_ids import KnownIds
    from mstar_core.engine.scheduling.loops import Loops
    from mstar_core.engine.scheduling.moves import Moves
    from mstar_core.engine.scheduling.pages import Pages
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.engine.scheduling.sequence import Branch, ForwardPass
    from mstar_core.engine.steps.device import Device
    from mstar_core.graph.declare.nodes import NodeSpec

MOST_ITEMS: Final = 32
"""Batch items of captured passes in one step: enough to fill a device while the host prepares the next ones.

Loops that report each iteration are not counted.
"""

MOST_BESIDE_TEXT: Final = 4352
"""Tokens of an image step while text waits: one pass of an image of 1024 x 1024, or several of smaller ones."""

MOST_PREFILL_BUDGETS: Final = 2
"""Token budgets of prompt passes that share a forward pass. More take as long per token and delay first tokens."""

LEAST_TOKENS: Final = 64
"""Least tokens to which listeners cut a pass: the launch of a shorter one costs as much."""


class Admission:
    """Chooses the branches of a step. It keeps no state."""

    def __init__(
        self,
        spec: NodeSpec,
        requests: Requests,
        loops: Loops,
        candidates: Candidates,
        pages: Pages,
        moves: Moves,
        known: KnownIds,
        device: Device,
        token_budget: int,
        share: DeviceShare,
    ) -> None:
        assert spec.kv is not None
        self._spec = spec
        self._branches = len(spec.kv.branches)
        self._requests = requests
        self._memory = requests.memory
        self._loops = loops
        self._candidates = candidates
        self._pages = pages
        self._moves = moves
        self._known = known
        self._device = device
        self._budget = token_budget
        self._device_share = share
        self._slack = Slack()
        self._cost = StepCost()

    def yield_to(self, slack: Slack, cost: StepCost) -> None:
        """Cut passes with `Job.yields` to the time that listeners leave. cost: of the node's steps."""
        self._slack, self._cost = slack, cost

    def choose(self, *, after_media: bool = False) -> list[tuple[Branch, int]]:
        """Start jobs in order of age. Returns the branches of the next step, and how many tokens of each run.

        after_media: the step before read media, see `_apart`.
        """
        chosen = self._choose_once(after_media=after_media)
        while not chosen and self._requests.has_changed:  # a younger branch has freed what an older one waits for
            chosen = self._choose_once(after_media=after_media)
        return chosen

    def _choose_once(self, *, after_media: bool) -> list[tuple[Branch, int]]:
        requests = self._requests
        requests.begin_pass()
        chosen: list[Branch] = []
        waiting = [branch for _, branch in sorted(requests.pending.items(), reverse=True)]
        most_items, items = min(MOST_ITEMS, self._device.limits.appending), 0
        while waiting and (not most_items or items < most_items):
            branch = waiting.pop()
            if branch.in_flight or branch.request.is_compiling or not self._has_slot(branch):
                continue
            waiting.extend(reversed(self._start_next(branch)))
            job = branch.job
            if job is None:
                continue
            if job.move is not None and self._moves.is_ready(branch):
                self._moves.finish(branch, job)
            elif branch.runs_candidates:
                self._restore_parent(branch, chosen)
            elif branch.current is None and branch.is_reserved:
                self._join_decode(branch)
            elif branch.is_reserved or (not requests.waits_for_pages and self._pages.reserve(branch)):
                if branch.current is not None and not branch.current.left:
                    self._end_cached(branch)
                    waiting.extend([branch] if branch.queue else [])
                elif branch.current is not None:
                    chosen.append(branch)
                    # Candidates that report each iteration stay together: the slowest decides when they report.
                    items += 0 if branch.emits or branch.current.is_ids else branch.current.iterations
                elif job.move is not None:
                    self._moves.finish(branch, job)
                else:
                    self._join_decode(branch)
        # A preemption during this pass may have taken the pages of a branch that was chosen before it.
        chosen = self._apart(self._take_turns(chosen), after_media=after_media)
        counted = self._cut(self._divide(chosen, is_limited=bool(most_items)))
        return [(branch, count) for branch, count in counted if count and branch.is_reserved]

    def _end_cached(self, branch: Branch) -> None:
        """End a job whose whole pass came from the prefix cache."""
        job, forward = branch.job, branch.forward
        assert job is not None and forward is not None
        self._loops.finish_pass(branch, forward)
        outputs = forward.outputs
        self._requests.ready.done.append(Done(job=job, outputs=outputs, cached_tokens=branch.cached_tokens))
        self._requests.remember(branch, outputs)
        branch.job = branch.forward = None
        self._requests.requeue(branch)
        self._requests.has_changed = True

    def _join_decode(self, branch: Branch) -> None:
        """Move a branch to the decode batch, unless it first has a pass over known iterations."""
        if self._known.next_pass(branch):
            branch.is_reserved = False
            self._requests.has_changed = True
        else:
            self._requests.join_decode(branch)

    def _take_turns(self, chosen: list[Branch]) -> list[Branch]:
        """Return the branches of the kind whose turn it is: image passes or text. See DeviceShare."""
        images = [branch for branch in chosen if _is_image(branch)] if self._spec.sampling is not None else []
        share, has_text = self._device_share, bool(self._requests.active) or len(images) < len(chosen)
        if not images and not share.is_engaged:
            share.turn = TEXT
            return chosen
        share.choose(has_images=bool(images), has_text=has_text)
        if share.turn == TEXT:
            return [branch for branch in chosen if not _is_image(branch)]
        if share.turn is None:
            return []
        return _within(images, MOST_BESIDE_TEXT) if has_text else images

    def _apart(self, chosen: list[Branch], *, after_media: bool) -> list[Branch]:
        """Return the branches that read media, or the others, in turn with decode steps. See `reads_media`.

        A pass over media takes many times as long as one over a short text or a decode step, whose ids would be known
        no earlier than its end if they shared a step. after_media: such a step has just been planned.
        """
        media = [branch for branch in chosen if reads_media(branch)]
        if not media or self._spec.sampling is None:
            return chosen
        others = [branch for branch in chosen if not reads_media(branch)]
        if others and others[0] is chosen[0]:
            return others  # a first token is near
        has_others = bool(others) or len(self._requests.active) > len(self._requests.undecided)
        return others if after_media and has_others else media

    def _divide(self, chosen: list[Branch], *, is_limited: bool) -> list[tuple[Branch, int]]:
        """Return the branches of the step and the tokens of each. is_limited: their number was limited already."""
        budget, limits = self._budget, self._device.limits
        if limits.prompt_tokens:
            # At most one replay: decoding sequences wait for no more, and its buffers are reused by the next.
            budget, chosen = min(budget, limits.prompt_tokens), chosen[: limits.prompts]
        forwards = _passes(chosen)
        if all(forward.per_item for forward in forwards):
            most = sum(forward.left for forward in forwards) if is_limited else self._spec.hints.pass_tokens
            if not is_limited and any(forward.attend.write for forward in forwards):
                most = min(most, MOST_PREFILL_BUDGETS * self._budget)
            budget = max(budget, most)
        budget = max(budget - len(self._requests.active), self._memory.pool.page_size)
        counts = share_budget([(forward.left, forward.must_be_whole) for forward in forwards], budget)
        return list(zip(chosen, counts, strict=True))

    def _cut(self, counted: list[tuple[Branch, int]]) -> list[tuple[Branch, int]]:
        """Cut the passes that yield to the time that listeners leave. See `engine.slack`."""
        if not any([_yields(branch) for branch, _ in counted]):
            return counted
        left_s = self._slack.left_s()
        if left_s == math.inf:
            return counted
        left, now = self._cost.units_within(left_s), self._requests.clock()
        cut: list[tuple[Branch, int]] = []
        is_first = True
        for branch, count in counted:
            taken = self._taken(branch, count, left, now, is_first=is_first)
            self._slack.is_holding = self._slack.is_holding or taken < count
            if taken and _yields(branch):
                is_first = False
                left -= taken
            cut.append((branch, taken))
        return cut

    def _taken(self, branch: Branch, count: int, left: int, now: float, *, is_first: bool) -> int:
        """Return the tokens of a pass that a step takes, of `count` that fit its budget. left: of those that yield."""
        if not _yields(branch) or count <= left:
            return count
        assert branch.current is not None
        if is_first and now - branch.waiting_since > HOLD_LIMIT_S:
            return count
        return 0 if branch.current.must_be_whole or left < LEAST_TOKENS else left

    # -- starting jobs -----------------------------------------------------------------------------------------------

    def _has_slot(self, branch: Branch) -> bool:
        """Return whether a branch has its slot; takes one unless an older branch waits for memory."""
        request, requests = branch.request, self._requests
        if branch.parent is not None:
            may_take = bool(request.spare) or not requests.is_blocked  # only this request can use its spare slots
            if branch.slot >= 0 or (may_take and self._candidates.enter(branch)):
                return True
            requests.waits_for_slots = True
            self._candidates.starve(branch.parent)
            return False
        if request.slots:
            return True
        may_take = not requests.is_blocked or (not requests.waits_for_pages and self._candidates.leaves_room)
        taken = self._memory.slots.take(self._branches, request.sampling) if may_take else None
        if taken is None:
            requests.waits_for_slots = True
            return False
        request.slots = taken
        for slot, sibling in zip(taken, request.branches.values(), strict=True):
            sibling.slot = slot
        return True

    def _start_next(self, branch: Branch) -> list[Branch]:
        """Start jobs of a branch until one has something to compute. Returns the candidates of a job of several."""
        while branch.job is None and branch.queue:
            job = branch.job = branch.queue.popleft()
            branch.is_reserved, branch.cached_tokens = False, 0
            try:
                if branch.request.grammar is not None and branch.matcher is None:
                    branch.matcher = branch.request.grammar.matcher()
                if job.rows > 1:
                    return self._start_candidates(branch, job)
                if job.move is not None:
                    self._moves.start(branch, job)
                self._candidates.free(branch)
                self._known.check(job)
                ended = self._loops.start(branch, job) if job.move is None else None
                self._candidates.check_pages(branch)
                if branch.is_decoding and ended is None:
                    self._known.begin(branch, job)
            except Exception as error:  # noqa: BLE001 a job's inputs fail its own request only
                self._requests.fail(branch, job, error)
                return []
            if ended is not None:
                self._requests.ready.done.append(ended)
                self._requests.remember(branch, ended.outputs)
                branch.job = None
            elif branch.is_decoding:
                self._requests.looping[int(job.key)] = branch
        if branch.job is None:
            self._requests.remove(branch)
        return []

    def _start_candidates(self, branch: Branch, job: Job) -> list[Branch]:
        if not self._candidates.claim_slots(branch, job):
            branch.queue.appendleft(job)
            branch.job = None
            self._requests.waits_for_slots = branch.is_starved = True
            return []
        branch.is_starved = False
        candidates = self._candidates.start(branch, job)
        if not branch.is_evicted:
            self._requests.remove(branch)
        return candidates

    def _restore_parent(self, branch: Branch, chosen: list[Branch]) -> None:
        """Recompute a preempted branch before its candidates, which share its pages, once one of them can run."""
        if branch.is_evicted or branch.replay:
            if not self._candidates.can_run(branch):
                self._requests.waits_for_slots = True
                self._candidates.starve(branch)
            elif not self._requests.waits_for_pages and self._pages.reserve(branch) and branch.current is not None:
                chosen.append(branch)
                return
        if not (branch.is_evicted or branch.replay):
            self._requests.remove(branch)


def share_budget(passes: Sequence[tuple[int, bool]], budget: int) -> list[int]:
    """Divide a token budget among passes, oldest first. passes: (tokens, whether they must be computed whole).

    A whole pass larger than the budget may exceed it when it is the first, so that it runs at all.
    """
    counts = []
    left = budget
    for index, (tokens, is_whole) in enumerate(passes):
        if is_whole:
            count = tokens if tokens <= left or index == 0 else 0
        else:
            count = min(tokens, max(left, 0))
        left -= count
        counts.append(count)
    return counts


def reads_media(branch: Branch) -> bool:
    """Return whether a branch reads vectors of media in a pass that cannot be split and draws no id."""
    forward, job = branch.current, branch.job
    if forward is None or job is None or forward.is_replay or not forward.attend.write:
        return False
    return bool(forward.per_item) and job.loop is None and not job.sample


def _is_image(branch: Branch) -> bool:
    """Return whether the pass of a branch only reads its cache, as denoising steps do."""
    return branch.current is not None and not branch.current.is_replay and not branch.current.attend.write


def _yields(branch: Branch) -> bool:
    return branch.job is not None and branch.job.yields


def _within(branches: list[Branch], most: int) -> list[Branch]:
    """Return the first branches whose passes have at most so many tokens together, but at least one."""
    total = 0
    for index, forward in enumerate(_passes(branches)):
        total += forward.left
        if index and total > most:
            return branches[:index]
    return branches


def _passes(branches: Sequence[Branch]) -> list[ForwardPass]:
    """Return the passes that branches compute next. A chosen branch has one, unless its request failed since."""
    return [branch.current for branch in branches if branch.current is not None]
