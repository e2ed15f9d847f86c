"""Edges, streams and chunk policies: how values move between nodes, to the client and between partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mstar_core.graph.spec.nodes import CLIENT, NodeSpec


@dataclass(frozen=True, slots=True)
class FixedChunk:
    """Ready when `size` items are buffered; a pop takes them all.

    tail: what becomes of fewer than `size` items at the end (`drop`, or `flush` once).
    after_end: `stop` ends the consumer's loop with the stream, `empty` keeps polling with an absent port.
    """

    size: int
    tail: Literal["drop", "flush"] = "flush"
    after_end: Literal["stop", "empty"] = "stop"


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Ready when `window` items are buffered; a pop hands over `window` and advances by `stride`.

    first: items that make a stream's first chunk, at most `window`: a shorter one comes earlier, with less behind it.
    The chunks after it are those of the plain policy from its second on, so that only the first one differs.
    first_from: name of a whole-number parameter that gives `first` in a request, counted in strides.
    """

    window: int
    stride: int
    tail: Literal["drop", "flush"] = "drop"
    after_end: Literal["stop", "empty"] = "stop"
    first: int | None = None
    first_from: str | None = None

    def for_request(self, params: Mapping[str, object]) -> SlidingWindow:
        """The policy with the numbers of one request, whose checked parameters are `params`."""
        strides = params.get(self.first_from) if self.first_from is not None else None
        return self if not isinstance(strides, int) else replace(self, first=min(strides * self.stride, self.window))


@dataclass(frozen=True, slots=True)
class LeftContext:
    """Ready when `chunk` new items are buffered; a pop hands over them with up to `left` earlier ones in front.

    chunk_from, left_from: names of whole-number parameters whose value in a request takes the place of the number.
    """

    chunk: int
    left: int
    tail: Literal["drop", "flush"] = "flush"
    after_end: Literal["stop", "empty"] = "stop"
    chunk_from: str | None = None
    left_from: str | None = None

    def for_request(self, params: Mapping[str, object]) -> LeftContext:
        """The policy with the numbers of one request, whose checked parameters are `params`."""
        chunk = params.get(self.chunk_from) if self.chunk_from is not None else None
        left = params.get(self.left_from) if self.left_from is not None else None
        return replace(
            self,
            chunk=chunk if isinstance(chunk, int) else self.chunk,
            left=left if isinstance(left, int) else self.left,
        )


ChunkPolicy = FixedChunk | SlidingWindow | LeftContext


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of items into one port of a node in another partition.

    into: (node, input port). chunk: when the consumer may run. accept: ids outside this range are dropped before
    they are counted (special ids never enter a window). flush_if: name of a boolean parameter; when it is true the
    end of the stream hands over one final chunk whatever the policy's `tail` says (for a sliding window: the last
    whole strides, at most `window` items, even if an earlier chunk held them), with CHUNK_LAST true.
    """

    name: str
    into: tuple[NodeSpec, str]
    chunk: ChunkPolicy
    accept: range | None = None
    flush_if: str | None = None


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Route of an output port. `to` is a node or CLIENT; `into` renames the port at the consumer.

    A port that is not produced in an iteration does not fire its edge.
    """

    port: str
    to: NodeSpec | str
    into: str | None = None
    modality: str | None = None

    @property
    def is_client(self) -> bool:
        return self.to == CLIENT

    @property
    def target_port(self) -> str:
        return self.into or self.port


@dataclass(frozen=True, slots=True)
class StreamingGraphEdge:
    """Puts the port's value on a stream to another partition."""

    port: str
    stream: Stream


Edge = GraphEdge | StreamingGraphEdge
