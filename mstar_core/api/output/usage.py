"""What a request used: tokens, sound, times. One object on every route."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.api.output.encode import OutputEncoder
from mstar_core.graph.spec.walks import Walk, graph_nodes, loops
from mstar_core.plugin.spec import ModelSpec

MEDIA: Final = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class SampledPorts:
    """Where a model samples ids. ports: of nodes; looped: loop -> its node; firsts: nodes of walks without a loop."""

    ports: frozenset[str]
    looped: Mapping[str, str]
    firsts: frozenset[str]

    @classmethod
    def by(cls, spec: ModelSpec) -> SampledPorts:
        """Of one model: its walks are gone through once, not for each answer."""
        walks = [walk for partition in spec.partitions for walk in partition.walks.values()]
        return cls(
            ports=frozenset(node.sampling.port for node in spec.nodes if node.sampling is not None),
            looped={loop.name: node for walk in walks for loop in loops(walk) for node in _samplers(loop.body)},
            firsts=frozenset(node for walk in walks if not any(True for _ in loops(walk)) for node in _samplers(walk)),
        )

    def tokens(self, counts: Mapping[str, int]) -> int:
        """Ids that the model's language parts sampled, the stop id included.

        Counted by the ports that nodes sample into; where the counts name none, by the loops that sample.
        """
        if any(port in counts for port in self.ports):
            return sum(counts.get(port, 0) for port in self.ports)
        ran = {name: node for name, node in self.looped.items() if name in counts}
        # What a prefill samples is the first id; the loop that follows it counts the others.
        return sum(counts[name] for name in ran) + len(self.firsts & set(ran.values()))


def _samplers(walk: Walk) -> set[str]:
    return {node.spec.name for node in graph_nodes(walk) if node.spec.sampling is not None}


def usage_of(
    spec: ModelSpec,
    sampled: SampledPorts,
    presenter: OutputEncoder,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    counts: Mapping[str, int],
    media: Mapping[str, int],
) -> dict[str, Any]:
    """The usage object. media: prompt tokens by kind of segment; what is of no kind of media is text."""
    made = max(sampled.tokens(counts), presenter.text_tokens)
    has_audio = spec.output("audio") is not None
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "text_tokens": max(0, prompt_tokens - sum(media.get(kind, 0) for kind in MEDIA)),
            **{f"{kind}_tokens": media.get(kind, 0) for kind in MEDIA},
        },
        "completion_tokens_details": {
            "text_tokens": presenter.text_tokens,
            "audio_tokens": made - presenter.text_tokens if has_audio else 0,
            "reasoning_tokens": 0,
        },
    }


def native_usage(usage: Mapping[str, Any], presenter: OutputEncoder, times_ms: Mapping[str, float]) -> dict[str, Any]:
    """The same with what only our own route tells."""
    extra: dict[str, Any] = {
        "images": presenter.images, "audio_seconds": round(presenter.audio_seconds, 6),
        "action_steps": presenter.action_steps, "frames": presenter.frames,
    }  # fmt: skip
    return {**usage, **extra, **{name: round(value, 3) for name, value in times_ms.items()}}
