"""Start-up messages in any order, duplicated, late or of other incarnations; and slow loads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar_core.config.deployment import DeploymentSpec, NodePlacement, Plan, RankPlan
from mstar_core.host.run_dir import RunDirectory
from mstar_core.messages.life import Beat, Hello, PeerReady, PeerUp, Phase
from mstar_core.messages.wire import WIRE_VERSION, Envelope, Message
from mstar_core.supervisor.child import Child, ChildKind
from mstar_core.supervisor.health import is_stalled
from mstar_core.supervisor.log_file import LogFile
from mstar_core.supervisor.supervisor import Supervisor
from mstar_core.transport import Courier

PHASES = {
    "conductor": ("ready",),
    "worker-0": ("weights", "kv", "ready"),
    "worker-1": ("weights", "ready"),
    "api": ("pool", "ready"),
}
LIFE = 2
"""Current incarnation of every child. Messages of the previous one are late, those of the next one unknown."""

FIXTURE_IS_NEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Told:
    """Fake courier that keeps the messages to each child."""

    def __init__(self) -> None:
        self.said: dict[str, list[Message]] = {name: [] for name in PHASES}
        self.connected: set[str] = set()

    def connect(self, name: str, endpoint: str, incarnation: int) -> None:
        assert (endpoint, incarnation) == (f"ipc://{name}.{LIFE}", LIFE)
        self.connected.add(name)

    def send(self, name: str, message: Message) -> None:
        if name in self.connected:
            self.said[name].append(message)

    def flush(self) -> None: ...


@contextmanager
def starting(spec: DeploymentSpec, folder: Path) -> Iterator[tuple[Supervisor, Told]]:
    """A supervisor whose children were just started. Tests deliver messages through `on_batch`."""
    ranks = tuple(RankPlan(rank=rank, device="cpu", nodes=("LLM",)) for rank in (0, 1))
    plan = Plan(ranks=ranks, placements=(NodePlacement(node="LLM", replicas=((0,), (1,))),))
    told = Told()
    spec = msgspec.structs.replace(spec, plan=plan)
    supervisor = Supervisor(spec, RunDirectory.of(spec.name), cast("Courier", told), "")
    for name in PHASES:
        kind = ChildKind(name=name, module="none")
        supervisor.children[name] = Child(
            kind, LogFile(folder / f"{name}.log"), incarnation=LIFE, state="spawned", phase="spawn"
        )
    yield supervisor, told
    for child in supervisor.children.values():
        child.log.close()


def envelope(sender: str, life: int, body: Message) -> Envelope:
    return Envelope(WIRE_VERSION, sender, life, body)


def said_in_a_start(draw: Any) -> list[Envelope]:
    """Draw all messages of a start in any order, with duplicates and messages of other incarnations."""
    lines: list[Envelope] = []
    for name, phases in PHASES.items():
        mine: list[Message] = [
            *(Phase(name=name, incarnation=LIFE, phase=phase, done=n, total=2) for phase in phases for n in (1, 2)),
            Hello(name=name, incarnation=LIFE, pid=1, endpoint=f"ipc://{name}.{LIFE}"),
            Beat(name=name, incarnation=LIFE),
        ]
        for message in mine:
            lines += [envelope(name, LIFE, message)] * draw(st.integers(1, 3))
        for life in (LIFE - 1, LIFE + 1):
            hello = Hello(name=name, incarnation=life, pid=1, endpoint=f"ipc://{name}.{life}")
            ready = Phase(name=name, incarnation=life, phase="ready")
            lines += [envelope(name, life, hello), envelope(name, life, ready)] * draw(st.integers(0, 2))
    lines += [envelope("stranger", LIFE, Hello(name="stranger", incarnation=LIFE, pid=1, endpoint="ipc://stranger"))]
    random.Random(draw(st.integers(0, 2**32))).shuffle(lines)
    return lines


@FIXTURE_IS_NEW
@given(data=st.data())
def test_a_start_with_messages_in_any_order_becomes_ready_once(
    data: st.DataObject, logged_spec: Callable[..., DeploymentSpec], tmp_path: Path
) -> None:
    lines = said_in_a_start(data.draw)
    ready_at: list[int] = []
    with starting(logged_spec(f"s{random.getrandbits(40):x}"), tmp_path) as (supervisor, told):
        for at, line in enumerate(lines):
            supervisor.on_batch([line])
            if supervisor.state == "ready":
                ready_at.append(at)
    assert supervisor.state == "ready" and ready_at == list(range(ready_at[0], len(lines))), "ready, and from then on"
    assert [event["type"] for event in supervisor.events.ring].count("deployment.ready") == 1
    assert set(supervisor.children) == set(PHASES)
    for name, said in told.said.items():
        peers = [m for m in said if isinstance(m, PeerUp | PeerReady)]
        assert {m.name for m in peers if isinstance(m, PeerUp)} == set(PHASES), "itself too: that ends its hellos"
        assert {m.name for m in peers if isinstance(m, PeerReady)} == set(PHASES) - {name}
        assert {m.incarnation for m in peers} == {LIFE}
        for peer in set(PHASES) - {name}:
            first = next(m for m in peers if m.name == peer)
            assert isinstance(first, PeerUp), "no child gets work before it is known where"


@FIXTURE_IS_NEW
@given(data=st.data())
def test_a_start_without_one_message_never_becomes_ready(
    data: st.DataObject, logged_spec: Callable[..., DeploymentSpec], tmp_path: Path
) -> None:
    lost = data.draw(st.sampled_from(sorted(PHASES)))
    word = data.draw(st.sampled_from((Hello, Phase)))
    with starting(logged_spec(f"s{random.getrandbits(40):x}"), tmp_path) as (supervisor, _):
        for line in said_in_a_start(data.draw):
            is_lost = isinstance(line.body, word) and line.incarnation == LIFE
            if not (line.sender == lost and is_lost and getattr(line.body, "phase", "ready") == "ready"):
                supervisor.on_batch([line])
        assert supervisor.state == "starting"


def loading(tmp_path: Path) -> Child:
    log = LogFile(tmp_path / "log")
    log.close()  # nothing is written
    return Child(ChildKind(name="worker-0", module="none"), log, phase="spawn", started=0.0)


@FIXTURE_IS_NEW
@given(gaps=st.lists(st.integers(1, 120), min_size=30, max_size=60))
def test_a_slow_load_with_progress_never_stalls(gaps: list[int], tmp_path: Path) -> None:
    child, now = loading(tmp_path), 0  # whole seconds: sums of fractions would round across the limit
    for done, gap in enumerate(gaps):
        now += gap
        assert not is_stalled(child, now, 120.0)
        child.advance(Phase(name="worker-0", incarnation=1, phase="weights", done=done, total=10**12), now)
    assert not is_stalled(child, now + 120.0, 120.0)
    assert is_stalled(child, now + 120.1, 120.0), "and nothing new for the limit ends it"


def test_messages_without_progress_are_no_progress(tmp_path: Path) -> None:
    child = loading(tmp_path)
    for now in range(100, 300, 10):
        child.advance(Phase(name="worker-0", incarnation=1, phase="weights", done=7, total=9, detail=str(now)), now)
    assert child.last_progress == 100
    assert not is_stalled(child, 220.0, 120.0) and is_stalled(child, 220.5, 120.0)
