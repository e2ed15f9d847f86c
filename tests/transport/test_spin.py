"""A wait that looks again without sleeping ends with a message or when its time is over, and lets other threads run."""

from __future__ import annotations

import threading
import time

from mstar_core.transport import Courier, Mailbox, Spin, mailbox_endpoint

SPAN_S = 0.3


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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


def test_a_mailbox_looks_on_for_as_long_as_it_is_told_and_then_sleeps(context, codec, directory):
    with Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), codec) as mailbox:
        begun, busy = time.monotonic(), time.thread_time()
        assert not mailbox.wait(2 * SPAN_S, spin_s=SPAN_S)
        assert time.monotonic() - begun >= 2 * SPAN_S, "a spin does not shorten the wait"
        spent = time.thread_time() - busy
        assert 0.05 * SPAN_S < spent < 1.5 * SPAN_S, "it looked on for the first half alone"
        busy = time.thread_time()
        assert not mailbox.wait(SPAN_S)
        assert time.thread_time() - busy < 0.05 * SPAN_S, "untold it sleeps"


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


def test_another_thread_of_a_process_that_spins_gets_the_interpreter(context, codec, directory):
    """Beside a loop that keeps it, each step of the other thread waits for a whole switch interval of 5 ms."""
    turns = 200
    with Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), codec) as mailbox:
        taken: list[float] = []

        def work() -> None:
            for _ in range(turns):
                time.sleep(0.0002)
                begun = time.monotonic()
                sum(range(1000))
                time.sleep(0)
                taken.append(time.monotonic() - begun)

        worker = threading.Thread(target=work)
        worker.start()
        while worker.is_alive():
            mailbox.wait(0.05, spin_s=1.0)
        worker.join()
    assert sorted(taken)[turns // 2] < 0.003
