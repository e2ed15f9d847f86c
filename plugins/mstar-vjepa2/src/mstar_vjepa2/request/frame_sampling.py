"""Which frames of a clip V-JEPA 2 looks at. Whole-number arithmetic, no media."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mstar_core.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a request asks for. default: frames that are taken when it asks for nothing."""

    num_frames: int | None
    fps: float | None
    default: int

    def count(self, total: int, rate: float) -> int:
        """Frames to take of `total` at `rate` a second (0: not known). Raises RequestError naming the field."""
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
            raise RequestError(
                "fps cannot be kept: the clip does not say how fast it runs", hint="send num_frames", field="fps"
            )
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
        """What a client should know about the frames taken."""
        found = []
        if self.num_frames is None and self.fps is None and taken < self.default:
            found.append(f"the clip has {total} frames, fewer than {self.default}: {taken} of them were taken")
        if taken > tubelet and taken % tubelet:
            found.append(f"{taken} frames were taken; the last {taken % tubelet} fill no tubelet and were left out")
        return found


def spread(total: int, count: int) -> Sequence[int]:
    """Indices of `count` frames, evenly over `total`: floor(i * total / count)."""
    return [index * total // count for index in range(count)]
