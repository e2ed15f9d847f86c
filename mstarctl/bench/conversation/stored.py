"""Result of spoken conversations: its facts, its folder and its table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mstarctl.bench.conversation.figures import COUNTS, SPREADS
from mstarctl.bench.conversation.outcome import ConversationOutcome
from mstarctl.bench.result import ENVIRONMENT, RESULT, SCHEMA, begin, finish, write_json
from mstarctl.bench.show.table import assert_line
from mstarctl.output.units import size_text

KIND: Final = "conversations"
TURNS: Final = "turns.jsonl"
MEMORY: Final = "memory.jsonl"


def facts_of(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a stored result of conversations; None for anything else."""
    try:
        facts = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.get("kind") == KIND else None


def reserve(folder: Path) -> Path:
    """Make the folder that `store` completes. Raises ConfigError if the result exists."""
    return begin(folder)


def store(
    partial: Path,
    folder: Path,
    facts: Mapping[str, Any],
    outcomes: Sequence[ConversationOutcome],
    environment: Mapping[str, Any],
    memory: Sequence[Mapping[str, Any]],
) -> Path:
    """Write a result: figures, all turns with their times, memory, environment. Returns its folder."""
    with (partial / TURNS).open("w") as file:
        for number, outcome in enumerate(outcomes):
            for turn in outcome.turns:
                file.write(json.dumps({"session": number, **dataclasses.asdict(turn), "cause": turn.cause}) + "\n")
    with (partial / MEMORY).open("w") as file:
        file.writelines(json.dumps(reading) + "\n" for reading in memory)
    write_json(partial / ENVIRONMENT, dict(environment))
    write_json(partial / RESULT, {"schema": SCHEMA, **facts})
    return finish(partial, folder)


def lines_of(facts: Mapping[str, Any]) -> list[str]:
    """Return a result as a table."""
    found = facts["figures"]
    lines = [f"{'ms':<14}{'n':>6}{'p50':>10}{'p95':>10}{'max':>10}"]
    for name in SPREADS:
        values = found[name]
        cells = "".join(f"{values[key]:>10.1f}" if key in values else f"{'-':>10}" for key in ("p50", "p95", "max"))
        lines.append(f"{name:<14}{values['n']:>6}{cells}")
    lines.append(f"{'turns':<14}{found['turns']:>6}")
    lines += [f"{name:<14}{found[name]:>6}" for name in COUNTS]
    lines += [f"  {count} x {cause}" for cause, count in found["causes"].items()]
    lines.append(f"{'cached':<14}{_percent(found['cached']):>6}")
    if facts.get("memory"):
        lines.append(f"{'memory_growth':<14}{_percent(found['memory_growth']):>6}")
        places = facts["memory"]
        names = list(dict.fromkeys(name for place in places for name in place["resident_bytes"]))
        lines.append(f"{'memory at':<14}" + "".join(f"{place['t_s']:>10.0f} s" for place in places))
        for name in names:
            sizes = (place["resident_bytes"].get(name, 0) for place in places)
            lines.append(f"  {name:<12}" + "".join(f"{size_text(size):>12}" for size in sizes))
    return [*lines, *(assert_line(judged) for judged in facts.get("asserts", ()))]


def places_of(memory: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first, the middle and the last reading."""
    if len(memory) < 3:
        return list(memory)
    return [memory[0], memory[len(memory) // 2], memory[-1]]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
