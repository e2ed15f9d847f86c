"""A response of the model: settings, outputs, state. Changed by its writer, shown by the dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mstar_core.api.errors import ErrorReply
from mstar_core.api.realtime.history import new_id
from mstar_core.api.realtime.items import CallEntry, Entry, MessageEntry, SpokenPart
from mstar_core.api.realtime.settings import RealtimeSettings
from mstar_core.api.realtime.sound.spoken import SpokenText

ResponseState = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]
StopReason = Literal["turn_detected", "client_cancelled", "max_output_tokens"]


@dataclass(slots=True, eq=False)
class OpenOutput:
    """An output item of a response. index: its place among the outputs."""

    index: int
    entry: MessageEntry | CallEntry


@dataclass(slots=True, eq=False, kw_only=True)
class RealtimeResponse:
    """A response. is_apart: its items do not join the conversation. metadata: of the client.

    reason: why it has no regular end. error: of a failed one. usage: token counts, empty before its end.
    """

    settings: RealtimeSettings
    id: str = field(default_factory=lambda: new_id("resp"))
    is_apart: bool = False
    metadata: Mapping[str, str] | None = None
    state: ResponseState = "in_progress"
    reason: StopReason | None = None
    error: ErrorReply | None = None
    outputs: list[OpenOutput] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state != "in_progress"

    @property
    def speech(self) -> SpokenText | None:
        """Return the last speech of the response."""
        parts = [part for output in self.outputs for part in _parts(output.entry)]
        return next((part.spoken for part in reversed(parts) if isinstance(part, SpokenPart)), None)


def _parts(entry: Entry) -> list[Any]:
    return entry.parts if isinstance(entry, MessageEntry) else []
