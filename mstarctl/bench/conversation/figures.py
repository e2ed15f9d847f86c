"""Figures of spoken conversations, with their definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mstarctl.bench.conversation.outcome import ConversationOutcome, TurnOutcome
from mstarctl.bench.measure.load_metrics import Metric
from mstarctl.bench.measure.playback import silences
from mstarctl.bench.measure.statistics import spread

SPREADS: Final[Mapping[str, str]] = {
    "first_audio": "ms from `speech_stopped` to the first sound of the answer",
    "gap": "ms from the end of the spoken sound to the first sound of the answer, with the silence that ends a turn",
    "interrupt": "ms from `speech_started` during an answer to its last sound; 0 if none arrived after it",
    "lag": "ms that the client sent 20 ms of the microphone late; large values mean that the client is too slow",
}
"""Figures in ms with percentiles."""

COUNTS: Final[Mapping[str, str]] = {
    "underruns": "gaps in the playback of answers, started with their first sound",
    "false_starts": "speech found in silence",
    "splits": "answers that began within a turn, because a pause in it was long enough to end it",
    "completed": "turns whose answer came to its end, the limit of tokens included (`incomplete`, `max_output_tokens`)",
    "interrupted": "turns whose answer the next turn interrupted, while it was generated or played",
    "unanswered": "turns without sound of an answer",
    "errors": "error events, failed responses and broken connections",
}
SHARES: Final[Mapping[str, str]] = {
    "cached": "share of the prompt tokens of later turns that came from the prefix cache; without cancelled answers",
    "memory_growth": "growth of the memory of all processes from the middle of the run to its end, as a share",
}
DEFINITIONS: Final[Mapping[str, str]] = {**SPREADS, **COUNTS, **SHARES}
METRICS: Final[Mapping[str, Metric]] = {
    **{name: Metric(name=name, unit="ms", definition=text) for name, text in SPREADS.items()},
    **{
        name: Metric(name=name, unit="", definition=text, is_of_window=True)
        for name, text in {**COUNTS, **SHARES}.items()
    },
}
"""Metrics that assertions may name."""


def figures(outcomes: Sequence[ConversationOutcome]) -> dict[str, Any]:
    """Return the figures by their names in `DEFINITIONS`, and the counts of sessions and turns."""
    turns = [turn for outcome in outcomes for turn in outcome.turns]
    later = [turn for outcome in outcomes for turn in outcome.turns[1:]]
    answered = [turn for turn in turns if turn.is_answered]
    read = sum(turn.input_tokens for turn in later)
    return {
        "sessions": len(outcomes),
        "turns": len(turns),
        "first_audio": spread([1000 * (turn.marks[0] - turn.stopped) for turn in answered if turn.stopped is not None]),
        "gap": spread([1000 * (turn.marks[0] - turn.spoken) for turn in answered]),
        "interrupt": spread([_late_ms(turn) for turn in answered if turn.interrupted is not None]),
        "lag": spread([1000 * lag for outcome in outcomes for lag in outcome.lags_s]),
        "underruns": sum(len(_gaps(turn)) for turn in answered),
        "false_starts": sum(outcome.false_starts for outcome in outcomes),
        "splits": sum(turn.splits for turn in turns),
        "completed": sum(turn.is_completed for turn in turns),
        "interrupted": sum(turn.interrupted is not None for turn in turns),
        "unanswered": len(turns) - len(answered),
        "errors": sum(len(outcome.errors) for outcome in outcomes),
        "causes": dict(Counter(turn.cause for turn in turns if turn.cause)),
        "cached": round(sum(turn.cached_tokens for turn in later) / read, 4) if read else None,
        "memory_growth": None,
    }


def by_metric(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return figures in the form that assertions read."""
    return {name: found[name] if name in SPREADS else {"value": found[name]} for name in METRICS}


def _late_ms(turn: TurnOutcome) -> float:
    """Return the milliseconds for which sound arrived after an interrupt."""
    return max(0.0, 1000 * (turn.marks[-1] - (turn.interrupted or 0.0)))


def _gaps(turn: TurnOutcome) -> list[float]:
    """Return the gaps of an answer that were heard: those before its interrupt."""
    end = turn.interrupted
    heard = [(mark, length) for mark, length in zip(turn.marks, turn.lengths, strict=True) if end is None or mark < end]
    return silences([mark for mark, _ in heard], [length for _, length in heard])
