"""Plans with another number of replicas."""

from __future__ import annotations

import pytest

from mstar_core.config.deployment import GroupPlan, NodePlacement, Plan, RankPlan
from mstar_core.config.scaling import FreeDevice, with_replicas
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


def gpus(*names: str, host: str = "") -> list[FreeDevice]:
    """Return free GPUs of a host."""
    return [FreeDevice(name=name, key="", free_bytes=0, host=host) for name in names]


def test_nodes_of_one_rank_are_copied_together() -> None:
    change = with_replicas(ONE, 3)
    assert change.added == ((1,), (2,)) and change.removed == ()
    assert {place.node: place.replicas for place in change.plan.placements} == {
        "LLM": ((0,), (1,), (2,)),
        "SNAC": ((0,), (1,), (2,)),
    }
    assert [rank.nodes for rank in change.plan.ranks] == [("LLM", "SNAC")] * 3


def test_groups_are_copied_whole_and_each_new_rank_takes_a_free_gpu() -> None:
    change = with_replicas(OMNI, 2, gpus("cuda:5", "cuda:6", "cuda:7"))
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


def test_new_ranks_on_one_host_take_gpus_in_the_order_of_their_numbers() -> None:
    change = with_replicas(OMNI, 3, gpus(*(f"cuda:{index}" for index in range(3, 9))))
    assert [rank.device for rank in change.plan.ranks] == [f"cuda:{index}" for index in range(9)]


def test_a_new_replica_is_placed_whole_on_a_host_that_has_room_for_it() -> None:
    free = [*gpus("cuda:3", "cuda:4"), *gpus("cuda:0", "cuda:1", "cuda:2", host="b")]
    change = with_replicas(OMNI, 2, free, hosts=["", "b"])
    assert [rank.place for rank in change.plan.ranks[3:]] == ["b cuda:0", "b cuda:1", "b cuda:2"]


def test_a_group_stays_on_one_host_if_a_replica_does_not_fit_any() -> None:
    free = [*gpus("cuda:3"), *gpus("cuda:0", "cuda:1", host="b")]
    change = with_replicas(OMNI, 2, free, hosts=["", "b"])
    assert [rank.place for rank in change.plan.ranks[3:]] == ["b cuda:0", "b cuda:1", "cuda:3"]


def test_new_ranks_on_the_cpu_share_the_host_that_they_copy_unless_replicas_are_spread() -> None:
    beside = with_replicas(ONE, 3, hosts=["", "b", "c"]).plan
    assert [rank.host for rank in beside.ranks] == ["", "", ""]
    spread = with_replicas(ONE, 4, hosts=["", "b", "c"], spread=True).plan
    assert [rank.host for rank in spread.ranks] == ["", "b", "c", ""]


def test_spread_replicas_on_gpus_go_to_the_hosts_with_the_fewest() -> None:
    one = Plan(
        ranks=(RankPlan(rank=0, device="cuda:0", nodes=("LLM",)),),
        placements=(NodePlacement(node="LLM", replicas=((0,),)),),
    )
    free = [*gpus("cuda:1", "cuda:2"), *gpus("cuda:0", "cuda:1", host="b")]
    places = {
        spread: [rank.place for rank in with_replicas(one, 3, free, hosts=["", "b"], spread=spread).plan.ranks]
        for spread in (False, True)
    }
    assert places == {False: ["cuda:0", "cuda:1", "cuda:2"], True: ["cuda:0", "b cuda:0", "cuda:1"]}
