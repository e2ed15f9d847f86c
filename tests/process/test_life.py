"""Link of a child to its supervisor, logs and process settings, with a fake clock and courier."""

from __future__ import annotations

import gc
import io
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from mstar_core.conformance.clock import FakeClock
from mstar_core.errors import ExitCode, StartError
from mstar_core.messages.flow import Outputs
from mstar_core.messages.life import Beat, Hello, LinkBroken, PeerDown, PeerReady, PeerUp, Phase, Ping, Stop
from mstar_core.messages.requests import CancelRequest
from mstar_core.messages.wire import WIRE_VERSION, Envelope, Message
from mstar_core.process.failures import note_fatal
from mstar_core.process.life import PING_LIMIT_S, ChildLife
from mstar_core.process.logs import LINE_LIMIT_BYTES, JsonFormatter, request_scope
from mstar_core.process.system import end_imports, keep_start, set_exact_timers
from tests.fakes.courier import FakeCourier


@dataclass
class Deployed:
    run_dir: str
    on_host: str = ""

    @property
    def ipc_dir(self) -> Path:
        return Path(self.run_dir) / "ipc"


@pytest.fixture
def post() -> FakeCourier:
    return FakeCourier()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def life(tmp_path: Path, post: FakeCourier, clock: FakeClock) -> ChildLife:
    return ChildLife(
        "worker-0", 3, cast("Any", Deployed(str(tmp_path))), cast("Any", post), supervisor="ipc:///s", clock=clock
    )


def told(life: ChildLife, message: Message, sender: str = "supervisor", incarnation: int = 0) -> list[Message]:
    """Give the child a message. Returns what its owner has to handle."""
    envelope = Envelope(WIRE_VERSION, sender, incarnation, message)
    return list(life.receive(envelope)) if life.accepts(envelope) else []


def turn(life: ChildLife, clock: FakeClock, seconds: float, *, ping: bool = True, step: float = 0.1) -> None:
    for _ in range(round(seconds / step)):
        clock.now += step
        if ping:
            told(life, Ping(seq=0))
        life.beat(clock.now)


def up(life: ChildLife) -> None:
    told(life, PeerUp(name=life.name, incarnation=life.incarnation, endpoint=life.endpoint))


def test_hello_is_repeated_until_the_supervisor_answers_then_beats(
    life: ChildLife, post: FakeCourier, clock: FakeClock
) -> None:
    turn(life, clock, 1.0)
    assert post.kinds().count(Hello) >= 4
    up(life)
    post.sent.clear()
    turn(life, clock, 3.0)
    assert set(post.kinds()) == {Beat}
    assert 2 <= len(post.sent) <= 4


def test_an_answer_to_an_earlier_incarnation_does_not_count(
    life: ChildLife, post: FakeCourier, clock: FakeClock
) -> None:
    told(life, PeerUp(name="worker-0", incarnation=2, endpoint="ipc:///old"))
    turn(life, clock, 1.0)
    assert set(post.kinds()) == {Hello}


def test_silence_of_the_supervisor_ends_the_child(life: ChildLife, clock: FakeClock) -> None:
    up(life)
    turn(life, clock, PING_LIMIT_S - 0.5, ping=False)
    assert life.stop_reason is None
    turn(life, clock, 1.0, ping=False)
    assert life.stop_reason is not None


def test_a_supervisor_that_never_answers_ends_the_child(life: ChildLife, post: FakeCourier, clock: FakeClock) -> None:
    turn(life, clock, PING_LIMIT_S - 0.5, ping=False)
    assert life.stop_reason is None and set(post.kinds()) == {Hello}
    turn(life, clock, 1.0, ping=False)
    assert life.stop_reason is not None


def test_time_in_which_the_child_was_stopped_is_not_silence(life: ChildLife, clock: FakeClock) -> None:
    up(life)
    clock.now += 60
    life.beat(clock.now)
    assert life.stop_reason is None


def test_peers_are_connected_and_left_to_the_owner_to_act_on(life: ChildLife, post: FakeCourier) -> None:
    up = PeerUp(name="api", incarnation=0, endpoint="ipc:///a")
    assert told(life, up) == [up]
    assert post.peers["api"] == "ipc:///a"
    down = PeerDown(name="api", incarnation=0, cause="killed")
    assert told(life, down) == [down]
    assert "api" not in post.peers


def on_host(host: str, folder: Path, post: FakeCourier) -> ChildLife:
    deployed = cast("Any", Deployed(str(folder), host))
    return ChildLife("worker-0", 1, deployed, cast("Any", post), supervisor="tcp://10.0.0.1:7000", fd_endpoint="/w.fd")


def peer(name: str, host: str) -> PeerUp:
    return PeerUp(
        name=name,
        incarnation=0,
        endpoint=f"ipc:///{name}",
        fd_endpoint=f"/{name}.fd",
        host=host,
        remote_endpoint=f"tcp://10.0.0.9:1{len(name)}",
        blob_endpoint=f"tcp://10.0.0.9:2{len(name)}",
    )


@pytest.mark.parametrize("host", ["", "b"])
def test_peers_of_the_own_host_are_reached_by_sockets_in_its_file_system_and_others_by_tcp(
    host: str, tmp_path: Path, post: FakeCourier
) -> None:
    life = on_host(host, tmp_path, post)
    near, far = peer("api", host), peer("worker-1", "c")
    assert told(life, near) == [near] and told(life, far) == [far]
    assert post.peers["api"] == near.endpoint and post.peers["worker-1"] == far.remote_endpoint
    assert (life.blobs_of(near), life.blobs_of(far)) == ("", far.blob_endpoint)
    assert not life.is_elsewhere("api") and life.is_elsewhere("worker-1") and not life.is_elsewhere("supervisor")


def test_the_hello_says_where_other_hosts_reach_the_process(tmp_path: Path, post: FakeCourier) -> None:
    life = on_host("b", tmp_path, post)
    life.remote_endpoint, life.blob_endpoint = "tcp://10.0.0.2:7001", "tcp://10.0.0.2:7002"
    life.beat(time.monotonic() + 1.0)
    (hello,) = post.of(Hello)
    assert (hello.host, hello.remote_endpoint, hello.blob_endpoint) == ("b", *("tcp://10.0.0.2:700" + n for n in "12"))
    assert (hello.endpoint, hello.fd_endpoint) == (life.endpoint, "/w.fd")


def test_a_peer_without_an_endpoint_for_other_hosts_is_reported(
    tmp_path: Path, post: FakeCourier, caplog: pytest.LogCaptureFixture
) -> None:
    life = on_host("b", tmp_path, post)
    told(life, msgspec.structs.replace(peer("api", ""), remote_endpoint=""))
    assert set(post.peers) == {"supervisor"} and "api" in caplog.text


CANCEL = CancelRequest(handle=1)
DOWN = PeerDown(name="conductor", incarnation=1, cause="killed")


def test_commands_of_a_dead_process_are_dropped_and_its_results_stay_valid(life: ChildLife) -> None:
    assert told(life, CANCEL, "conductor", 1) == [CANCEL]
    assert told(life, DOWN) == [DOWN]
    assert told(life, CANCEL, "conductor", 1) == [] and life.stale == 1
    results = Outputs(worker="conductor", items=[])
    assert told(life, results, "conductor", 1) == [results]
    assert told(life, CANCEL, "conductor", 2) == [CANCEL]


def test_a_new_process_that_overtakes_the_death_of_its_predecessor_announces_it(
    life: ChildLife, post: FakeCourier
) -> None:
    told(life, PeerUp(name="conductor", incarnation=1, endpoint="ipc:///c1"))
    down, first = told(life, CANCEL, "conductor", 2)
    assert isinstance(down, PeerDown) and (down.name, down.incarnation, first) == ("conductor", 1, CANCEL)
    assert "conductor" not in post.peers
    assert told(life, DOWN) == [], "it would end what the new process has begun"
    assert told(life, PeerReady(name="conductor", incarnation=1)) == []
    assert told(life, PeerUp(name="conductor", incarnation=1, endpoint="ipc:///c1")) == []
    up = PeerUp(name="conductor", incarnation=2, endpoint="ipc:///c2")
    assert told(life, up) == [up] and post.peers["conductor"] == "ipc:///c2"


def test_stop_is_remembered(life: ChildLife) -> None:
    assert told(life, Stop(reason="down")) == []
    assert life.stop_reason == "down"


def test_phases_carry_name_and_incarnation(life: ChildLife, post: FakeCourier) -> None:
    life.phase("weights", done=1, total=2)
    assert post.sent == [("supervisor", Phase(name="worker-0", incarnation=3, phase="weights", done=1, total=2))]


def test_the_first_fatal_error_is_kept_and_becomes_the_exit_code(life: ChildLife, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, life.guarded():
        raise StartError("no weights", "looked in x", "give --weights", file="x")
    note_fatal(ValueError("later"), life.name, life.incarnation, tmp_path)
    record = json.loads((tmp_path / "children" / "worker-0.fatal.json").read_text())
    assert ended.value.code == int(ExitCode.START_FAILED)
    assert (record["class"], record["message"], record["hint"]) == ("StartError", "no weights", "give --weights")
    assert record["facts"] == {"file": "x"}
    assert "test_life.py" in record["traceback"]


def test_a_child_without_a_supervisor_sends_nothing_and_never_stops(
    tmp_path: Path, post: FakeCourier, clock: FakeClock
) -> None:
    life = ChildLife("api", 0, cast("Any", Deployed(str(tmp_path))), cast("Any", post), clock=clock)
    turn(life, clock, 20.0, ping=False, step=1.0)
    life.phase("ready")
    assert post.sent == []
    assert life.stop_reason is None


def formatted(message: str, *args: object, secrets: tuple[str, ...] = (), facts: dict[str, Any] | None = None) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("api", secrets))
    logger = logging.Logger("t")
    logger.addHandler(handler)
    logger.info(message, *args, extra={"facts": facts or {}})
    return stream.getvalue()


def test_a_log_line_names_child_and_request_and_cannot_be_forged() -> None:
    with request_scope("r-1"):
        text = formatted("said %s", 'x\n{"level":"ERROR"}\x1b[0m', facts={"status": 400, "level": "no"})
    assert text.count("\n") == 1
    assert "\x1b" not in text
    line = json.loads(text)
    assert (line["child"], line["request"], line["level"], line["status"]) == ("api", "r-1", "INFO", 400)


def test_a_workers_line_names_its_rank_and_no_other_does() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "said", (), None)
    assert json.loads(JsonFormatter("worker-3").format(record))["rank"] == 3
    assert "rank" not in json.loads(JsonFormatter("api").format(record))


def test_keys_never_reach_a_log_line() -> None:
    assert "s3cret" not in formatted("with %s", "s3cret", secrets=("s3cret",))


def test_a_huge_line_is_shortened_and_stays_json() -> None:
    text = formatted("%s", "x" * (2 * LINE_LIMIT_BYTES))
    assert len(text) < LINE_LIMIT_BYTES
    assert json.loads(text)["cut"] > LINE_LIMIT_BYTES


def test_collections_begin_after_the_imports_of_a_child_and_pass_over_their_objects() -> None:
    try:
        gc.disable()
        end_imports()
        assert gc.isenabled() and gc.get_freeze_count() > 1000 > len(gc.get_objects())
    finally:
        gc.enable()
        gc.unfreeze()


def test_objects_of_the_start_are_excluded_from_collections() -> None:
    try:
        keep_start()
        assert gc.get_freeze_count() > 1000 > len(gc.get_objects())
    finally:
        gc.unfreeze()


def test_sleeps_of_a_thread_with_exact_timers_are_exact() -> None:
    """The shortest of many sleeps, because of other load. Timers are 50 us late by default (Linux)."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(set_exact_timers).result()
        assert pool.submit(lambda: min(_nap() for _ in range(300))).result() < 60e-6


def _nap() -> float:
    start = time.perf_counter()
    time.sleep(20e-6)
    return time.perf_counter() - start


def silent(life: ChildLife, post: FakeCourier, seconds: int, *heard: tuple[str, int]) -> list[LinkBroken]:
    """Let seconds pass in which messages of these peers come. Returns the reports of links without any."""
    life.heard = lambda: set(heard)
    post.sent.clear()
    start = life._seen
    for second in range(seconds):
        told(life, Ping(seq=0))
        life.beat(start + second + 1)
    return post.of(LinkBroken)


@pytest.fixture
def linked(life: ChildLife, post: FakeCourier) -> ChildLife:
    """A process of host a with one peer there and two on host b."""
    up(life)
    life.beat(life._seen)
    for name, host in (("api", ""), ("worker-1", "b"), ("worker-2", "b")):
        told(life, peer(name, host))
    return life


def test_a_peer_of_another_host_of_which_nothing_comes_is_reported(linked: ChildLife, post: FakeCourier) -> None:
    assert silent(linked, post, 14, ("worker-2", 0)) == []
    (report,) = silent(linked, post, 2, ("worker-2", 0))
    assert (report.peer, report.incarnation, report.lost) == ("worker-1", 0, 0) and report.silent_s >= 15
    assert len(silent(linked, post, 30, ("worker-2", 0))) == 2, "once per limit"


def test_a_peer_that_is_heard_ends_or_is_replaced_is_not_silent(linked: ChildLife, post: FakeCourier) -> None:
    assert silent(linked, post, 12) == []
    assert silent(linked, post, 1, ("worker-1", 0), ("worker-2", 0)) == []
    assert silent(linked, post, 12) == []
    told(linked, PeerDown(name="worker-1", incarnation=0, cause="it died"))
    told(linked, msgspec.structs.replace(peer("worker-2", "b"), incarnation=1))
    told(linked, PeerDown(name="worker-2", incarnation=0, cause="it died"))
    assert silent(linked, post, 12) == []
    (report,) = silent(linked, post, 5)
    assert (report.peer, report.incarnation) == ("worker-2", 1)


def test_time_in_which_the_process_did_not_run_is_no_silence_of_its_peers(linked: ChildLife, post: FakeCourier) -> None:
    linked.heard = set
    linked.beat(linked._seen + 300)
    assert silent(linked, post, 10) == []
