"""Selection of the frames of a clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mstar_core.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Frames that a request asks for. default: the number of frames without num_frames and fps."""

    num_frames: int | None
    fps: float | None
    default: int

    def count(self, total: int, rate: float) -> int:
        """Return how many of `total` frames to take. rate: frames per second, 0 = unknown. Raises RequestError."""
        if self.num_frames is not None:
            if self.num_frames > total:
                raise RequestError(
                    f"num_frames is {self.num_frames}, the clip has {total}",
                    hint=f"send a longer clip, or num_frames <= {total}",
                    field="num_frames",
                    value=str(self.num_frames),
                    allowed=f"<= {total}",
                )
            return self.num_frames
        if self.fps is not None:
            return self._by_rate(self.fps, total, rate)
        if total >= self.default:
            return self.default
        return total - total % 2 if total > 1 else total

    def _by_rate(self, fps: float, total: int, rate: float) -> int:
        if not 0 < rate < float("inf"):
            raise RequestError("fps needs a clip with a known frame rate", hint="send num_frames", field="fps")
        count = max(1, int(total / rate * fps))
        if count > total:
            raise RequestError(
                f"fps is {fps:g}, the clip has {rate:g} frames a second",
                hint=f"send fps <= {rate:g}",
                field="fps",
                value=f"{fps:g}",
                allowed=f"<= {rate:g}",
            )
        return count

    def notes(self, total: int, taken: int, tubelet: int) -> list[str]:
        """Return the warnings about the selected frames."""
        notes = []
        if self.num_frames is None and self.fps is None and taken < self.default:
            notes.append(f"the clip has {total} frames, fewer than {self.default}: {taken} of them were used")
        if taken > tubelet and taken % tubelet:
            notes.append(f"{taken} frames were used; the last {taken % tubelet} fill no tubelet and were dropped")
        return notes


def spread(total: int, count: int) -> Sequence[int]:
    """Return `count` indices spread evenly over `total`: floor(i * total / count)."""
    return [index * total // count for index in range(count)]
