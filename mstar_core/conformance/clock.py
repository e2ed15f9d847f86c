"""Fake clock of the in-process runtime and of tests."""

from __future__ import annotations


class FakeClock:
    """Deterministic clock in seconds: advances by `tick` with each reading, by `sleep`, and when `now` is set."""

    def __init__(self, now: float = 100.0, tick: float = 0.0) -> None:
        self.now = now
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance by `seconds`."""
        assert seconds >= 0, "time does not run backwards"
        self.now += seconds
