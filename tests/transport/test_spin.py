"""A wait that looks again without sleeping ends with a message or when its time is over, and lets other threads run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mstar_core.conformance.clock import FakeClock
from mstar_core.transport import Courier, Mailbox, Spin, mailbox_endpoint
from mstar_core.transport.spin import spin_then_block


def test_a_spin_lasts_from_the_last_time_that_it_was_roused():
    clock = FakeClock()
    spin = Spin(0.05, clock)
    assert spin.left_s == 0.0, "nothing has come yet"
    spin.rouse()
    clock.now += 0.04
    assert 0.009 < spin.left_s < 0.011
    spin.rouse()
    clock.now += 0.04
    assert spin.left_s > 0
    clock.now += 0.02
    assert spin.left_s == 0.0


def test_a_spin_of_no_length_is_over_at_once():
    spin = Spin(0.0, FakeClock())
    spin.rouse()
    assert spin.left_s == 0.0


class Looks:
    """A look that finds nothing before its turn `at`. Each moves the clock by a millisecond, or by its time limit."""

    def __init__(self, clock: FakeClock, at: int = 0) -> None:
        self.clock, self.at = clock, at
        self.asked: list[float | None] = []

    def __call__(self, seconds: float | None) -> str:
        self.asked.append(seconds)
        self.clock.now += seconds or 0.001
        return "found" if len(self.asked) == self.at else ""


@pytest.mark.parametrize(
    ("timeout_s", "spin_s", "spins", "rest_s"),
    [(0.6, 0.3, 300, 0.3), (0.6, 0.0, 0, 0.6), (0.1, 60.0, 100, 0.0), (None, 0.3, 300, None), (2.1, 2.0, 2000, 0.1)],
)
def test_a_wait_polls_for_as_long_as_it_spins_and_blocks_for_the_rest(timeout_s, spin_s, spins, rest_s):
    looks = Looks(clock := FakeClock())
    assert spin_then_block(looks, timeout_s, spin_s, clock) == ""
    *polls, last = looks.asked
    assert set(polls) <= {0.0} and len(polls) == pytest.approx(spins, abs=2)
    assert last == (rest_s if rest_s is None else pytest.approx(rest_s, abs=0.002)), "a spin changes no time limit"


def test_a_wait_ends_with_the_first_look_that_finds_something():
    looks = Looks(clock := FakeClock(), at=5)
    assert spin_then_block(looks, 60.0, 60.0, clock) == "found"
    assert looks.asked == [0.0] * 5


def test_a_spin_is_no_longer_than_the_wait(context, codec, directory):
    with Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), codec) as mailbox:
        begun = time.monotonic()
        assert not mailbox.wait(0.01, spin_s=60.0)
        assert time.monotonic() - begun < 30.0
        assert not mailbox.wait(0.0, spin_s=60.0)


def test_a_spin_ends_for_a_message(context, codec, directory):
    with (
        Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), codec) as mailbox,
        Courier(context, codec) as courier,
    ):
        courier.connect("worker-0", mailbox.endpoint, 1)
        threading.Timer(0.05, courier.send, ("worker-0", b"one")).start()
        assert mailbox.wait(60.0, spin_s=60.0)
        assert mailbox.drain() == [b"one"]


@pytest.fixture
def cooperative() -> Iterator[None]:
    """Threads take the interpreter only when another one releases it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def test_another_thread_of_a_process_that_spins_gets_the_interpreter(context, codec, directory, cooperative):
    """The other thread's message ends the wait. Beside polls that kept the interpreter it would never be sent."""
    with (
        Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), codec) as mailbox,
        Courier(context, codec) as courier,
    ):
        courier.connect("worker-0", mailbox.endpoint, 1)

        def work() -> None:
            for _ in range(200):
                sum(range(1000))
                time.sleep(0)
            courier.send("worker-0", b"one")

        worker = threading.Thread(target=work)
        worker.start()
        assert mailbox.wait(30.0, spin_s=30.0)
        worker.join()
