"""Choice of replicas: by load, and by the prefix that a replica has read while its load allows."""

from __future__ import annotations

import msgspec
import numpy as np

from mstar_core.conductor.prefixes import BLOCK_IDS, MOST_KNOWN, Block, Prefixes, prefix_blocks
from mstar_core.conductor.router import IDS_PER_REQUEST, SPARE, Router
from mstar_core.conductor.sessions import MOST_SESSIONS, SessionRanks
from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from mstar_core.messages.requests import NewRequest, SegmentRef
from mstar_core.transport.tensors import inline
from tests.conductor.test_conductor import MODEL, placed

TWO = placed((0,), (1,), codec=0)


def asked(ids: range, handle: int = 1) -> NewRequest:
    tokens = inline(np.array(ids, dtype=np.int64))
    return NewRequest(handle=handle, request_id="r", params={}, outputs=[], inputs={"text_tokens": tokens})


def router(*, has_prefix_caches: bool = True) -> Router:
    made = Router(MODEL, TWO, has_prefix_caches)
    made.ready |= {0, 1}
    return made


def home(made: Router, ids: range) -> tuple[int, tuple[str, ...]]:
    homes = made.choose(MODEL.partitions, asked(ids))
    return homes.by_node["lm"], homes.reasons


def test_a_prompt_goes_where_its_beginning_was_read() -> None:
    made = router()
    made.load.update({0: 1})
    first, _ = home(made, range(800))
    made.load.update({1: 2})  # rank 0 is now the less loaded one
    second, reasons = home(made, range(840))
    assert (first, second) == (1, 1)
    assert reasons == ("rank 1: has read 800 of 832 ids of the prompt, 2 open, at least 1 elsewhere",)
    assert home(made, range(5000, 5620))[0] == 0, "another prompt goes by load"


def test_a_replica_with_too_many_requests_is_not_preferred() -> None:
    made, long = router(), range(4 * IDS_PER_REQUEST)
    assert home(made, long)[0] == 0
    made.load.update({0: SPARE})
    assert home(made, long)[0] == 0
    made.load.update({0: 1})
    rank, (reason,) = home(made, long)
    assert rank == 1
    assert reason == "rank 1: least loaded (0 open); rank 0 has read 2048 ids, but 3 are open there"


def test_a_short_prefix_never_beats_an_idle_replica() -> None:
    made = router()
    places = []
    for _ in range(4):
        rank, _ = home(made, range(64))
        made.load.update({rank: 1})
        places.append(rank)
    assert places == [0, 1, 0, 1]
    made.load.clear()
    made.load.update({0: 1, 1: 1})
    made.prefixes.forget(0)
    assert home(made, range(64))[0] == 1, "among equally loaded replicas it decides"


def test_a_picture_counts_with_the_positions_that_it_takes() -> None:
    seen = SegmentRef(kind="image", length=2 * IDS_PER_REQUEST, inputs={}, content=bytes(16))
    asks = NewRequest(handle=1, request_id="r", params={}, outputs=[], segments=[seen])
    made = router()
    assert made.choose(MODEL.partitions, asks).by_node["lm"] == 0
    made.load.update({0: 1})
    assert made.choose(MODEL.partitions, asks).by_node["lm"] == 0


def test_without_prefix_caches_the_load_decides() -> None:
    made = router(has_prefix_caches=False)
    assert home(made, range(64))[0] == 0
    made.load.update({0: 1})
    assert home(made, range(64)) == (1, ("rank 1: least loaded (0 open)",))


def test_one_replica_gives_no_reason() -> None:
    made = Router(MODEL, placed((0,), codec=0))
    made.ready.add(0)
    assert home(made, range(64)) == (0, ())


def test_the_leader_of_a_ready_group_gets_requests_without_its_followers_being_announced() -> None:
    plan = placed((0,), codec=2)
    whole = tuple(
        msgspec.structs.replace(each, replicas=((0, 1),)) if each.node == "lm" else each for each in plan.placements
    )
    made = Router(MODEL, msgspec.structs.replace(plan, placements=whole))
    made.ready |= {0, 2}  # followers send no readiness: their leader waits for them
    assert home(made, range(64))[0] == 0


def test_a_group_that_a_new_plan_adds_serves_once_its_leader_is_ready_and_one_that_it_removes_no_more() -> None:
    grown, shrunk = placed((0, 1), (2, 3), codec=4), placed((2, 3), codec=4)
    made = Router(MODEL, placed((0, 1), codec=4))
    made.ready |= {0, 4}
    assert home(made, range(64))[0] == 0
    made.replan(grown)
    made.load.update({0: 1})
    assert home(made, range(64))[0] == 0, "the leader of the new group is not ready"
    made.ready |= {2}
    assert home(made, range(64))[0] == 2
    made.load.update({2: 5})
    made.replan(shrunk)
    assert home(made, range(64))[0] == 2


def test_nodes_beside_the_leaders_of_groups_share_the_chosen_group() -> None:
    plan = placed((0,), (1,), codec=0)
    each = {"lm": ((0, 2), (1, 3)), "codec": ((0,), (1,))}
    placements = tuple(
        msgspec.structs.replace(place, replicas=each.get(place.node, place.replicas)) for place in plan.placements
    )
    made = Router(MODEL, msgspec.structs.replace(plan, placements=placements))
    made.ready |= {0, 1}
    home(made, range(2 * IDS_PER_REQUEST))
    made.load.update({0: 1})
    homes = made.choose(MODEL.partitions, asked(range(2 * IDS_PER_REQUEST)))
    assert {homes.by_node[node] for node in each if node in homes.by_node} == {0}
    assert len(homes.reasons) == 1


def over_hosts(lm: str, codec: str) -> Router:
    """Return a router of a model with replicas of both nodes; a letter is the host of a rank, - the supervisor's."""
    ranks = tuple(
        RankPlan(rank=rank, device="cpu", nodes=(), host=host.replace("-", "")) for rank, host in enumerate(lm + codec)
    )
    replicas = {
        "lm": tuple((rank,) for rank in range(len(lm))),
        "codec": tuple((rank,) for rank in range(len(lm), len(ranks))),
    }
    placements = tuple(NodePlacement(node=node, replicas=each) for node, each in replicas.items())
    made = Router(MODEL, Plan(ranks=ranks, placements=placements))
    made.ready |= {rank.rank for rank in ranks}
    return made


def hops(made: Router) -> tuple[int, int]:
    homes = made.choose(MODEL.partitions, asked(range(8)))
    return homes.by_node["lm"], homes.by_node["codec"]


def test_equally_loaded_replicas_keep_the_nodes_of_a_request_on_one_host() -> None:
    assert hops(over_hosts("ab", "ba")) == (0, 3)
    assert hops(over_hosts("-b", "b-")) == (0, 3)
    assert hops(over_hosts("ab", "b")) == (1, 2), "the only codec decides"
    made = over_hosts("ab", "ba")
    made.load.update({0: 1})
    assert hops(made) == (1, 2), "the less loaded replica of one node decides where the other one is"


def test_the_load_counts_more_than_the_host() -> None:
    made = over_hosts("ab", "b")
    made.load.update({1: 1})
    assert hops(made) == (0, 2)


def test_a_choice_by_host_is_named_in_the_reason() -> None:
    homes = over_hosts("ab", "b").choose(MODEL.partitions, asked(range(8)))
    assert homes.reasons == ("rank 1: least loaded (0 open), on host b like most of its nodes",)
    homes = over_hosts("b-", "-").choose(MODEL.partitions, asked(range(8)))
    assert homes.reasons == ("rank 1: least loaded (0 open), on the host of the supervisor like most of its nodes",)
    made = over_hosts("ab", "b")
    made.load.update({0: 1})
    assert made.choose(MODEL.partitions, asked(range(8))).reasons == ("rank 1: least loaded (0 open)",)


def test_a_rank_that_ended_is_forgotten() -> None:
    made = router()
    home(made, range(64))
    made.prefixes.forget(0)
    made.load.update({0: 1})
    assert home(made, range(64))[0] == 1


def test_equal_beginnings_have_equal_keys_block_by_block() -> None:
    whole, other = prefix_blocks(asked(range(4 * BLOCK_IDS))), prefix_blocks(asked(range(3 * BLOCK_IDS + 5)))
    assert (len(whole), len(other)) == (4, 3) and whole[:3] == other
    assert not set(prefix_blocks(asked(range(1, 4 * BLOCK_IDS)))) & set(whole)
    assert prefix_blocks(asked(range(BLOCK_IDS - 1))) == []


def test_requests_of_another_salt_share_no_key() -> None:
    plain = asked(range(2 * BLOCK_IDS))
    first, second = (msgspec.structs.replace(plain, salt=salt) for salt in (b"a" * 16, b"b" * 16))
    assert prefix_blocks(first) == prefix_blocks(msgspec.structs.replace(first, handle=2))
    assert not set(prefix_blocks(first)) & {*prefix_blocks(second), *prefix_blocks(plain)}


def test_segments_count_in_order_with_their_media() -> None:
    tokens = inline(np.arange(2 * BLOCK_IDS))
    text = SegmentRef(kind="text", length=64, inputs={"tokens": tokens})
    seen = [SegmentRef(kind="image", length=9, inputs={}, content=bytes([n]) * 16) for n in (1, 2)]
    unknown = SegmentRef(kind="image", length=9, inputs={"pixels": inline(np.zeros((2, 2)))})

    def keys(*segments: SegmentRef) -> list[Block]:
        return prefix_blocks(NewRequest(handle=1, request_id="r", params={}, outputs=[], segments=list(segments)))

    assert len(keys(text, seen[0], text)) == 5
    assert keys(text, seen[0], text)[:3] == keys(text, seen[0]) and keys(text, seen[0])[2] != keys(text, seen[1])[2]
    assert keys(text, unknown, text) == keys(text)


def test_what_is_remembered_is_bounded() -> None:
    known = Prefixes()
    blocks = [Block(number.to_bytes(4, "little"), 1) for number in range(MOST_KNOWN + 10)]
    known.read(0, blocks)
    assert known.match(0, blocks) == 0 and known.match(0, blocks[10:]) == MOST_KNOWN


def of_session(made: Router, session: str) -> tuple[int, tuple[str, ...]]:
    homes = made.choose(MODEL.partitions, msgspec.structs.replace(asked(range(40)), session=session))
    return homes.by_node["lm"], homes.reasons


def test_a_session_returns_to_its_replica_however_loaded_while_that_is_ready() -> None:
    made = router()
    made.load.update({0: 1})
    assert of_session(made, "a")[0] == 1
    made.load.update({1: 9})
    assert of_session(made, "a") == (1, ("rank 1: serves the session of the request (9 open)",))
    assert of_session(made, "b")[0] == of_session(made, "")[0] == 0
    made.cordoned = frozenset({1})
    assert of_session(made, "a")[0] == 0, "it moves, and stays where it went"
    made.cordoned = frozenset()
    made.load.update({0: 50})
    assert of_session(made, "a")[0] == 0
    made.sessions.forget("a")
    assert of_session(made, "a")[0] == 1


def test_a_replica_that_was_restarted_has_no_sessions() -> None:
    made = router()
    assert of_session(made, "a")[0] == 0
    made.sessions.left(0)
    made.load.update({0: 1})
    assert of_session(made, "a")[0] == 1


def test_the_sessions_that_are_remembered_are_bounded() -> None:
    made = SessionRanks()
    for number in range(MOST_SESSIONS + 5):
        made.served(str(number), {("decode", "lm"): number % 2})
        made.served("kept", {("decode", "lm"): 1})
    assert made.of("4") == made.of("") == {}
    assert made.of("kept") == {("decode", "lm"): 1} and made.of(str(MOST_SESSIONS)) == {("decode", "lm"): 0}
