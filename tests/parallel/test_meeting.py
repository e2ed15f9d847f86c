"""Members of a group on several hosts meet over TCP, and accept only connections with the key of the group."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mstar_core.config.deployment import DeploymentSpec, GroupPlan, HostPlan, NodePlacement, Plan, RankPlan
from mstar_core.engine.group import listener
from mstar_core.engine.group.link import GroupEnded, PlanReceiver, PlanSender
from mstar_core.engine.group.plans import Checksum, StopPlans
from mstar_core.engine.group.proof import ANSWER_BYTES, NONCE_BYTES
from mstar_core.errors import ConfigError, StartError, TransportError
from mstar_core.host.network import LOOPBACK, interface_of
from mstar_core.parallel.groups import GroupPlace, RankGroup, set_network
from mstar_core.parallel.meeting import Meeting
from mstar_core.process.life import ChildArguments
from mstar_core.transport.curve import KEYS_FILE, make_keys, write_keys
from mstar_core.worker.start.group import join_place
from tests.fakes.ports import free_port

WAIT_S = 60.0
SHORT_S = 0.5
SECRET = b"secret of the deployment"


def meeting(secret: bytes = SECRET) -> Meeting:
    return Meeting(
        host=LOOPBACK,
        store_port=free_port(),
        plan_port=free_port(),
        address=LOOPBACK,
        hosts=("hosta", "hostb"),
        secret=secret,
    )


def places(folder: Path, join_s: float = WAIT_S, epoch: int = 1) -> tuple[GroupPlace, GroupPlace]:
    at = meeting()
    leader, follower = (
        GroupPlace(ranks=(0, 1), rank=rank, epoch=epoch, folder=folder, meeting=at, join_s=join_s) for rank in (0, 1)
    )
    return leader, follower


@contextmanager
def accepting(place: GroupPlace) -> Iterator[PlanSender]:
    """A leader that waits for followers on a thread; the block ends when it has them."""
    with PlanSender(place) as sender:
        thread = threading.Thread(target=sender.accept, daemon=True)
        thread.start()
        yield sender
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the leader still waits"


def at(place: GroupPlace) -> tuple[str, int]:
    assert place.meeting is not None
    return place.meeting.host, place.meeting.plan_port


def joined(sender: PlanSender) -> None:
    """Wait until the leader has taken its followers over."""
    end = time.monotonic() + WAIT_S
    while not sender._followers:
        assert time.monotonic() < end
        time.sleep(1e-3)


def assert_linked(sender: PlanSender, receiver: PlanReceiver) -> None:
    joined(sender)
    sender.publish(StopPlans(reason="first"))
    frame = receiver.receive(WAIT_S)
    assert frame is not None and frame.plans == [StopPlans(reason="first")]
    receiver.answer(Checksum(index=1, node="LM", number=3, value=5))
    end = time.monotonic() + WAIT_S
    while not (answers := sender.answers("LM")):
        assert time.monotonic() < end
    assert answers == [Checksum(index=1, node="LM", number=3, value=5)]


def everything_from(connection: socket.socket) -> bytes:
    """Read until the other end closes the connection."""
    connection.settimeout(WAIT_S)
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received


def test_members_exchange_plans_and_checksums_without_delay(tmp_path: Path) -> None:
    leader, follower = places(tmp_path)
    with accepting(leader) as sender, PlanReceiver(follower) as receiver:
        assert_linked(sender, receiver)
        for end in (sender._followers[0], receiver._socket):
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
            assert end.gettimeout() is None
    assert list(tmp_path.iterdir()) == []


def test_strangers_learn_a_nonce_only_and_keep_no_member_out(tmp_path: Path) -> None:
    leader, follower = places(tmp_path)
    with accepting(leader) as sender:
        silent = [socket.create_connection(at(leader)) for _ in range(3)]
        loud = socket.create_connection(at(leader))
        loud.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(ANSWER_BYTES))
        assert len(everything_from(loud)) in (0, NONCE_BYTES)
        with PlanReceiver(follower) as receiver:
            assert_linked(sender, receiver)
            for each in silent:
                assert len(everything_from(each)) == NONCE_BYTES
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(at(leader))
            assert_linked_again(sender, receiver)
        for each in (loud, *silent):
            each.close()


def assert_linked_again(sender: PlanSender, receiver: PlanReceiver) -> None:
    sender.publish(StopPlans(reason="second"))
    frame = receiver.receive(WAIT_S)
    assert frame is not None and frame.sequence == 2


def test_a_stranger_without_proof_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PROOF_S", 0.2)
    leader, follower = places(tmp_path)
    with accepting(leader) as sender:
        with socket.create_connection(at(leader)) as stranger:
            assert len(everything_from(stranger)) == NONCE_BYTES
        with PlanReceiver(follower) as receiver:
            assert_linked(sender, receiver)


def test_more_strangers_than_are_held_keep_no_member_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PROOF_S", 10 * WAIT_S)
    leader, follower = places(tmp_path)
    with accepting(leader) as sender:
        strangers = [socket.create_connection(at(leader)) for _ in range(listener.MOST_STRANGERS + 5)]
        assert len(everything_from(strangers[0])) == NONCE_BYTES, "the oldest is closed for a newer one"
        with PlanReceiver(follower) as receiver:
            assert_linked(sender, receiver)
        for each in strangers:
            each.close()


@pytest.mark.parametrize("other", ["secret", "epoch", "ranks"])
def test_another_key_epoch_or_group_is_not_accepted_by_either_end(tmp_path: Path, other: str) -> None:
    leader, follower = places(tmp_path)
    assert follower.meeting is not None
    wrong = replace(
        follower,
        join_s=SHORT_S,
        **{
            "secret": {"meeting": replace(follower.meeting, secret=b"another")},
            "epoch": {"epoch": 2},
            "ranks": {"ranks": (2, 1)},
        }[other],
    )
    with accepting(leader) as sender:
        with pytest.raises(StartError, match="does not answer") as refused:
            PlanReceiver(wrong)
        assert refused.value.facts["phase"] == "group"
        with PlanReceiver(follower) as receiver:
            assert_linked(sender, receiver)


def test_a_leader_without_the_key_gets_no_follower(tmp_path: Path) -> None:
    """It accepts what the follower says, and its own proof is wrong."""
    leader, follower = places(tmp_path, SHORT_S)
    with socket.create_server(at(leader)) as server:

        def pretend() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(NONCE_BYTES))
                connection.recv(ANSWER_BYTES)
                connection.sendall(bytes(32))
                server.close()
                assert connection.recv(1) == b""

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises(StartError) as refused:
            PlanReceiver(follower)
        thread.join(WAIT_S)
    assert f"{LOOPBACK}:{at(leader)[1]}" in refused.value.detail


def test_a_proof_is_valid_once(tmp_path: Path) -> None:
    """The bytes of a follower, sent again on another connection, are refused."""
    leader, follower = places(tmp_path)
    with socket.create_server((LOOPBACK, 0)) as relay, accepting(leader):
        assert follower.meeting is not None
        near = replace(follower, join_s=SHORT_S, meeting=replace(follower.meeting, plan_port=relay.getsockname()[1]))
        heard: list[bytes] = []

        def listen_in() -> None:
            connection, _ = relay.accept()
            with connection, socket.create_connection(at(leader)) as other:
                connection.sendall(other.recv(NONCE_BYTES))
                heard.append(connection.recv(ANSWER_BYTES))
            relay.close()

        thread = threading.Thread(target=listen_in, daemon=True)
        thread.start()
        with pytest.raises(StartError):
            PlanReceiver(near)
        thread.join(WAIT_S)
        with socket.create_connection(at(leader)) as again:
            again.sendall(heard[0])
            assert len(everything_from(again)) == NONCE_BYTES
        PlanReceiver(follower).close()


def test_a_leader_that_never_comes_is_named_with_host_and_port(tmp_path: Path) -> None:
    leader, follower = places(tmp_path, SHORT_S)
    with pytest.raises(StartError, match="rank 0 on hosta, does not answer") as failed:
        PlanReceiver(follower)
    assert f"{LOOPBACK}:{at(leader)[1]}" in failed.value.detail and "refused" in failed.value.detail
    assert "rank 1 on hostb" in failed.value.hint and failed.value.facts["phase"] == "group"


def test_a_follower_that_never_comes_is_named_with_its_host(tmp_path: Path) -> None:
    leader, _ = places(tmp_path, SHORT_S)
    with PlanSender(leader) as sender, socket.create_connection(at(leader)) as stranger:
        stranger.sendall(bytes(ANSWER_BYTES))
        with pytest.raises(StartError, match="rank 1 on hostb did not join") as failed:
            sender.accept()
    assert f"{LOOPBACK}:{at(leader)[1]}" in failed.value.detail and "1 connections" not in failed.value.detail
    assert "1 connection was refused" in failed.value.detail
    assert failed.value.facts["phase"] == "group"


@pytest.mark.parametrize("port", ["plan_port", "store_port"])
def test_a_port_in_use_is_named(tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _ = places(tmp_path, SHORT_S)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    number = getattr(leader.meeting, port)
    with socket.create_server((LOOPBACK, number)), pytest.raises(StartError) as failed:
        PlanSender(leader) if port == "plan_port" else RankGroup(leader, torch.device("cpu"))
    assert f"{LOOPBACK}:{number}" in str(failed.value) and "in use" in str(failed.value)
    assert failed.value.facts["phase"] == "group"


def test_a_lost_member_ends_the_other_at_once(tmp_path: Path) -> None:
    leader, follower = places(tmp_path)
    with accepting(leader) as sender, PlanReceiver(follower) as receiver:
        joined(sender)
        receiver.close()
        with pytest.raises(GroupEnded, match="rank 1 on hostb is lost"):
            for _ in range(600):
                sender.answers("LM")
                time.sleep(0.1)
    with accepting(leader) as sender, PlanReceiver(follower) as receiver:
        joined(sender)
        sender.close()
        with pytest.raises(GroupEnded, match="the leader closed its connection"):
            receiver.receive(WAIT_S)


def test_a_follower_that_connects_again_takes_its_own_place(tmp_path: Path) -> None:
    """Its first connection was lost after the proof, while the leader waits for others."""
    leader = replace(
        places(tmp_path)[0], ranks=(0, 1, 2), meeting=replace(meeting(), hosts=("hosta", "hostb", "hostb"))
    )
    first, second = (replace(leader, rank=rank) for rank in (1, 2))
    with accepting(leader) as sender:
        PlanReceiver(first).close()
        with PlanReceiver(first) as again, PlanReceiver(second) as other:
            joined(sender)
            sender.publish(StopPlans())
            assert all(each.receive(WAIT_S) is not None for each in (again, other))


def spec_of(folder: Path, hosts: tuple[str, str]) -> DeploymentSpec:
    return DeploymentSpec(
        name="d",
        model="orpheus",
        plugin="mstar-orpheus",
        run_dir=str(folder),
        log_dir=str(folder),
        plan=Plan(
            ranks=tuple(
                RankPlan(rank=rank, device="cpu", nodes=(), follows=("LLM",), host=host)
                for rank, host in enumerate(hosts)
            ),
            placements=(NodePlacement(node="LLM", replicas=((0, 1),), tp_size=2),),
            groups=(GroupPlan(ranks=(0, 1), nodes=("LLM",)),),
        ),
        hosts=(HostPlan(name="", address=LOOPBACK, title="head"), HostPlan(name="b", address="127.0.0.2")),
        on_host=hosts[1],
    )


class Life:
    """Notes the phases of a process."""

    def __init__(self) -> None:
        self.details: list[str] = []

    def phase(self, name: str, *, detail: str) -> None:
        self.details.append(detail)


def place_of(folder: Path, hosts: tuple[str, str], meet: str) -> tuple[GroupPlace, str]:
    spec, life = spec_of(folder, hosts), Life()
    arguments = ChildArguments(name="follower-1", spec=spec, incarnation=3, supervisor="", rank=1, meet=meet)
    place = join_place(arguments, spec.plan.groups[0], life)  # type: ignore[arg-type]
    return place, life.details[0]


def test_a_process_gets_its_place_from_spec_and_arguments(tmp_path: Path) -> None:
    keys = make_keys()
    write_keys(tmp_path / KEYS_FILE, keys)
    place, shown = place_of(tmp_path, ("", "b"), "10.0.0.1:4000:4001")
    assert place.meeting == Meeting(
        host="10.0.0.1",
        store_port=4000,
        plan_port=4001,
        address="127.0.0.2",
        hosts=("head", "b"),
        secret=keys.secret.encode(),
    )
    assert keys.secret not in repr(place)
    assert shown == "ranks 0, 1 on head, b, epoch 3"
    assert place.join_s < spec_of(tmp_path, ("", "b")).stall_s


def test_a_group_on_one_host_meets_by_files(tmp_path: Path) -> None:
    place, shown = place_of(tmp_path, ("b", "b"), "")
    assert place.meeting is None and shown == "ranks 0, 1, epoch 3"


def test_a_group_on_several_hosts_needs_a_meeting_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on several hosts"):
        place_of(tmp_path, ("", "b"), "")


@pytest.mark.parametrize("text", ["", "10.0.0.1", "10.0.0.1:4000", "10.0.0.1:4000:0", "h:4000:65536", ":1:2", "h:x:2"])
def test_a_meeting_place_is_checked(text: str) -> None:
    with pytest.raises(ConfigError):
        Meeting.parse(text, address=LOOPBACK, hosts=("a", "b"), secret=SECRET)


@pytest.mark.parametrize(("backend", "name"), [("gloo", "GLOO_SOCKET_IFNAME"), ("nccl", "NCCL_SOCKET_IFNAME")])
def test_collectives_use_the_interface_of_the_host(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean: dict[str, Any] = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    monkeypatch.setattr(os, "environ", clean)
    set_network(backend, meeting())
    assert clean[name] in ("lo", "=lo")
    clean[name] = "eth7"
    set_network(backend, meeting())
    assert clean[name] == "eth7", "the operator's choice"


def test_an_address_of_another_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(TransportError, match="has the address 203.0.113.7"):
        set_network("gloo", replace(meeting(), address="203.0.113.7"))
    assert interface_of("127.0.0.9") == "lo"
