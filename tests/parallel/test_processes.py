"""Two processes of a group that meet over TCP, without a supervisor: the ids of one rank, and what ends them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mstar_core.host.network import LOOPBACK
from tests.fakes.commands import output_of
from tests.fakes.namespaces import ADDRESSES, INTERFACES, inside, two_hosts
from tests.fakes.ports import free_port
from tests.parallel.member import ids_of_one_rank

ROOT = Path(__file__).resolve().parents[2]
JOIN_S = 120.0
END_S = 60.0
"""Most time from the end of a member to the end of the other one; less than a second on an idle machine."""


class Pair:
    """A leader and a follower. meet: their arguments behind the limit of the wait."""

    def __init__(self, folder: Path, meets: Sequence[Sequence[str]], prefixes: Sequence[Sequence[str]] = ((), ())):
        self._folder = folder
        self.members = [
            self._started([*prefix, sys.executable, "-m", "tests.parallel.member"], rank, meet)
            for rank, (meet, prefix) in enumerate(zip(meets, prefixes, strict=True))
        ]
        self.leader, self.follower = self.members

    def _started(self, command: Sequence[str], rank: int, meet: Sequence[str]) -> subprocess.Popen[str]:
        with (self._folder / f"{rank}.log").open("w") as log:
            return subprocess.Popen(
                [*command, str(rank), str(self._folder), f"{JOIN_S}", *meet],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def send(self) -> None:
        assert self.leader.stdin is not None
        self.leader.stdin.write("ask\n")
        self.leader.stdin.flush()

    def said(self) -> str:
        assert self.leader.stdout is not None
        return self.leader.stdout.readline()

    def ask(self) -> str:
        """Return the ids of the samples."""
        self.send()
        return self.said()

    def stop(self) -> list[int]:
        """End the input of the leader. Returns the exit codes."""
        assert self.leader.stdin is not None
        self.leader.stdin.close()
        return [member.wait(END_S) for member in self.members]

    def log(self, rank: int) -> str:
        return (self._folder / f"{rank}.log").read_text()


@contextmanager
def pair(folder: Path, *arguments: Sequence[Sequence[str]]) -> Iterator[Pair]:
    with ExitStack() as stack:
        made = Pair(folder, *arguments)
        for member in made.members:
            stack.enter_context(member)
            stack.callback(member.kill)
        assert made.said() == "READY\n", made.log(0) + made.log(1)
        yield made


def meet(host: str = LOOPBACK) -> str:
    return f"{host}:{free_port()}:{free_port()}"


@contextmanager
def tcp_pair(folder: Path) -> Iterator[Pair]:
    words = (meet(), LOOPBACK, "secret")
    with pair(folder, (words, words)) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> str:
    return ids_of_one_rank() + "\n"


def test_members_give_the_ids_of_one_rank_over_tcp_and_over_files(tmp_path: Path, expected: str) -> None:
    (files := tmp_path / "files").mkdir()
    with tcp_pair(tmp_path) as tcp:
        assert tcp.ask() == expected
        tcp.follower.send_signal(signal.SIGSTOP)
        tcp.send()
        time.sleep(1.0)
        tcp.follower.send_signal(signal.SIGCONT)
        assert tcp.said() == expected, "a member that was suspended for a moment goes on"
        assert tcp.stop() == [0, 0]
    with pair(files, ((), ())) as local:
        assert local.ask() == expected
        assert local.stop() == [0, 0]


def test_strangers_at_the_store_do_not_disturb_a_group(tmp_path: Path, expected: str) -> None:
    words = (meet(), LOOPBACK, "secret")
    with pair(tmp_path, (words, words)) as made:
        _, store, _ = words[0].split(":")
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
            with socket.create_connection((LOOPBACK, int(store))) as stranger:
                stranger.sendall(data)
        assert made.ask() == expected
        assert made.stop() == [0, 0]


@pytest.mark.parametrize("victim", [0, 1])
def test_the_end_of_a_member_ends_the_other_with_this_cause(tmp_path: Path, victim: int) -> None:
    with tcp_pair(tmp_path) as made:
        if victim == 1:
            made.send()  # a leader without work is ended by the supervisor
        made.members[victim].kill()
        assert made.members[1 - victim].wait(END_S) != 0
    assert "ENDED the tensor-parallel group" in made.log(0) if victim else "ENDED rank 1 left the" in made.log(1)


def test_members_of_two_network_namespaces_give_the_ids_of_one_rank(tmp_path: Path, expected: str) -> None:
    with two_hosts() as hosts:
        at = meet(ADDRESSES[0])
        words = [(at, address, "secret") for address in ADDRESSES]
        with pair(tmp_path, words, [inside(host) for host in hosts]) as made:
            assert made.ask() == expected
            assert made.stop() == [0, 0]


@pytest.mark.slow
def test_a_follower_notices_that_the_network_is_lost(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        at = meet(ADDRESSES[0])
        words = [(at, address, "secret") for address in ADDRESSES]
        with pair(tmp_path, words, [inside(host) for host in hosts]) as made:
            output_of(inside(hosts[0], "ip", "link", "set", INTERFACES[0], "down"))
            assert made.follower.wait(END_S) != 0
    assert "ENDED rank 1 left the tensor-parallel group of ranks 0, 1; the leader is lost" in made.log(1)
