"""Figures of one request as its deployment reports them, and how they are booked."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Final

from mstar_core.observe.frames import RequestStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a request. Fields are columns of the store.

    input_tokens: cached ones included. device_s: its share of the time in steps of all ranks that computed for it.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    audio_in_s: float = 0.0
    audio_out_s: float = 0.0
    images: int = 0
    video_s: float = 0.0
    device_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Return what counts against a quota of tokens."""
        return self.input_tokens + self.output_tokens

    @property
    def audio_s(self) -> float:
        """Return what counts against a quota of audio."""
        return self.audio_in_s + self.audio_out_s

    def values(self) -> tuple[float, ...]:
        """Return the figures in the order of `COLUMNS`."""
        return astuple(self)

    def minus(self, other: Figures) -> Figures:
        """Return the difference of two reports about one request."""
        return Figures(**{name: getattr(self, name) - getattr(other, name) for name in COLUMNS})


COLUMNS: Final = tuple(field.name for field in fields(Figures))
"""Columns of the tables `reports` and `usage`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """Report of a deployment about one request. id: unique over all deployments and their starts.

    request: id of the forwarded request that it is, or is a part of. deployment: that reports it.
    """

    id: str
    request: str
    deployment: str
    figures: Figures


def report_of(status: RequestStatus, deployment: str, boot: str) -> UsageReport:
    """Return the report of an ended request. boot: of this start of the deployment."""
    return UsageReport(
        id=f"{boot}/{status.handle}",
        request=status.parent or status.id,
        deployment=deployment,
        figures=Figures(
            input_tokens=status.prompt_tokens,
            cached_tokens=status.cached_tokens,
            output_tokens=status.tokens,
            audio_in_s=status.audio_in_s,
            audio_out_s=status.audio_s,
            images=status.images,
            video_s=status.video_s,
            device_s=status.device_s,
        ),
    )
