"""Programs that mark their last Run: the worker reports the end to the api, which saves messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from mstar_core.conductor.conductor import Conductor
from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from mstar_core.errors import GraphError
from mstar_core.graph import CLIENT, KV_CACHE, GraphEdge, GraphNode, KVSpec, Loop, NodeSpec, Sampling, StopOn
from mstar_core.messages.life import PeerReady
from mstar_core.messages.requests import NewRequest, RequestFailed, RequestFinished
from mstar_core.messages.tensors import InlineTensor
from mstar_core.messages.work import CloseRequest, OpenRequest, RunWalks, WalkDone
from mstar_core.plugin import Action, ModelSpec, Partition, ProgramRequest, Run, Sample, Text, param
from mstar_core.plugin.check.dry_run import dry_run
from mstar_core.plugin.program import ProgramGenerator
from tests.fakes.courier import FakeCourier

LM = NodeSpec(
    name="lm",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=2),
    sampling=Sampling(port="token"),
)
HEAD = NodeSpec(name="head", engine=KV_CACHE, ports=LM.ports, kv=LM.kv, sampling=LM.sampling)
OUT = GraphEdge("token", CLIENT, modality="action")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    way: str = param("list", "which program", choices=("list", "one", "stops", "more", "early", "nothing"))


def act(request: ProgramRequest) -> ProgramGenerator:
    tokens = request.inputs["tokens"]
    match request.params.way:
        case "one":
            yield Run("read", tokens=tokens)
            yield Run("flow", tokens=tokens, max_iters=3, finishes=True)
        case "stops":
            yield Run("talk", tokens=tokens, max_iters=3, finishes=True)
        case "early":
            yield [Run("read", tokens=tokens, finishes=True), Run("flow", tokens=tokens, max_iters=3)]
        case "nothing":
            return
        case way:
            flow = Run("flow", tokens=tokens, max_iters=3, finishes=True)
            yield [Run("read", tokens=tokens), flow]
            if way == "more":
                yield Run("read", tokens=tokens)


MODEL = ModelSpec(
    name="toy",
    title="Toy",
    plugin="toy",
    inputs=(Text(),),
    outputs=(Action(horizon=1, dim=1),),
    params=Params,
    nodes=(LM, HEAD),
    partitions=(
        Partition(
            name="main",
            program=act,
            walks={
                "read": GraphNode(LM, ("tokens",), (GraphEdge("token", CLIENT, modality="action"),)),
                "flow": Loop("steps", GraphNode(HEAD, ("tokens",)), carry={"token": "tokens"}, outputs=(OUT,)),
                "talk": Loop(
                    "words",
                    GraphNode(LM, ("tokens",)),
                    carry={"token": "tokens"},
                    outputs=(OUT,),
                    stop=StopOn("token", (9,)),
                ),
            },
        ),
    ),
)


def placed(post: FakeCourier, head: int = 0) -> Conductor:
    plan = Plan(
        ranks=tuple(RankPlan(rank=rank, device="cpu", nodes=()) for rank in (0, 1)),
        placements=(
            NodePlacement(node="lm", replicas=((0,),)),
            NodePlacement(node="head", replicas=((head,),)),
        ),
    )
    made = Conductor(MODEL, plan, post, max_seq_len=64, clock=lambda: 1.0)
    for rank in (0, 1):
        made.on(PeerReady(name=f"worker-{rank}", incarnation=1))
    return made


def request(way: str = "list") -> NewRequest:
    tokens = InlineTensor(dtype="int64", shape=(1,), data=b"\0" * 8)
    return NewRequest(handle=1, request_id="r1", params={"way": way}, outputs=["action"], inputs={"tokens": tokens})


def walks(sent: list[tuple[str, Any]]) -> list[tuple[str, bool]]:
    runs = [run for _, message in sent if isinstance(message, RunWalks) for run in message.runs]
    return [(run.walk, run.finishes) for run in runs]


def of(sent: list[tuple[str, Any]], kind: type[Any]) -> list[Any]:
    return [message for _, message in sent if isinstance(message, kind)]


def test_one_rank_hears_of_a_request_once_and_tells_the_client_itself() -> None:
    post = FakeCourier()
    conductor = placed(post)
    conductor.on(request())
    [(name, message)] = post.take()
    assert name == "worker-0" and isinstance(message, RunWalks)
    assert message.opens is not None and message.opens.handle == 1 and message.opens.homes == {"lm": 0, "head": 0}
    assert [(run.walk, run.finishes) for run in message.runs] == [("read", False), ("flow", True)]
    conductor.on(WalkDone(handle=1, run=1, rank=0))
    assert not post.take()
    conductor.on(WalkDone(handle=1, run=2, rank=0, counts={"steps": 3}, emitted=1, is_told=True))
    assert post.take() == [("worker-0", CloseRequest(handle=1))]
    assert not conductor.requests and conductor.finished == 1


def test_only_the_first_walks_open_the_request() -> None:
    post = FakeCourier()
    conductor = placed(post)
    conductor.on(request("one"))
    [first] = of(post.take(), RunWalks)
    conductor.on(WalkDone(handle=1, run=1, rank=0))
    [second] = of(post.take(), RunWalks)
    assert (first.opens is not None, second.opens) == (True, None)
    assert ([run.finishes for run in first.runs], [run.finishes for run in second.runs]) == ([False], [True])


def test_a_worker_that_did_not_tell_leaves_it_to_the_conductor() -> None:
    post = FakeCourier()
    conductor = placed(post)
    conductor.on(request())
    conductor.on(WalkDone(handle=1, run=1, rank=0))
    post.take()
    conductor.on(WalkDone(handle=1, run=2, rank=0, counts={"steps": 3}, emitted=1))
    [finished] = of(post.take(), RequestFinished)
    assert (finished.emitted, finished.counts) == ({"worker-0": 1}, {"steps": 3})


def test_ranks_that_share_a_request_leave_its_end_to_the_conductor() -> None:
    post = FakeCourier()
    placed(post, head=1).on(request())
    sent = post.take()
    assert [name for name, message in sent if isinstance(message, OpenRequest)] == ["worker-0", "worker-1"]
    assert walks(sent) == [("read", False), ("flow", False)]
    assert all(message.opens is None for message in of(sent, RunWalks))


def test_a_loop_that_may_be_cut_leaves_the_reason_to_the_conductor() -> None:
    post = FakeCourier()
    conductor = placed(post)
    conductor.on(request("stops"))
    assert walks(post.take()) == [("talk", False)]
    conductor.on(WalkDone(handle=1, run=1, rank=0, reason="length", emitted=1))
    assert [finished.reason for finished in of(post.take(), RequestFinished)] == ["length"]


def test_a_request_that_takes_no_walk_ends_without_a_word_to_its_rank() -> None:
    post = FakeCourier()
    conductor = placed(post)
    conductor.on(request("nothing"))
    sent = post.take()
    assert [type(message) for _, message in sent] == [RequestFinished, CloseRequest] and not conductor.requests


def test_a_program_that_goes_on_after_its_end_fails_its_request() -> None:
    post = FakeCourier()
    conductor = placed(post)
    conductor.on(request("more"))
    conductor.on(WalkDone(handle=1, run=1, rank=0))
    post.take()
    conductor.on(WalkDone(handle=1, run=2, rank=0, is_told=True))
    sent = post.take()
    assert len(of(sent, RequestFailed)) == 1 and not walks(sent) and not conductor.requests


@pytest.mark.parametrize(("way", "is_right"), [("list", True), ("one", True), ("more", False), ("early", False)])
def test_a_program_that_goes_on_after_its_end_is_refused_at_load(way: str, is_right: bool) -> None:
    sample = Sample(name=way, inputs={"tokens": (1,)}, outputs=frozenset({"action"}), params={"way": way})
    if is_right:
        assert dry_run(MODEL, sample)["main"] == ["read", "flow"]
        return
    with pytest.raises(GraphError, match="finishes"):
        dry_run(MODEL, sample)
