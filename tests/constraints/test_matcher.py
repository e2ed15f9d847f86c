"""Matchers of one node: compiled once per grammar on a thread, advanced alone or together, failing one by one."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from mstar_core.constraints.matcher import MOST_GRAMMARS, SHARING, SMALL_VOCABULARY, Grammars, Matcher, mask_words
from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.errors import EngineError, RequestError

END = 256
TABLE = TokenTable([bytes([value]) for value in range(256)] + [b"<end>"], special=[END], ends=[END])
VOCAB = 300
"""More ids than the table has, as in a padded head."""
CHOICE = 'start: "ab" | "cd"'


def compiler() -> Grammars:
    return Grammars(lambda: TABLE, VOCAB)


def allowed(mask: np.ndarray) -> list[int]:
    """Return the ids of a mask."""
    assert mask.dtype == np.int32 and len(mask) == mask_words(VOCAB)
    bits: list[int] = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()
    return bits


def start(grammars: Grammars, constraint: str = CHOICE) -> Matcher:
    return grammars.compile(constraint).matcher()


def test_a_mask_holds_the_ids_that_may_follow() -> None:
    grammars = compiler()
    matcher = start(grammars)
    assert allowed(grammars.masks([matcher])[0]) == [ord("a"), ord("c")]
    matcher.take([ord("a")])
    assert allowed(grammars.masks([matcher])[0]) == [ord("b")]
    matcher.take([ord("b")])
    assert allowed(grammars.masks([matcher])[0]) == [END]
    matcher.take([END])
    assert allowed(grammars.masks([matcher])[0]) == [END] and matcher.ids == [ord("a"), ord("b"), END]


def test_matchers_of_one_grammar_are_independent() -> None:
    grammars = compiler()
    one, other = start(grammars), start(grammars)
    one.take([ord("a")])
    third = one.copy()
    third.take([ord("b")])
    masks = grammars.masks([one, None, other, third])
    assert [allowed(mask) for mask in (masks[0], *masks[2:])] == [[ord("b")], [ord("a"), ord("c")], [END]]
    assert (masks[1] == -1).all(), "a known id is not masked"
    assert one.ids == [ord("a")] and third.ids == [ord("a"), ord("b")]


@pytest.mark.parametrize("count", [1, 3])
def test_a_refused_id_fails_its_matcher_alone(count: int) -> None:
    grammars = compiler()
    matchers = [start(grammars) for _ in range(count)]
    drawn = [ord("x"), ord("a"), ord("c")][:count]
    assert grammars.advance(matchers, drawn) == [0]
    error = matchers[0].failure()
    assert isinstance(error, EngineError) and '"x"' in (error.detail or "")
    if count > 1:
        assert [allowed(mask) for mask in grammars.masks(matchers[1:])] == [[ord("b")], [ord("d")]]
    with pytest.raises(EngineError, match="left the grammar"):
        matchers[0].take([ord("a")])


def test_a_grammar_is_compiled_once_while_it_is_kept() -> None:
    loads: list[int] = []

    def load() -> TokenTable:
        loads.append(1)
        return TABLE

    grammars = Grammars(load, VOCAB)
    first = grammars.compile(CHOICE)
    assert grammars.compile(CHOICE)._compiled is first._compiled
    for number in range(MOST_GRAMMARS):
        start(grammars, f'start: "{number}"')
    assert grammars.compile(CHOICE)._compiled is not first._compiled
    start(grammars)
    assert loads == [1]


@pytest.mark.parametrize(("cores", "most"), [(1, 1), (5, 4), (16, 3)])
def test_requests_of_one_grammar_share_a_lock_only_a_few_at_a_time(
    cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    grammars = compiler()
    requests = [grammars.compile(CHOICE) for _ in range(SHARING * most)]
    matchers = [request.matcher() for request in requests]
    users = Counter(matcher.lock for matcher in matchers)
    assert set(users.values()) == {SHARING} and len(users) == most
    matchers[0].take([ord("a")])
    masks = grammars.masks([*matchers[::-1], None])
    assert [allowed(mask) for mask in masks[:-1]] == [[ord("a"), ord("c")]] * (len(matchers) - 1) + [[ord("b")]]
    del requests[:SHARING]
    assert grammars.compile(CHOICE).matcher().lock == matchers[0].lock, "the compiled one that no request uses"


def test_a_grammar_that_cannot_be_compiled_says_why_and_is_tried_again() -> None:
    grammars = compiler()
    bad = grammars.compile("start: missing")
    with pytest.raises(RequestError, match="cannot be compiled for this model") as refused:
        bad.matcher()
    assert "missing" in (refused.value.detail or "")
    assert grammars.compile("start: missing")._compiled is not bad._compiled


def test_an_unreadable_vocabulary_fails_each_grammar_and_no_idle_worker() -> None:
    def load() -> TokenTable:
        raise OSError("no tokenizer")

    grammars = Grammars(load, SMALL_VOCABULARY + 1)
    assert not grammars.is_prepared
    grammars.prepare()
    assert grammars.is_prepared
    with pytest.raises(OSError, match="no tokenizer"):
        start(grammars)
    assert compiler().is_prepared, "a small vocabulary needs no preparation"
