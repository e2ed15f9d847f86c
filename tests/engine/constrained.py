"""Grammars over the tiny engine's vocabulary, and requests that they constrain. Used by the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llguidance import LLMatcher

from mstar_core.constraints.matcher import Grammars
from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.engine.base import Handle
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import VOCAB, Driver, make_engine

END = VOCAB - 1
"""Id that ends an answer."""

_WORDS = [b"ab", b'{"', b'":', b"12", b"true", b"false", b'{"a":']
_CHARS = [bytes([char]) for char in b'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,- ']
TABLE = TokenTable([*_CHARS, *_WORDS, b"<end>"], special=[END], ends=[END])
assert len(TABLE) == VOCAB

OBJECT = 'start: "{\\"a\\":" LIST "}"\nLIST: /\\[[1-9][0-9]{0,2}(,[1-9][0-9]{0,2}){2,6}\\]/'
WORD = "start: /[a-d]{4,20}/"
LONG = "start: /[a-d]{30,40}/"
EITHER = 'start: "true" | "false"'
GRAMMARS = (OBJECT, WORD, EITHER)


def grammars() -> Grammars:
    """A compiler with all grammars of the tests ready, so that no request waits."""
    made = Grammars(lambda: TABLE, VOCAB)
    for constraint in (*GRAMMARS, LONG):
        made.compile(constraint).matcher()
    return made


def constrained_engine(**changes: object) -> KVCacheEngine:
    """A tiny engine whose requests may have grammars."""
    return make_engine(**{"grammars": grammars(), "max_slots": 32, **changes})


def held(constraint: str, seed: int = 0, **params: object) -> SamplingParams:
    """Parameters of a constrained request."""
    return SamplingParams(**{"constraint": constraint, "temperature": 1.0, "seed": seed, **params})  # type: ignore[arg-type]


def free(sampling: SamplingParams) -> SamplingParams:
    """The same without its grammar."""
    return replace(sampling, constraint=None)


def answers(
    requests: Sequence[tuple[list[int], int, SamplingParams]], engine: KVCacheEngine, lookahead: int = 0
) -> list[tuple[list[int], str]]:
    """Return the ids of several requests that end by END, and why they ended."""
    driver = Driver(engine, lookahead)
    keys = []
    for handle, (ids, steps, sampling) in enumerate(requests):
        driver.open(handle, sampling)
        keys.append((driver.prefill(handle, ids), driver.decode(handle, steps, (END,))))
    driver.run()
    assert not driver.failed, driver.failed
    for handle in range(len(requests)):
        engine.close(Handle(handle))
    assert engine.memory().pages_used == 0 and engine.memory().slots_used == 0
    ended = [driver.done[loop].reason for _, loop in keys]
    ids_of = [[int(driver.done[first].outputs["token"]), *driver.ids.get(loop, [])] for first, loop in keys]
    return list(zip(ids_of, ended, strict=True))


def obeys(constraint: str, ids: Sequence[int], *, is_whole: bool) -> bool:
    """Return whether a grammar allows ids at each step. is_whole: they end the answer."""
    machine = LLMatcher(TABLE.tokenizer, constraint, log_level=0)
    assert not machine.is_error(), machine.get_error()
    for drawn in ids:
        if machine.is_stopped() and drawn != END:
            return False
        if not machine.consume_token(drawn):
            return False
    return (ids[-1] == END) == is_whole and (not is_whole or machine.is_accepting())


def text_of(ids: Sequence[int]) -> str:
    """Return the text of ids without the end."""
    return b"".join(TABLE.tokens[drawn] for drawn in ids if drawn != END).decode()
