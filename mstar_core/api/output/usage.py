"""Usage object of a request: tokens, audio and times. The same on every route."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.api.output.encode import OutputEncoder
from mstar_core.graph.declare.walks import Walk, graph_nodes, loops
from mstar_core.plugin.check.dry_run import sample_runs
from mstar_core.plugin.program import Run
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import Audio

MEDIA: Final = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class SampledPorts:
    """Sampling ports of a model. ports: of nodes; looped: node by loop; firsts: sampling nodes of loopless walks."""

    ports: frozenset[str]
    looped: Mapping[str, str]
    firsts: frozenset[str]

    @classmethod
    def by(cls, spec: ModelSpec) -> SampledPorts:
        """Collect the ports of a model, once rather than per request."""
        drawn = _drawing_walks(spec)
        walks = [walk for part in spec.partitions for name, walk in part.walks.items() if not drawn or name in drawn]
        return cls(
            ports=frozenset(node.sampling.port for node in spec.nodes if node.sampling is not None),
            looped={loop.name: node for walk in walks for loop in loops(walk) for node in _samplers(loop.body)},
            firsts=frozenset(node for walk in walks if not any(True for _ in loops(walk)) for node in _samplers(walk)),
        )

    def tokens(self, counts: Mapping[str, int]) -> int:
        """Return the number of ids sampled by language models, the stop id included.

        Counted by sampling ports, or by sampling loops if `counts` has no such port.
        """
        if any(port in counts for port in self.ports):
            return sum(counts.get(port, 0) for port in self.ports)
        ran = {name: node for name, node in self.looped.items() if name in counts}
        # The prefill samples the first id, the loop after it the others.
        return sum(counts[name] for name in ran) + len(self.firsts & set(ran.values()))


def _drawing_walks(spec: ModelSpec) -> set[str]:
    """Return the walks that programs let sample, by the model's sample requests; empty if it has none.

    Nodes that sample may also run passes that do not, such as the steps of an image.
    """
    runs = [run for sample in spec.samples for wishes in sample_runs(spec, sample).values() for run in wishes]
    return {run.walk for run in runs if isinstance(run, Run) and run.sample}


def _samplers(walk: Walk) -> set[str]:
    return {node.spec.name for node in graph_nodes(walk) if node.spec.sampling is not None}


def usage_of(
    spec: ModelSpec,
    sampled: SampledPorts,
    encoder: OutputEncoder,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    counts: Mapping[str, int],
    media: Mapping[str, int],
) -> dict[str, Any]:
    """Return the usage object. media: prompt tokens by kind of segment; other kinds count as text."""
    completion, sound = _token_counts(spec, sampled, encoder.text_tokens, counts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "text_tokens": max(0, prompt_tokens - sum(media.get(kind, 0) for kind in MEDIA)),
            **{f"{kind}_tokens": media.get(kind, 0) for kind in MEDIA},
        },
        "completion_tokens_details": {
            "text_tokens": encoder.text_tokens,
            "audio_tokens": sound,
            "reasoning_tokens": 0,
        },
    }


def _token_counts(spec: ModelSpec, sampled: SampledPorts, shown: int, counts: Mapping[str, int]) -> tuple[int, int]:
    """Return all generated tokens, and those of audio among them. shown: ids of text that were sent."""
    audio = spec.output("audio")
    if isinstance(audio, Audio) and audio.token_loop:
        written = sampled.tokens({name: count for name, count in counts.items() if name != audio.token_loop})
        sound = counts.get(audio.token_loop, 0)
        return max(written, shown) + sound, sound
    completion = max(sampled.tokens(counts), shown)
    return completion, completion - shown if audio is not None else 0


def native_usage(usage: Mapping[str, Any], encoder: OutputEncoder, times_ms: Mapping[str, float]) -> dict[str, Any]:
    """Return the usage object with the fields that only /generate has."""
    extra: dict[str, Any] = {
        "images": encoder.images,
        "audio_seconds": round(encoder.audio_seconds, 6),
        "action_steps": encoder.action_steps,
        "frames": encoder.frames,
    }
    return {**usage, **extra, **{name: round(value, 3) for name, value in times_ms.items()}}
