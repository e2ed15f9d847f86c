"""Metrics of requests and of a window. Their definitions are part of every result. Pure functions over outcomes.

`DEFINITIONS_VERSION` rises whenever a definition changes; runs of different versions are not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mstarctl.bench.measure.outcome import Outcome, ReceivedChunk
from mstarctl.bench.measure.playback import silences

DEFINITIONS_VERSION: Final = 1
LONGEST_STALL_S: Final = 0.1
"""A longer stall breaks the continuity of speech."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Options of the metrics. is_late: t0 is the intended time, else the sent one."""

    is_late: bool
    deadline_s: float = 0.05
    buffer_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric. kind: modality that a request must ask for, empty for all. is_per_chunk: many values per request.

    is_better_high: for verdicts. sample: False if the value is of the whole window.
    """

    name: str
    unit: str
    definition: str
    kind: str = ""
    is_better_high: bool = False
    is_per_chunk: bool = False
    is_of_window: bool = False


METRICS: Final = (
    Metric(name="latency", unit="ms", definition="t_end - t0, successes only"),
    Metric(name="service", unit="ms", definition="t_end - t_sent, successes only"),
    Metric(name="lag", unit="ms", definition="t_sent - t_intended: what the client could not do in time"),
    Metric(name="ttft", unit="ms", kind="text", definition="first text content chunk - t0"),
    Metric(
        name="itl",
        unit="ms",
        kind="text",
        is_per_chunk=True,
        definition="gap between text chunks / tokens in the later one; all gaps of all requests",
    ),
    Metric(name="tpot", unit="ms", kind="text", definition="(last - first text chunk) / (n - 1), n >= 2 tokens"),
    Metric(
        name="tokens",
        unit="",
        kind="text",
        is_better_high=True,
        definition="tokens of the answer: the server's count, else that of --tokenizer, else chunks",
    ),
    Metric(name="ttfa", unit="ms", kind="audio", definition="first playable PCM byte - t0"),
    Metric(name="audio_s", unit="s", kind="audio", is_better_high=True, definition="PCM bytes / (rate * channels * 2)"),
    Metric(name="rtf", unit="", kind="audio", definition="(last audio byte - t0) / audio seconds"),
    Metric(
        name="rtf_after_first",
        unit="",
        kind="audio",
        definition="(last - first audio byte) / (audio seconds - those of the first chunk)",
    ),
    Metric(
        name="underruns",
        unit="",
        kind="audio",
        definition="stops of a player that starts --play-buffer after the first byte",
    ),
    Metric(name="stall", unit="ms", kind="audio", definition="silence that a listener hears after the start"),
    Metric(
        name="continuity",
        unit="",
        kind="audio",
        is_better_high=True,
        definition="audio seconds / (audio seconds + stall seconds)",
    ),
    Metric(
        name="viability",
        unit="",
        kind="audio",
        is_better_high=True,
        definition="share of chunk gaps not longer than the playing time of the chunk before",
    ),
    Metric(name="ttfi", unit="ms", kind="image", definition="first complete image - t0"),
    Metric(name="chunk", unit="ms", kind="action", definition="last byte of the action chunk - t0"),
    Metric(
        name="control",
        unit="Hz",
        kind="action",
        is_better_high=True,
        definition="used / max(latency, used * dt): the next chunk is computed while `used` actions are executed",
    ),
    Metric(
        name="control_waiting",
        unit="Hz",
        kind="action",
        is_better_high=True,
        definition="used / (latency + used * dt): the robot waits for each chunk",
    ),
    Metric(name="ttfs", unit="ms", kind="tensor", definition="first predicted step - t0"),
    Metric(name="step", unit="ms", kind="tensor", is_per_chunk=True, definition="gaps between predicted steps"),
    Metric(
        name="candidate_rate",
        unit="/s",
        kind="tensor",
        is_better_high=True,
        definition="candidates * horizon * iterations of a plan / latency",
    ),
    Metric(
        name="throughput",
        unit="/s",
        is_of_window=True,
        is_better_high=True,
        definition="successes that ended in the window / window",
    ),
    Metric(name="offered", unit="/s", is_of_window=True, is_better_high=True, definition="intended requests / window"),
    Metric(
        name="goodput",
        unit="/s",
        is_of_window=True,
        is_better_high=True,
        definition="requests of the window that succeeded and met every term of --slo / window",
    ),
    Metric(name="error_rate", unit="", is_of_window=True, definition="(errors + timeouts) / intended"),
    Metric(
        name="incomplete_rate", unit="", is_of_window=True, definition="still running after the grace time / intended"
    ),
    Metric(
        name="text_rate",
        unit="tok/s",
        kind="text",
        is_of_window=True,
        is_better_high=True,
        definition="text tokens received in the window / window",
    ),
    Metric(
        name="audio_rate",
        unit="x",
        kind="audio",
        is_of_window=True,
        is_better_high=True,
        definition="audio seconds received in the window / window",
    ),
    Metric(
        name="underrun_rate", unit="", kind="audio", is_of_window=True, definition="share of requests with an underrun"
    ),
    Metric(
        name="continuity_ok",
        unit="",
        kind="audio",
        is_of_window=True,
        is_better_high=True,
        definition="share of requests whose longest stall is at most 100 ms",
    ),
    Metric(
        name="image_rate",
        unit="/s",
        kind="image",
        is_of_window=True,
        is_better_high=True,
        definition="images received in the window / window",
    ),
    Metric(
        name="chunk_rate",
        unit="/s",
        kind="action",
        is_of_window=True,
        is_better_high=True,
        definition="action chunks received in the window / window",
    ),
    Metric(
        name="miss_rate",
        unit="",
        kind="action",
        is_of_window=True,
        definition="share of action chunks later than --deadline; a skipped tick is a miss",
    ),
    Metric(name="jitter", unit="ms", kind="action", is_of_window=True, definition="p99 - p50 of chunk"),
    Metric(
        name="step_rate",
        unit="/s",
        kind="tensor",
        is_of_window=True,
        is_better_high=True,
        definition="predicted steps received in the window / window",
    ),
    Metric(
        name="payload",
        unit="B/s",
        is_of_window=True,
        is_better_high=True,
        definition="bytes received in the window / window",
    ),
)
"""Metrics by name. Goals, assertions and comparisons use these names."""

BY_NAME: Final = {metric.name: metric for metric in METRICS}
FIRSTS: Final = ("chunk", "ttfa", "ttft", "ttfi", "ttfs", "latency")
"""Metrics of the first output, in the order in which they judge a model's answers."""
Samples = dict[str, list[float]]


def t0_of(outcome: Outcome, measures: Measures) -> float:
    """Return the time from which a request counts, in seconds."""
    return outcome.due_s if measures.is_late else outcome.sent_s


def samples_of(outcome: Outcome, measures: Measures) -> Samples:
    """Return the values of every metric that one successful request has, in the metrics' units."""
    t0 = t0_of(outcome, measures)
    samples: Samples = {
        "latency": [1e3 * (outcome.end_s - t0)],
        "service": [1e3 * (outcome.end_s - outcome.sent_s)],
        "lag": [1e3 * (outcome.sent_s - outcome.due_s)],
    }
    for kind, values_of in _KINDS.items():
        chunks = outcome.of_kind(kind)
        if chunks:
            samples |= values_of(outcome, chunks, t0, measures)
    return samples


def _text(outcome: Outcome, chunks: Sequence[ReceivedChunk], t0: float, measures: Measures) -> Samples:
    first, last = chunks[0].at_s, chunks[-1].at_s
    told = outcome.usage.get("completion_tokens", 0.0) if outcome.requested == ("text",) else 0.0
    tokens = told or sum(chunk.amount for chunk in chunks)
    # The server's count corrects chunks without one: each then has the same share of it.
    per_chunk = tokens / sum(chunk.amount for chunk in chunks)
    gaps = [
        1e3 * (later.at_s - earlier.at_s) / max(1.0, later.amount * per_chunk)
        for earlier, later in itertools.pairwise(chunks)
    ]
    samples = {"ttft": [1e3 * (first - t0)], "itl": gaps, "tokens": [tokens]}
    return samples | ({"tpot": [1e3 * (last - first) / (tokens - 1)]} if tokens >= 2 and len(chunks) > 1 else {})


def _audio(outcome: Outcome, chunks: Sequence[ReceivedChunk], t0: float, measures: Measures) -> Samples:
    marks, lengths = [chunk.at_s for chunk in chunks], [chunk.amount for chunk in chunks]
    audio_s = sum(lengths)
    stalls = silences(marks, lengths, measures.buffer_s)
    gaps = [later - earlier for earlier, later in itertools.pairwise(marks)]
    samples = {
        "ttfa": [1e3 * (marks[0] - t0)],
        "audio_s": [audio_s],
        "rtf": [(marks[-1] - t0) / audio_s],
        "underruns": [float(len(stalls))],
        "stall": [1e3 * sum(stalls)],
        "continuity": [audio_s / (audio_s + sum(stalls))],
        "longest_stall": [1e3 * max(stalls, default=0.0)],
    }
    if gaps:
        samples["viability"] = [sum(gap <= length for gap, length in zip(gaps, lengths, strict=False)) / len(gaps)]
        samples["rtf_after_first"] = [(marks[-1] - marks[0]) / max(1e-9, audio_s - lengths[0])]
    return samples


def _image(outcome: Outcome, chunks: Sequence[ReceivedChunk], t0: float, measures: Measures) -> Samples:
    return {"ttfi": [1e3 * (chunks[0].at_s - t0)]}


def _action(outcome: Outcome, chunks: Sequence[ReceivedChunk], t0: float, measures: Measures) -> Samples:
    latency_s = chunks[-1].at_s - t0
    samples = {"chunk": [1e3 * latency_s], "missed": [float(latency_s > measures.deadline_s)]}
    used, dt_s = float(outcome.expected.get("used", 0)), float(outcome.expected.get("dt_s", 0.0))
    if used and dt_s:
        samples["control"] = [used / max(latency_s, used * dt_s)]
        samples["control_waiting"] = [used / (latency_s + used * dt_s)]
    return samples


def _tensor(outcome: Outcome, chunks: Sequence[ReceivedChunk], t0: float, measures: Measures) -> Samples:
    marks = [chunk.at_s for chunk in steps_of(chunks)]
    samples = {
        "ttfs": [1e3 * (marks[0] - t0)],
        "step": [1e3 * (later - earlier) for earlier, later in itertools.pairwise(marks)],
    }
    work = float(outcome.expected.get("plan", 0.0))
    return samples | ({"candidate_rate": [work / max(1e-9, outcome.end_s - t0)]} if work else {})


def steps_of(chunks: Sequence[ReceivedChunk]) -> list[ReceivedChunk]:
    """Return one chunk of each predicted step: those with the name of the first."""
    return [chunk for chunk in chunks if chunk.name == chunks[0].name]


_KINDS: Final[dict[str, Callable[[Outcome, Sequence[ReceivedChunk], float, Measures], Samples]]] = {
    "text": _text,
    "audio": _audio,
    "image": _image,
    "action": _action,
    "tensor": _tensor,
}
