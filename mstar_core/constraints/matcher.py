"""Matchers of constrained sequences: which ids may follow those that a request has drawn.

The scheduler of a text head owns one per sequence. Grammars are compiled on a thread, because a large one takes up to a
second, and so does the trie of a large vocabulary at the first grammar. Copies of a compiled grammar share its lexer
behind a lock, so their masks are computed one after the other: a grammar that many requests use is compiled again, at
most once for each thread that computes masks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakSet

import numpy as np
from llguidance import LLExecutor, LLMatcher

from mstar_core.errors import EngineError, RequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from mstar_core.constraints.vocabulary import TokenTable

log = logging.getLogger(__name__)

WORD_BITS: Final = 32
"""Ids of one word of a mask."""

MOST_GRAMMARS: Final = 64
"""Compiled grammars that are kept: requests of one client tend to share theirs."""

COMPILERS: Final = 2
"""Threads that compile, so that one slow grammar does not delay all others."""

SHARING: Final = 4
"""Requests that share one compiled grammar before it is compiled again."""

MOST_THREADS: Final = 32
"""Threads that compute masks on a large host. A few cores are left to the processes beside this one."""

SMALL_VOCABULARY: Final = 10_000
"""Ids up to which the trie takes milliseconds, so that no node prepares it before a request needs it."""


def mask_words(vocab: int) -> int:
    """Return the words of a mask of so many ids."""
    return -(-vocab // WORD_BITS)


class Matcher:
    """State of one constrained sequence. Owned by its branch.

    ids: those that it has taken, from which another rank rebuilds it. lock: equal for matchers that share a lexer.
    """

    def __init__(self, machine: LLMatcher, ids: Sequence[int] = (), *, lock: int = 0) -> None:
        self.machine = machine
        self.ids = list(ids)
        self.lock = lock

    def copy(self) -> Self:
        """Return a matcher in the same state."""
        return type(self)(self.machine.deep_copy(), self.ids, lock=self.lock)

    def take(self, ids: Sequence[int]) -> None:
        """Go on past ids. Raises EngineError if the grammar forbids one of them."""
        # One by one: `consume_tokens` refuses an end id after the last text, which `consume_token` takes.
        if not all(self.machine.consume_token(drawn) for drawn in ids):
            raise self.failure()
        self.ids += ids

    def failure(self) -> EngineError:
        """Return the error of a matcher that has failed."""
        reason = self.machine.get_error().strip().splitlines() or ["the matcher gave no reason"]
        return EngineError(
            "the answer left the grammar of its request",
            reason[0],
            "ask again, or use a simpler grammar; the operator can report the grammar as a defect",
        )


class Grammar:
    """A grammar of one request, which a thread compiles."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        compiled.users.add(self)

    @property
    def is_ready(self) -> bool:
        """Whether `matcher` does not wait."""
        return self._compiled.machine.done()

    def matcher(self) -> Matcher:
        """Return a matcher before the first id. Raises RequestError for a grammar that cannot be compiled."""
        return Matcher(self._compiled.machine.result().deep_copy(), lock=id(self._compiled))


class Compiled:
    """A grammar as it was compiled once. users: the requests whose matchers are copies of it."""

    def __init__(self, machine: Future[LLMatcher]) -> None:
        self.machine = machine
        self.users: WeakSet[Grammar] = WeakSet()

    @property
    def has_failed(self) -> bool:
        """Whether it could not be compiled."""
        return self.machine.done() and self.machine.exception() is not None


class Grammars:
    """Compiles the grammars of one node. Used from the worker's thread.

    load: returns the node's vocabulary; called once, on a thread. vocab: ids of the node's logits.
    """

    def __init__(self, load: Callable[[], TokenTable], vocab: int) -> None:
        self.words = mask_words(vocab)
        self._load = load
        self._vocab = vocab
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._masking: LLExecutor | None = None
        self._mask_threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) * 4 // 5))
        self._was_prepared = False
        self._kept: OrderedDict[str, list[Compiled]] = OrderedDict()

    def compile(self, constraint: str) -> Grammar:
        """Begin to compile a grammar, unless it is kept from an earlier request and few others use it."""
        kept = [each for each in self._kept.pop(constraint, []) if not each.has_failed]
        chosen = min(kept, key=lambda each: len(each.users), default=None)
        if chosen is None or (len(chosen.users) >= SHARING and len(kept) < self._mask_threads):
            chosen = self._submit(constraint)
            kept.append(chosen)
        self._kept[constraint] = kept
        if len(self._kept) > MOST_GRAMMARS:
            self._kept.popitem(last=False)
        return Grammar(chosen)

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` was called, or the trie is small enough to be made at the first grammar."""
        return self._was_prepared or self._vocab <= SMALL_VOCABULARY

    def prepare(self) -> None:
        """Make the trie, which holds the interpreter lock. Called when the node is idle. A failure is logged."""
        self._was_prepared = True
        try:
            self._prepared()
        except Exception:  # isolation boundary: each request with a grammar fails by the same error
            log.exception("the vocabulary of grammars cannot be read")

    def advance(self, matchers: Sequence[Matcher], ids: Sequence[int]) -> list[int]:
        """Let each matcher take one id. Returns the places of those that have failed."""
        if len(matchers) == 1:
            taken = [matchers[0].machine.consume_token(ids[0])]
        else:
            pairs = zip(matchers, ids, strict=True)
            taken = self._executor.consume_token_par([(matcher.machine, drawn) for matcher, drawn in pairs])
        for matcher, drawn in zip(matchers, ids, strict=True):
            matcher.ids.append(drawn)
        return [place for place, is_taken in enumerate(taken) if not is_taken]

    def masks(self, matchers: Sequence[Matcher | None]) -> np.ndarray:
        """Return the ids that may follow, one bit each: int32 [n, words]. None: every id may.

        A matcher that has failed allows ids that end the answer; it reports its failure when it takes one.
        """
        masks = np.full((len(matchers), self.words), -1, dtype=np.int32)
        held = [(matcher.lock, row, matcher.machine) for row, matcher in enumerate(matchers) if matcher is not None]
        # Threads take neighbours, so those that share a lock stand together.
        chosen = [(machine, row) for _, row, machine in sorted(held, key=lambda each: each[:2])]
        if len(chosen) == 1:
            machine, row = chosen[0]
            machine.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
        elif chosen:
            self._executor.unsafe_compute_mask_ptr(chosen, masks.ctypes.data, masks[0].nbytes, len(masks))
        return masks

    @property
    def _executor(self) -> LLExecutor:
        if self._masking is None:
            self._masking = LLExecutor(self._mask_threads)
        return self._masking

    def _submit(self, constraint: str) -> Compiled:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammars")
        return Compiled(self._threads.submit(self._compile, constraint))

    def _prepared(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load().sized(self._vocab).tokenizer
            return self._tokenizer

    def _compile(self, constraint: str) -> LLMatcher:
        machine = LLMatcher(self._prepared(), constraint, log_level=0)
        if machine.is_error():
            raise RequestError(
                "the grammar of the answer cannot be compiled for this model",
                machine.get_error().strip().splitlines()[0],
                "simplify the schema or grammar",
                code="unsupported_grammar",
            )
        machine.compute_bitmask()  # the first mask is the slowest; copies share what it computes
        return machine
