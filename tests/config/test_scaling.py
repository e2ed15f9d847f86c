"""Plans with another number of replicas."""

from __future__ import annotations

import pytest

from mstar_core.config.deployment import GroupPlan, NodePlacement, Plan, RankPlan
from mstar_core.config.scaling import with_replicas
from mstar_core.errors import ConfigError

ONE = Plan(
    ranks=(RankPlan(rank=0, device="cpu", nodes=("LLM", "SNAC")),),
    placements=(NodePlacement(node="LLM", replicas=((0,),)), NodePlacement(node="SNAC", replicas=((0,),))),
)
OMNI = Plan(
    ranks=(
        RankPlan(rank=0, device="cuda:0", nodes=("thinker",)),
        RankPlan(rank=1, device="cuda:1", nodes=(), follows=("thinker",)),
        RankPlan(rank=2, device="cuda:2", nodes=("talker",), memory_fraction=0.4),
    ),
    placements=(
        NodePlacement(node="thinker", replicas=((0, 1),), tp_size=2),
        NodePlacement(node="talker", replicas=((2,),)),
    ),
    groups=(GroupPlan(ranks=(0, 1), nodes=("thinker",)),),
)


def test_nodes_of_one_rank_are_copied_together() -> None:
    change = with_replicas(ONE, 3)
    assert change.added == ((1,), (2,)) and change.removed == ()
    assert {place.node: place.replicas for place in change.plan.placements} == {
        "LLM": ((0,), (1,), (2,)),
        "SNAC": ((0,), (1,), (2,)),
    }
    assert [rank.nodes for rank in change.plan.ranks] == [("LLM", "SNAC")] * 3


def test_groups_are_copied_whole_and_each_new_rank_takes_a_free_gpu() -> None:
    change = with_replicas(OMNI, 2, ["cuda:5", "cuda:6", "cuda:7"])
    assert change.added == ((3, 4), (5,)) and dict(change.copied) == {3: 0, 4: 1, 5: 2}
    assert [(r.rank, r.device, r.nodes, r.follows) for r in change.plan.ranks[3:]] == [
        (3, "cuda:5", ("thinker",), ()),
        (4, "cuda:6", (), ("thinker",)),
        (5, "cuda:7", ("talker",), ()),
    ]
    assert change.plan.ranks[5].memory_fraction == 0.4
    assert change.plan.groups[1] == GroupPlan(ranks=(3, 4), nodes=("thinker",))


def test_the_last_replicas_are_removed_and_their_numbers_are_not_used_again() -> None:
    three = with_replicas(ONE, 3).plan
    change = with_replicas(three, 1)
    assert change.plan == ONE and change.removed == ((1,), (2,))
    assert with_replicas(OMNI, 1).plan == OMNI
    assert with_replicas(change.plan, 2, first=3).added == ((3,),)


@pytest.mark.parametrize(
    ("plan", "replicas", "words"),
    [
        (ONE, 0, "a deployment cannot have 0 replicas"),
        (OMNI, 2, "no device is free"),
        (
            Plan(
                ranks=tuple(RankPlan(rank=rank, device="cpu", nodes=("thinker",)) for rank in (0, 1)),
                placements=(
                    NodePlacement(node="thinker", replicas=((0,), (1,))),
                    NodePlacement(node="talker", replicas=((1,),)),
                ),
            ),
            3,
            "the replicas of thinker differ",
        ),
    ],
)
def test_what_cannot_be_scaled_is_refused(plan: Plan, replicas: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_replicas(plan, replicas)
