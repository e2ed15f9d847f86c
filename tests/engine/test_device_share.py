"""Share of device time between image passes and text: on a device that computes at once, and on one with a queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mstar_core.engine.base import Done
from mstar_core.engine.scheduling.device_share import GRACE_S, HEAD_START_S, DeviceShare
from mstar_core.graph.declare.nodes import Attend
from tests.engine.tiny_engine import WIDTH, Driver, TinyLM, make_engine

LOOK = Attend(mask="full", positions="shared", write=False)
PASS_S, STEP_S = 0.090, 0.008
"""Seconds of an image pass and of any step of text."""

LATENTS = 12


@dataclass
class Device:
    """A device with a queue and a fake clock. now: time of the host; free: when all launched work is done.

    is_queued: False computes while the host waits, as a CPU does. steps: (kind, begin, end) of each forward.
    """

    is_queued: bool
    now: float = 0.0
    free: float = 0.0
    steps: list[tuple[str, float, float]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def mark(self) -> Moment:
        return Moment(self, max(self.now, self.free))

    def compute(self, kind: str, seconds: float) -> None:
        begin = max(self.now, self.free)
        self.free = begin + seconds
        self.steps.append((kind, begin, self.free))
        if not self.is_queued:
            self.now = self.free

    def seconds(self, kind: str, since: float, until: float) -> float:
        """Return the time of a kind within a window."""
        spans = (min(end, until) - max(begin, since) for name, begin, end in self.steps if name == kind)
        return sum(max(0.0, span) for span in spans)


@dataclass
class Moment:
    device: Device
    at: float

    @property
    def is_passed(self) -> bool:
        return self.device.now >= self.at

    def seconds_until(self, later: Any) -> float:
        return float(later.at - self.at)


class Timed(nn.Module):
    """TinyLM on a fake device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.inner, self.device = TinyLM(), device

    def forward(self, latents: Tensor | None = None, **ports: Any) -> dict[str, Tensor]:
        kind = "text" if latents is None else "image"
        passes = 1 if latents is None else len(latents) // LATENTS
        self.device.compute(kind, PASS_S * passes if latents is not None else STEP_S)
        return self.inner(latents=latents, **ports)

    def head(self, hidden: Tensor) -> Tensor:
        return self.inner.head(hidden)


class Server:
    """An engine, and a worker around it that waits as the real one does."""

    def __init__(self, *, is_queued: bool, image_share: float = 0.5) -> None:
        self.device = Device(is_queued)
        share = DeviceShare(image_share, self.device.mark, self.device.clock)
        lookahead = int(is_queued)
        self.engine = make_engine(
            module=Timed(self.device),
            clock=self.device.clock,
            share=share,
            lookahead=lookahead,
            num_pages=512,
            max_seq_len=512,
            max_slots=32,
            token_budget=16,
        )
        self.driver = Driver(self.engine, lookahead)
        self.first_ids: dict[int, float] = {}
        self.left = 0
        self.asks: list[tuple[float, Callable[[], None]]] = []

    def paint(self, handle: int, steps: int) -> None:
        """Run a prompt and then steps of two branches, each after the one before."""
        self.driver.open(handle, max_tokens=64)
        self.left += steps

        def follow(left: int) -> Callable[[Done], None]:
            waiting = {"main", "side"}

            def ended(done: Done) -> None:
                waiting.discard(done.job.branch)
                if not waiting and left:
                    step(left - 1)
                self.left -= not waiting

            return ended

        def step(left: int) -> None:
            ended = follow(left)
            for branch in ("main", "side"):
                key = self.driver.submit(
                    handle,
                    inputs={"latents": torch.zeros(LATENTS, WIDTH)},
                    outputs=("velocity",),
                    attend=LOOK,
                    branch=branch,
                    sample=False,
                )
                self.driver.on_done[key] = ended

        step(steps - 1)

    def write(self, handle: int, ids: int) -> int:
        """Prefill a prompt and decode. Returns the key of the decoding."""
        self.driver.open(handle, max_tokens=ids + 32)
        self.driver.prefill(handle, [1, 2, 3])
        return self.driver.decode(handle, ids)

    def run(self, until: Callable[[], bool]) -> None:
        """Play the worker: launch while the lookahead allows it, collect what is done, else let time pass."""
        driver, engine, device = self.driver, self.engine, self.device
        for _ in range(200_000):
            if until():
                return
            while self.asks and self.asks[0][0] <= device.now:
                self.asks.pop(0)[1]()
            launched = engine.launch() if engine.pressure().ready else None
            if launched is not None:
                driver.running.append(launched)
            if driver.running and (not device.is_queued or self._is_done()):
                known = set(driver.ids)
                driver.collect()
                self.first_ids |= {key: device.now for key in set(driver.ids) - known}
            elif launched is None:
                device.now += 0.001
        raise AssertionError("still running")

    def _is_done(self) -> bool:
        step = self.driver.running[0]
        is_read = any(step.drawn)  # type: ignore[attr-defined]
        # The copy of an id arrives when the device has computed the step.
        timed = step.timed  # type: ignore[attr-defined]
        if is_read and timed is not None and not timed.end.is_passed:
            return False
        return self.engine.is_done(step)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_queued", [False, True], ids=["at once", "queue"])
def test_a_text_beside_an_image_waits_for_one_pass(is_queued: bool) -> None:
    """From any moment within a guided step, the first id comes after one branch forward and the text's own steps."""
    for arrival in (0.30, 0.335, 0.38, 0.41):
        server = Server(is_queued=is_queued)
        server.paint(1, steps=8)
        keys: list[int] = []
        server.asks.append((arrival, lambda server=server, keys=keys: keys.append(server.write(2, 4))))  # type: ignore[misc]
        server.run(lambda server=server, keys=keys: bool(keys) and keys[0] in server.first_ids)  # type: ignore[misc]
        waited = server.first_ids[keys[0]] - arrival
        assert waited <= PASS_S + HEAD_START_S + 2 * STEP_S + 0.006, (arrival, waited)


@pytest.mark.parametrize("is_queued", [False, True], ids=["at once", "queue"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_time_follows_the_share_while_both_wait(is_queued: bool, share: float) -> None:
    server = Server(is_queued=is_queued, image_share=share)
    server.write(2, 400)
    server.paint(1, steps=30)
    server.run(lambda: server.device.now >= 2.4)
    images, texts = (server.device.seconds(kind, 0.4, 2.2) for kind in ("image", "text"))
    assert images / (images + texts) == pytest.approx(share, abs=0.07)
    assert images + texts > 0.95 * 1.8, "the device is busy throughout"


@pytest.mark.parametrize("is_queued", [False, True], ids=["at once", "queue"])
def test_either_kind_alone_has_the_whole_device(is_queued: bool) -> None:
    server = Server(is_queued=is_queued)
    server.paint(1, steps=5)
    server.run(lambda: server.left == 0)
    assert server.device.now <= 5 * 2 * PASS_S + 0.02
    began = server.device.now
    key = server.write(2, 50)
    server.run(lambda: key in server.driver.done)
    assert server.device.now - began <= 51 * STEP_S + 0.06


def test_many_texts_do_not_stop_an_image() -> None:
    """Requests that keep coming leave the image its half."""
    server = Server(is_queued=True)
    server.paint(1, steps=12)
    for number in range(300):
        server.asks.append((number * 0.02, lambda number=number: void(server.write(10 + number, 2))))  # type: ignore[misc]
    for handle in range(10, 310):
        server.driver.on_done[handle] = lambda done: None
    server.run(lambda: server.left == 0 or server.device.now > 6)
    assert server.device.now <= 12 * 2 * PASS_S / 0.5 * 1.1 + 0.1


def void(_: object) -> None:
    """Drop a value."""


def test_an_absent_kind_saves_up_no_time() -> None:
    device = Device(is_queued=False)
    share = DeviceShare(0.5, device.mark, device.clock)

    def step(kind: str, seconds: float) -> None:
        timed = share.begin(kind, kind)  # type: ignore[arg-type]
        device.compute(kind, seconds)
        share.launched(timed)
        share.collected(timed)

    for _ in range(20):
        share.choose(has_images=True, has_text=False)
        step("image", 0.1)
    device.now += 2 * GRACE_S
    turns = []
    for _ in range(20):
        share.choose(has_images=True, has_text=True)
        turns.append(share.turn)
        step(share.turn or "", 0.1)
    assert turns[:4] == ["text", "image", "text", "image"]
