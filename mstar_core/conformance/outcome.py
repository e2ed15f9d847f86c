"""What became of a request, as its client would see it. Made by the desk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mstar_core.messages.requests import ErrorInfo

if TYPE_CHECKING:
    from mstar_core.transport.dtypes import Array

Status = Literal["finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One value that a worker sent for the client."""

    modality: str
    port: str
    array: Array
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One item as bytes, and what the processor says about it."""

    modality: str
    data: bytes
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A request that ended. outputs: all bytes of a modality. reason: `stop` or `length` of one that finished.

    counts: of loops and ports, over all walks. error: why it failed.
    """

    status: Status
    outputs: Mapping[str, bytes]
    chunks: tuple[Chunk, ...]
    items: tuple[Item, ...]
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    error: ErrorInfo | None = None

    @property
    def cause(self) -> str:
        """Why it failed, in one line."""
        if self.error is None:
            return ""
        return f"{self.error.message}: {self.error.detail}" if self.error.detail else self.error.message

    def of(self, port: str) -> list[Array]:
        """The values of one port, in order."""
        return [item.array for item in self.items if item.port == port]
