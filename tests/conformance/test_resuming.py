"""New attempts of miniatures on several ranks: known ids, what follows them, and what the client has."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from mstar_core.conformance.equality import require_equal
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.miniature import Miniature
from mstar_core.conformance.resuming import known_ids
from mstar_core.messages.requests import Resume
from tests.families.families import SPECS

SENT = {"orpheus": "sentence", "qwen3_omni": "text, spoken"}


@functools.cache
def miniature(name: str) -> Miniature:
    return Miniature(SPECS[name])


def ask_of(name: str) -> SampleRequest:
    ask = next(ask for ask in miniature(name).asks if ask.name == f"sample {SENT[name]!r}")
    return replace(ask, is_journaled=True)


@pytest.mark.parametrize("name", SENT)
def test_attempts_on_other_ranks_go_on_alike(name: str) -> None:
    """Each node on a rank of its own, with slow messages to the client: the journal stays ahead of its streams."""
    ask = ask_of(name)
    (first,) = miniature(name).runtime().ask(ask)
    runtime = miniature(name).runtime(ranks=4, slow={("worker-0", "api"), ("worker-1", "worker-2")})
    for share in (0.0, 0.3, 0.7):
        (again,) = runtime.ask(replace(ask, resume=Resume(attempt=2, ids=known_ids(first, share))))
        require_equal(first, again, f"{name} from {share:.0%} on")
        assert again.drawn == first.drawn
    assert runtime.leaks() == []


@pytest.mark.parametrize("name", SENT)
def test_another_history_stays_as_it_was(name: str) -> None:
    """Ids that would not be drawn are kept, and a third attempt continues what the second one has made of them."""
    ask = ask_of(name)
    runtime = miniature(name).runtime()
    (first,) = runtime.ask(ask)
    known = known_ids(first, 0.4)
    loop = max(known, key=lambda place: len(known[place]) if first.widths[place] == 1 else 0)
    ids = first.drawn[loop]
    known[loop] = [ids[(ids.index(value) + 3) % len(ids)] for value in known[loop]]
    (second,) = runtime.ask(replace(ask, resume=Resume(attempt=2, ids={loop: known[loop]})))
    assert second.drawn[loop][: len(known[loop])] == known[loop] != ids[: len(known[loop])]
    (third,) = runtime.ask(replace(ask, resume=Resume(attempt=3, ids=second.drawn)))
    require_equal(second, third, "the third attempt")
    (fourth,) = runtime.ask(
        replace(ask, resume=Resume(attempt=3, ids=known_ids(replace(second, widths=first.widths), 0.8)))
    )
    require_equal(second, fourth, "the fourth attempt")
