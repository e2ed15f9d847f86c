"""The conductor from outside: messages in, messages out, with a small two-partition model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from mstar_core.conductor.conductor import Conductor
from mstar_core.conductor.router import Router
from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from mstar_core.conformance.clock import FakeClock
from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    FixedChunk,
    GraphEdge,
    GraphNode,
    KVSpec,
    Loop,
    NodeSpec,
    Sampling,
    StopOn,
    Stream,
    StreamingGraphEdge,
)
from mstar_core.messages.life import Cordon, Cordoned, PeerDown, PeerReady
from mstar_core.messages.requests import (
    CancelRequest,
    EndSession,
    ErrorInfo,
    NewRequest,
    Reconcile,
    RequestFailed,
    RequestFinished,
    Resume,
)
from mstar_core.messages.tensors import InlineTensor
from mstar_core.messages.wire import WireCodec
from mstar_core.messages.work import CloseRequest, EndStream, OpenRequest, RunWalks, WalkDone, WorkFailed
from mstar_core.plugin import Audio, ModelSpec, Partition, ProgramRequest, Run, Text, param
from mstar_core.plugin.program import ProgramGenerator
from mstar_core.transport.courier import MESSAGE_BYTES
from tests.fakes.courier import FakeCourier

LM = NodeSpec(
    name="lm",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=2),
    sampling=Sampling(port="token"),
)
CODEC = NodeSpec(name="codec", engine=STATELESS, ports={"ids": "i64[n]", "pcm": "i16[n]"})
IDS = Stream("ids", into=(CODEC, "ids"), chunk=FixedChunk(4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    max_output_tokens: int = param(8, "ids", ge=1)
    fail_after: int = param(0, "walks after which the program raises, 0 is never", ge=0)


def talk(request: ProgramRequest) -> ProgramGenerator:
    yield Run("prefill", tokens=request.inputs["text_tokens"])
    if request.params.fail_after == 1:
        raise ValueError("a bug in the program")
    yield Run("decode", max_iters=request.params.max_output_tokens)


def sing(request: ProgramRequest) -> ProgramGenerator:
    yield Run("chunks")


MODEL = ModelSpec(
    name="toy",
    title="Toy",
    plugin="toy",
    inputs=(Text(),),
    outputs=(Audio(),),
    params=Params,
    nodes=(LM, CODEC),
    streams=(IDS,),
    partitions=(
        Partition(
            name="talk",
            program=talk,
            walks={
                "prefill": GraphNode(LM, ("tokens",), (StreamingGraphEdge("token", IDS),)),
                "decode": Loop(
                    "loop",
                    GraphNode(LM, ("token",), (StreamingGraphEdge("token", IDS),)),
                    carry={"token": "token"},
                    stop=StopOn("token", (9,)),
                ),
            },
        ),
        Partition(
            name="sing",
            program=sing,
            walks={
                "chunks": Loop(
                    "each", GraphNode(CODEC, ("ids",), (GraphEdge("pcm", CLIENT, modality="audio"),)), over=IDS
                )
            },
        ),
    ),
)


def placed(*replicas_of_lm: tuple[int, ...], codec: int = 0) -> Plan:
    ranks = sorted({rank for replica in replicas_of_lm for rank in replica} | {codec})
    return Plan(
        ranks=tuple(RankPlan(rank=r, device="cpu", nodes=()) for r in ranks),
        placements=(
            NodePlacement(node="lm", replicas=replicas_of_lm),
            NodePlacement(node="codec", replicas=((codec,),)),
        ),
    )


def request(handle: int = 1, **params: Any) -> NewRequest:
    tokens = InlineTensor(dtype="int64", shape=(3,), data=b"\0" * 24)
    return NewRequest(
        handle=handle,
        request_id=f"r{handle}",
        params=params,
        outputs=["audio"],
        inputs={"text_tokens": tokens},
        prompt_tokens=3,
        deadline_s=10.0,
    )


@pytest.fixture
def post() -> FakeCourier:
    return FakeCourier()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def conductor(post: FakeCourier, clock: FakeClock) -> Conductor:
    made = Conductor(MODEL, placed((0,), codec=1), post, max_seq_len=64, clock=clock)
    for rank in (0, 1):
        made.on(PeerReady(name=f"worker-{rank}", incarnation=1))
    return made


def kinds(sent: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    return [(name, type(message).__name__) for name, message in sent]


def test_a_request_opens_on_its_ranks_before_any_walk(conductor: Conductor, post: FakeCourier) -> None:
    conductor.on(request())
    sent = post.take()
    assert kinds(sent) == [
        ("worker-0", "OpenRequest"),
        ("worker-1", "OpenRequest"),
        ("worker-0", "RunWalks"),
        ("worker-1", "RunWalks"),
    ]
    opened = sent[0][1]
    assert isinstance(opened, OpenRequest) and opened.max_tokens == 3 + 8
    assert sent[2][1].runs[0].walk == "prefill" and sent[3][1].runs[0].walk == "chunks"


def test_walks_follow_each_other_and_the_stream_ends_with_its_total(conductor: Conductor, post: FakeCourier) -> None:
    conductor.on(request())
    post.take()
    conductor.on(WalkDone(handle=1, run=1, rank=0, streamed={"ids": 1}))
    [(rank, message)] = post.take()
    assert rank == "worker-0" and isinstance(message, RunWalks)
    assert (message.runs[0].walk, message.runs[0].max_iters) == ("decode", 8)
    conductor.on(
        WalkDone(handle=1, run=message.runs[0].run, rank=0, reason="length", counts={"loop": 8}, streamed={"ids": 9})
    )
    assert post.take() == [("worker-1", EndStream(handle=1, stream="ids", total=9))]
    conductor.on(WalkDone(handle=1, run=2, rank=1, emitted=3))
    sent = post.take()
    finished = sent[0][1]
    assert isinstance(finished, RequestFinished), "a client waits for it: it goes before all else"
    assert (finished.reason, finished.emitted, finished.counts) == ("length", {"worker-1": 3}, {"loop": 8})
    assert kinds(sent)[1:] == [("worker-0", "CloseRequest"), ("worker-1", "CloseRequest")]
    assert not conductor.requests and not +conductor.router.load


def test_a_stop_id_ends_with_reason_stop(conductor: Conductor, post: FakeCourier) -> None:
    conductor.on(request())
    conductor.on(WalkDone(handle=1, run=1, rank=0))
    conductor.on(WalkDone(handle=1, run=3, rank=0, reason="stop"))
    conductor.on(WalkDone(handle=1, run=2, rank=1))
    assert [m.reason for _, m in post.take() if isinstance(m, RequestFinished)] == ["stop"]


def test_a_program_that_raises_fails_its_request_alone(conductor: Conductor, post: FakeCourier) -> None:
    conductor.on(request(1, fail_after=1))
    conductor.on(request(2))
    post.take()
    conductor.on(WalkDone(handle=1, run=1, rank=0))
    failed = [m for _, m in post.take() if isinstance(m, RequestFailed)]
    assert [(f.handle, f.error.status, f.error.code) for f in failed] == [(1, 500, "engine_error")]
    assert list(conductor.requests) == [2]


def test_a_worker_failure_reaches_the_api_once_and_frees_all_ranks(conductor: Conductor, post: FakeCourier) -> None:
    conductor.on(request())
    post.take()
    failure = WorkFailed(handle=1, rank=0, error=ErrorInfo(message="no pages", code="out_of_memory", status=500))
    conductor.on(failure)
    conductor.on(failure)
    sent = post.take()
    assert kinds(sent) == [("worker-0", "CloseRequest"), ("worker-1", "CloseRequest"), ("api", "RequestFailed")]


def test_a_dead_worker_fails_its_requests_in_one_log_line_and_refuses_new_ones(
    conductor: Conductor, post: FakeCourier, caplog: pytest.LogCaptureFixture
) -> None:
    conductor.on(request(1))
    post.take()
    conductor.on(request(2))
    post.take()
    conductor.on(PeerDown(name="worker-0", incarnation=1, cause="killed by SIGKILL", public="a worker died"))
    failed, _ = [m for _, m in post.take() if isinstance(m, RequestFailed)]
    assert failed.error == ErrorInfo(message="a worker died", code="worker_lost", status=503)
    assert failed.lost == "worker-0"
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "killed by SIGKILL" in line.getMessage() and len(line.facts["requests"]) == 2  # type: ignore[attr-defined]
    conductor.on(request(2))
    assert post.take()[-1][1].error.code == "worker_lost"
    conductor.on(PeerReady(name="worker-0", incarnation=2))
    conductor.on(request(3))
    assert list(conductor.requests) == [3]


@pytest.mark.parametrize("kind", [OpenRequest, RunWalks, EndStream])
def test_a_worker_that_does_not_read_fails_the_requests_that_need_it(
    kind: type, conductor: Conductor, post: FakeCourier, caplog: pytest.LogCaptureFixture
) -> None:
    conductor.on(request(1))
    post.take()
    post.stalls = lambda name, message: isinstance(message, kind)
    conductor.on(request(2))
    for run in (1, 3):  # of the partition whose end ends the stream
        conductor.on(WalkDone(handle=1, run=run, rank=0))
    failed = post.of(RequestFailed)
    assert [message.handle for message in failed] == ([1] if kind is EndStream else [2, 1] if kind is RunWalks else [2])
    assert {(message.error.code, message.error.status) for message in failed} == {("peer_stalled", 503)}
    for message in failed:
        closed = [name for name, sent in post.sent if sent == CloseRequest(handle=message.handle)]
        assert closed == ["worker-0", "worker-1"]
    assert not any(record.exc_info for record in caplog.records), "no fault of this process"


def test_an_end_on_purpose_is_reported_as_such(conductor: Conductor, post: FakeCourier) -> None:
    conductor.on(request(1))
    conductor.on(Cordon(number=1, ranks=[0], evict=[0]))
    conductor.on(request(2))
    conductor.on(PeerDown(name="worker-0", incarnation=1, cause="renewed", public="restarting", is_excused=True))
    failed = [m for _, m in post.take() if isinstance(m, RequestFailed)]
    assert [(m.handle, m.lost, m.is_excused) for m in failed] == [(1, "worker-0", True), (2, "worker-0", True)]


def test_a_resumed_request_waits_for_a_ready_replica_within_its_deadline(
    conductor: Conductor, post: FakeCourier, clock: FakeClock
) -> None:
    conductor.on(PeerDown(name="worker-0", incarnation=1, cause="killed by SIGKILL", public="a worker died"))
    for handle, deadline_s in ((1, 60.0), (2, 60.0), (3, 1.0)):
        again = msgspec.structs.replace(request(handle), resume=Resume(attempt=2), deadline_s=deadline_s)
        conductor.on(again)
    conductor.on(CancelRequest(handle=2))
    clock.now += 2.0
    conductor.expire()
    failed = {m.handle: m.error.code for _, m in post.take() if isinstance(m, RequestFailed)}
    assert failed == {2: "cancelled", 3: "timeout"}
    conductor.on(PeerReady(name="worker-0", incarnation=2))
    assert list(conductor.requests) == [1] and not len(conductor.waiting)
    assert conductor.requests[1].message.deadline_s == pytest.approx(58.0)
    conductor.on(CancelRequest(handle=1))


def test_an_error_of_a_tensor_is_the_death_of_its_owner_if_one_follows(
    conductor: Conductor, post: FakeCourier, clock: FakeClock
) -> None:
    conductor.on(request(1))
    conductor.on(request(2))
    post.take()
    error = ErrorInfo(message="the owner of a tensor is gone", code="transport", status=500)
    conductor.on(WorkFailed(handle=1, rank=1, error=error))
    conductor.expire()
    assert not [m for _, m in post.take() if isinstance(m, RequestFailed)]
    conductor.on(PeerDown(name="worker-0", incarnation=1, cause="killed by SIGKILL", public="a worker died"))
    assert {m.lost for _, m in post.take() if isinstance(m, RequestFailed)} == {"worker-0"}
    conductor.on(PeerReady(name="worker-0", incarnation=2))
    conductor.on(request(3))
    conductor.on(WorkFailed(handle=3, rank=1, error=error))
    clock.now += 1.0
    conductor.expire()
    assert [(m.error.code, m.lost) for _, m in post.take() if isinstance(m, RequestFailed)] == [("transport", "")]


def test_the_loss_of_a_host_may_follow_an_error_of_a_tensor_later(post: FakeCourier, clock: FakeClock) -> None:
    plan = placed((0,), codec=0)
    ranks = tuple(msgspec.structs.replace(rank, host="far") for rank in plan.ranks)
    conductor = Conductor(MODEL, msgspec.structs.replace(plan, ranks=ranks), post, max_seq_len=64, clock=clock)
    conductor.on(PeerReady(name="worker-0", incarnation=1))
    error = ErrorInfo(message="a tensor of another host does not arrive", code="transport", status=500)
    for handle in (1, 2):
        conductor.on(request(handle))
        conductor.on(WorkFailed(handle=handle, rank=0, error=error))
        clock.now += 2.0
        conductor.expire()
        assert not [m for _, m in post.take() if isinstance(m, RequestFailed)]
        if handle == 1:
            conductor.on(PeerDown(name="worker-0", incarnation=1, cause="its host is lost", public="a worker died"))
            assert [m.lost for _, m in post.take() if isinstance(m, RequestFailed)] == ["worker-0"]
            conductor.on(PeerReady(name="worker-0", incarnation=2))
    clock.now += 2.0
    conductor.expire()
    assert [(m.error.code, m.lost) for _, m in post.take() if isinstance(m, RequestFailed)] == [("transport", "")]


def test_a_lost_api_cancels_everything(conductor: Conductor, post: FakeCourier) -> None:
    for handle in (1, 2):
        conductor.on(request(handle))
    post.take()
    conductor.on(PeerDown(name="api", incarnation=1, cause="killed"))
    assert not conductor.requests
    assert {type(m) for _, m in post.take()} == {CloseRequest}


@pytest.mark.parametrize("after", range(4))
def test_cancel_at_any_point_leaves_nothing(conductor: Conductor, post: FakeCourier, after: int) -> None:
    steps = [
        request(),
        WalkDone(handle=1, run=1, rank=0),
        WalkDone(handle=1, run=3, rank=0),
        WalkDone(handle=1, run=2, rank=1),
    ]
    for message in steps[:after]:
        conductor.on(message)
    conductor.on(CancelRequest(handle=1))
    for message in steps[max(after, 1) :]:
        conductor.on(message)
    outcomes = [m for name, m in post.take() if name == "api"]
    assert not conductor.requests and len(outcomes) == (1 if after else 0)


@pytest.mark.parametrize("broken", ["progress", "router", "send", "program"])
def test_a_step_of_a_cancel_that_fails_costs_no_other_request_and_no_other_step(
    broken: str, conductor: Conductor, post: FakeCourier, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    def stubborn() -> Iterator[None]:
        try:
            yield
        finally:
            fail()

    for handle in (1, 2):
        conductor.on(request(handle))
    post.take()
    with pytest.MonkeyPatch.context() as faults:
        match broken:
            case "progress":
                faults.setattr(conductor.progress, "ended", fail)
            case "router":
                faults.setattr(Router, "closed", fail)
            case "send":
                faults.setattr(
                    post,
                    "send",
                    lambda name, message: fail() if name == "worker-0" else post.sent.append((name, message)),
                )
            case "program":
                for run in conductor.requests[1].partitions.values():  # type: ignore[index]  # a plain number
                    generator = stubborn()
                    next(generator)
                    run.generator = generator  # type: ignore[assignment]  # it is only closed
        conductor.on(CancelRequest(handle=1))
    assert list(conductor.requests) == [2] and "broken on purpose" in caplog.text
    closed = {name for name, message in post.take() if isinstance(message, CloseRequest)}
    assert closed == ({"worker-1"} if broken == "send" else {"worker-0", "worker-1"})
    conductor.on(CancelRequest(handle=2))
    assert not conductor.requests


def test_a_deadline_fails_what_the_api_forgot(conductor: Conductor, post: FakeCourier, clock: FakeClock) -> None:
    conductor.on(request())
    clock.now += 12
    conductor.expire()
    assert post.take()[-1][1].error.code == "timeout"


def test_replicas_are_chosen_by_load(post: FakeCourier, clock: FakeClock) -> None:
    conductor = Conductor(MODEL, placed((0,), (1,), codec=2), post, max_seq_len=64, clock=clock)
    for rank in (0, 1, 2):
        conductor.on(PeerReady(name=f"worker-{rank}", incarnation=1))
    for handle in range(4):
        conductor.on(request(handle))
    assert [r.homes.by_node["lm"] for r in conductor.requests.values()] == [0, 1, 0, 1]


def test_a_cordoned_replica_is_chosen_only_if_no_other_is_ready(post: FakeCourier, clock: FakeClock) -> None:
    made = Conductor(MODEL, placed((0,), (1,), codec=0), post, max_seq_len=512, clock=clock)
    for rank in (0, 1):
        made.on(PeerReady(name=f"worker-{rank}", incarnation=1))
    made.on(request(1))
    made.on(request(2))
    assert made.router.load == {0: 2, 1: 1}, "the codec is on rank 0"
    post.take()
    made.on(Cordon(number=5, ranks=[1]))
    assert post.take() == [("supervisor", Cordoned(number=5, ranks=[]))]
    made.on(request(3))
    assert made.requests[3].homes.by_node["lm"] == 0, "although it is busier"
    post.take()
    lm = next(handle for handle, each in made.requests.items() if each.homes.by_node["lm"] == 1)
    made.on(CancelRequest(handle=lm))
    assert [m for to, m in post.take() if to == "supervisor"] == [Cordoned(number=5, ranks=[1])]
    made.on(Cordon(number=6, ranks=[0, 1]))
    made.on(request(4))
    assert 4 in made.requests, "a request that was on its way when the last replica was cordoned"
    made.on(Cordon(number=7))
    assert [m for to, m in post.take() if to == "supervisor"][-1] == Cordoned(number=7, ranks=[])


def test_a_resumed_request_waits_rather_than_return_to_a_cordoned_replica(
    conductor: Conductor, post: FakeCourier
) -> None:
    conductor.on(Cordon(number=1, ranks=[0]))
    conductor.on(msgspec.structs.replace(request(1), resume=Resume(attempt=2)))
    assert not conductor.requests and 1 in conductor.waiting
    conductor.on(Cordon(number=2))
    assert list(conductor.requests) == [1]


def test_a_walk_goes_to_the_rank_that_holds_its_node_for_it(post: FakeCourier, clock: FakeClock) -> None:
    """`graph_walks` of a group places its nodes elsewhere in that walk only."""
    plan = placed((0,), codec=0)
    scoped = (
        NodePlacement(node="lm", replicas=((0,),), walks=("prefill",)),
        NodePlacement(node="lm", replicas=((1,),), walks=("decode",)),
    )
    ranks = (*plan.ranks, RankPlan(rank=1, device="cpu", nodes=()))
    conductor = Conductor(
        MODEL, Plan(ranks=ranks, placements=(*scoped, plan.placements[1])), post, max_seq_len=64, clock=clock
    )
    for rank in (0, 1):
        conductor.on(PeerReady(name=f"worker-{rank}", incarnation=1))
    conductor.on(request())
    (homes,) = (found.homes for found in conductor.requests.values())
    assert (homes.by_node["lm"], homes.by_walk) == (0, {"decode": {"lm": 1}})
    assert homes.ranks == {0, 1}


def test_each_worker_gets_the_requests_that_are_live_on_it(conductor: Conductor, post: FakeCourier) -> None:
    conductor.reconcile()
    assert post.take() == [(f"worker-{rank}", Reconcile(live=[], newest=0)) for rank in (0, 1)]
    conductor.on(request(7))
    conductor.on(request(5))
    conductor.on(CancelRequest(handle=7))
    post.take()
    conductor.reconcile()
    assert post.take() == [(f"worker-{rank}", Reconcile(live=[5], newest=7)) for rank in (0, 1)]


def test_requests_that_the_api_does_not_know_any_more_end_on_all_ranks(conductor: Conductor, post: FakeCourier) -> None:
    for handle in (1, 2, 3):
        conductor.on(request(handle))
    post.take()
    for _ in range(2):
        assert not post.sent and conductor.leftovers.closed == 0
        conductor.on(Reconcile(live=[2], newest=2))
    assert list(conductor.requests) == [2, 3], "the third is newer than the message"
    assert post.take() == [(f"worker-{rank}", CloseRequest(handle=1)) for rank in (0, 1)]
    assert conductor.leftovers.closed == 1


def test_a_request_that_only_reads_draws_nothing_and_ends_with_its_prompt(
    conductor: Conductor, post: FakeCourier
) -> None:
    conductor.on(msgspec.structs.replace(request(), reads_only=True))
    runs = [(name, run) for name, sent in post.take() if isinstance(sent, RunWalks) for run in sent.runs]
    assert [(name, run.walk, run.sample) for name, run in runs] == [("worker-0", "prefill", False)]
    conductor.on(WalkDone(handle=1, run=runs[0][1].run, rank=0, cached_tokens=2))
    sent = post.take()
    assert ("api", RequestFinished(handle=1, reason="stop", cached_tokens=2)) in sent
    assert kinds(sent)[-2:] == [("worker-0", "CloseRequest"), ("worker-1", "CloseRequest")] and not conductor.requests


def test_a_session_reaches_the_ranks_with_its_requests_and_ends_on_all(conductor: Conductor, post: FakeCourier) -> None:
    conductor.on(msgspec.structs.replace(request(), session="talk", lease_s=60.0))
    assert [(sent.session, sent.lease_s) for sent in post.of(OpenRequest)] == [("talk", 60.0)] * 2
    assert set(conductor.router.sessions.of("talk").values()) == {0, 1}
    post.take()
    conductor.on(EndSession(session="talk"))
    assert post.take() == [(f"worker-{rank}", EndSession(session="talk")) for rank in (0, 1)]
    assert not conductor.router.sessions.of("talk")


def test_messages_for_unknown_requests_are_counted_and_dropped(conductor: Conductor, post: FakeCourier) -> None:
    conductor.on(WalkDone(handle=7, run=1, rank=0))
    conductor.on(CancelRequest(handle=7))
    assert conductor.unknown == 2 and not post.sent


@pytest.mark.parametrize(
    ("inputs", "more", "told"),
    [
        ({"tokenz": "text_tokens"}, {}, "gives input 'tokenz'; did you mean 'tokens'?"),
        ({}, {}, "lacks input 'tokens'; pass tokens=..."),
        ({"tokens": "text_tokens"}, {"keep": ("tokn",)}, "keeps port 'tokn'; did you mean 'token'?"),
        ({"tokens": "text_tokens"}, {"reads": ("tokn",)}, "reads port 'tokn'; did you mean 'token'?"),
    ],
)
def test_a_run_that_does_not_fit_its_walk_fails_its_request_alone(
    post: FakeCourier, clock: FakeClock, inputs: dict[str, str], more: dict[str, tuple[str, ...]], told: str
) -> None:
    """Without the check the walk finds no input, is skipped, and the request finishes without an answer."""

    def talks(request: ProgramRequest) -> ProgramGenerator:
        given = {port: request.inputs[name] for port, name in inputs.items()}
        wrong = Run("prefill", **given, **more)
        yield wrong if request.params.max_output_tokens == 1 else Run("prefill", tokens=request.inputs["text_tokens"])

    (talk_part, sing_part) = MODEL.partitions
    model = replace(MODEL, partitions=(replace(talk_part, program=talks), sing_part))
    conductor = Conductor(model, placed((0,), codec=0), post, max_seq_len=64, clock=clock)
    conductor.on(PeerReady(name="worker-0", incarnation=1))
    conductor.on(request(7))
    conductor.on(request(8, max_output_tokens=1))
    failed = [message for _, message in post.take() if isinstance(message, RequestFailed)]
    assert [(message.handle, told in message.error.message) for message in failed] == [(8, True)]
    assert list(conductor.requests) == [7]


def test_walks_with_large_tensors_go_in_messages_below_the_limit(post: FakeCourier, clock: FakeClock) -> None:
    """Each walk has a tensor of 4.7 MiB, and a program asks for several at once."""
    size = 100 * 48 * 1024
    tokens = InlineTensor(dtype="uint8", shape=(size,), data=bytes(size))

    def talks(request: ProgramRequest) -> ProgramGenerator:
        yield [Run("prefill", tokens=request.inputs["text_tokens"]) for _ in range(6)]

    (talk_part, sing_part) = MODEL.partitions
    model = replace(MODEL, partitions=(replace(talk_part, program=talks), sing_part))
    conductor = Conductor(model, placed((0,), codec=0), post, max_seq_len=64, clock=clock)
    conductor.on(PeerReady(name="worker-0", incarnation=1))
    conductor.on(msgspec.structs.replace(request(), inputs={"text_tokens": tokens}))
    walks = [message for _, message in post.take() if isinstance(message, RunWalks) and message.partition == "talk"]
    codec = WireCodec("conductor", 1)
    assert all(len(codec.encode(message)) <= MESSAGE_BYTES for message in walks)
    numbers = [run.run for message in walks for run in message.runs]
    assert numbers == sorted(numbers) and len(numbers) == 6 and len(walks) > 1
    assert [message.opens is not None for message in walks] == [True] + [False] * (len(walks) - 1)
