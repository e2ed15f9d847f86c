"""Places of a request's caches: which runs give and take them, and which ranks get a run for that alone."""

from __future__ import annotations

from mstar_core.conductor.caches import CachePlaces, CacheUse, cache_uses
from mstar_core.graph import KV_CACHE, GraphNode, KVSpec, NodeSpec, Parallel
from mstar_core.messages.work import Move, RunWalk, SignalRef

LM = NodeSpec(
    name="lm",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "v": "f32[n]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=2, branches=("main", "side", "other")),
)
SIDE = LM.on_branch("lm_side", "side")
OWNERS = {"lm": ("main", "side", "other")}
WHOLE = (CacheUse("lm", "lm", frozenset(("main", "side", "other"))),)


def run(number: int, branches: tuple[str, ...] = (), **fields: object) -> RunWalk:
    return RunWalk(run=number, walk="w", branches=list(branches), **fields)  # type: ignore[arg-type]


def moves(shares: dict[int, RunWalk]) -> dict[int, tuple[list[Move], list[Move]]]:
    return {rank: (share.gives, share.takes) for rank, share in shares.items()}


def test_a_branch_with_a_node_of_its_own_is_used_by_that_node_only() -> None:
    walk = Parallel(GraphNode(LM, ("tokens",)), GraphNode(SIDE, ("tokens",)))
    assert set(cache_uses(walk)) == {
        CacheUse("lm", "lm", frozenset(("main", "other"))),
        CacheUse("lm_side", "lm", frozenset(("side",))),
    }


def test_a_cache_moves_when_its_node_runs_elsewhere_and_back() -> None:
    places = CachePlaces()
    assert moves(places.shares(run(1), WHOLE, {"lm": 0}, [0], OWNERS)) == {0: ([], [])}
    there = places.shares(run(2), WHOLE, {"lm": 1}, [1, 2], OWNERS)
    gives, takes = [Move("lm", "main", 1)], [Move("lm", "main", 0)]
    assert moves(there) == {0: (gives, []), 1: ([], takes), 2: ([], [])}
    assert moves(places.shares(run(3), WHOLE, {"lm": 1}, [1], OWNERS)) == {1: ([], [])}
    back = places.shares(run(4), WHOLE, {"lm": 0}, [0], OWNERS)
    assert moves(back) == {0: ([], [Move("lm", "main", 1)]), 1: ([Move("lm", "main", 0)], [])}


def test_a_fork_runs_on_the_rank_of_its_source_and_moves_when_it_is_used() -> None:
    places = CachePlaces()
    places.shares(run(1), WHOLE, {"lm": 0}, [0], OWNERS)
    forked = places.shares(run(2, forks=[("main", "side")]), (), {}, [3], OWNERS)
    assert moves(forked) == {3: ([], []), 0: ([], [])}
    uses = (CacheUse("lm", "lm", frozenset(("main",))), CacheUse("lm_side", "lm", frozenset(("side",))))
    used = places.shares(run(3, ("main", "side")), uses, {"lm": 0, "lm_side": 1}, [0, 1], OWNERS)
    assert moves(used) == {0: ([Move("lm", "side", 1)], []), 1: ([], [Move("lm", "side", 0)])}


def test_a_fork_of_an_empty_cache_clears_what_it_replaces() -> None:
    places = CachePlaces()
    places.shares(run(1, ("side",)), WHOLE, {"lm": 1}, [1], OWNERS)
    assert set(places.shares(run(2, forks=[("main", "side")]), (), {}, [0], OWNERS)) == {0, 1}
    assert moves(places.shares(run(3, ("side",)), WHOLE, {"lm": 0}, [0], OWNERS)) == {0: ([], [])}


def test_the_rank_of_a_signal_takes_part() -> None:
    inputs = {"tokens": SignalRef(key=4, rank=2)}
    assert set(CachePlaces().shares(run(1, inputs=inputs), WHOLE, {"lm": 0}, [0], OWNERS)) == {0, 2}
