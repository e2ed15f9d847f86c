"""Division of a node's device time between image passes and text, by weighted fair queueing. Used by the KV scheduler.

An image pass reads the cache without writing to it: a denoising step of an image. Text is everything else of a node
that samples: prefill chunks and decode steps. While only one kind waits, it has the whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from mstar_core.engine.marks import Mark, marks_of

Kind = Literal["image", "text"]
IMAGE: Final[Kind] = "image"
TEXT: Final[Kind] = "text"

HEAD_START_S: Final = 0.010
"""Time before the expected end of a step at which the next one is prepared, so that the device never idles.

Text that arrives waits for the running image pass and at most this much more.
"""

GRACE_S: Final = 0.05
"""Absence after which a kind starts level again. An image is absent between its steps, text between its runs."""

ENGAGED_S: Final = 1.0
"""Time after the last image pass for which steps of text are timed as well."""

MOST_SIZES: Final = 256
"""Sizes of steps whose duration is remembered."""


@dataclass(slots=True)
class TimedStep:
    """One step on the device. size: steps of equal size take about as long.

    expected_s: duration of the last one of this size; None if there was none. is_prefill: it is followed by more steps
    of the same text, which wait for its collection. started: when the host saw it begin.
    seconds: its duration once it is over.
    """

    kind: Kind
    size: Hashable
    begin: Mark
    clock: Callable[[], float]
    expected_s: float | None
    is_prefill: bool = False
    end: Mark | None = None
    started: float | None = None
    seconds: float | None = None
    is_collected: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the device has computed it."""
        if self.seconds is None and self.end is not None and self.end.is_passed:
            self.seconds = self.begin.seconds_until(self.end)
        return self.seconds is not None

    @property
    def is_nearly_over(self) -> bool:
        """Whether the step behind it should be prepared now."""
        if self.is_over:
            return True
        if self.started is None and self.begin.is_passed:
            self.started = self.clock()
        if self.expected_s is None:
            return False
        if self.expected_s <= HEAD_START_S:
            return True
        return self.started is not None and self.clock() >= self.started + self.expected_s - HEAD_START_S


@dataclass(slots=True)
class DeviceShare:
    """Device time of one node by kind. Owned by its scheduler.

    image_share: share of image passes while text waits too. mark: returns a mark behind all launched work.
    used_s: device seconds of steps that are over, divided by the kind's share. seen: when a kind last waited or ran.
    turn: kind of the next step; None if it must wait for a running image pass.
    """

    image_share: float
    mark: Callable[[], Mark]
    clock: Callable[[], float]
    turn: Kind | None = TEXT
    used_s: dict[Kind, float] = field(default_factory=lambda: {IMAGE: 0.0, TEXT: 0.0})
    seen: dict[Kind, float] = field(default_factory=lambda: {IMAGE: float("-inf"), TEXT: float("-inf")})
    _steps: list[TimedStep] = field(default_factory=list)
    _prefills: int = 0
    _durations: dict[Hashable, float] = field(default_factory=dict)

    @property
    def is_engaged(self) -> bool:
        """Whether images are made at this node at present."""
        return self.clock() - self.seen[IMAGE] < ENGAGED_S

    def choose(self, *, has_images: bool, has_text: bool) -> None:
        """Set the kind of the next step among those that wait."""
        now = self.clock()
        for kind, waits in ((IMAGE, has_images), (TEXT, has_text)):
            if waits and now - self.seen[kind] > GRACE_S and not any(step.kind == kind for step in self._steps):
                # Without the last steps, which are not settled yet: time spent waiting for them is credited.
                self.used_s[kind] = max(self.used_s[kind], self.used_s[TEXT if kind == IMAGE else IMAGE])
            if waits:
                self.seen[kind] = now
        self._settle()
        has_text = has_text or self._prefills > 0
        is_image = has_images and (not has_text or self._expected(IMAGE) < self._expected(TEXT))
        self.turn = IMAGE if is_image else TEXT
        if is_image and any(step.kind == IMAGE and not step.is_collected for step in self._steps):
            self.turn = None

    def begin(self, kind: Kind, size: Hashable, *, is_prefill: bool = False) -> TimedStep:
        """Start timing a step that is about to be launched."""
        self._settle()
        self.seen[kind] = self.clock()
        step = TimedStep(kind, size, self.mark(), self.clock, self._durations.get(size), is_prefill)
        self._prefills += is_prefill
        self._steps.append(step)
        return step

    def launched(self, step: TimedStep) -> None:
        """Note the end of a step on the device, once all its work is launched."""
        step.end = self.mark()

    def collected(self, step: TimedStep) -> None:
        """Note that the results of a step are routed; what follows it may be launched."""
        step.is_collected = True
        self._prefills -= step.is_prefill
        self.seen[step.kind] = self.clock()

    def _expected(self, kind: Kind) -> float:
        """Return the time of a kind, with that of its steps in flight as far as it is known."""
        ahead = sum(step.expected_s or 0.0 for step in self._steps if step.kind == kind)
        return self.used_s[kind] + ahead / self._share_of(kind)

    def _share_of(self, kind: Kind) -> float:
        return self.image_share if kind == IMAGE else 1.0 - self.image_share

    def _settle(self) -> None:
        """Add the time of steps that are over."""
        running = []
        for step in self._steps:
            if not step.is_over:
                running.append(step)
                continue
            assert step.seconds is not None
            self.used_s[step.kind] += step.seconds / self._share_of(step.kind)
            if len(self._durations) >= MOST_SIZES:
                self._durations.clear()
            self._durations[step.size] = step.seconds
        self._steps = running


def device_share(image_share: float, device: torch.device, clock: Callable[[], float]) -> DeviceShare:
    """Return the share of a node on a device, timed by CUDA events or by the host."""
    return DeviceShare(image_share, marks_of(device, clock), clock)
