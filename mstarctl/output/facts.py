"""Short texts that commands and `top` share: facts of an event, ticks of a control loop. Pure functions."""

from __future__ import annotations

from typing import Any, Final

from mstarctl.output.table import escape
from mstarctl.output.units import counted, duration_text, size_text

AMOUNTS: Final = ("pages", "requests", "rows", "tokens", "bytes")
SUBJECTS: Final = ("request", "child", "node")
HOST: Final = "host"
"""Subject of an event without another one."""


def facts_text(facts: dict[str, Any]) -> str:
    """Format facts as `r-7f11 96 pages (pool full)`: the subject, `key value` pairs, the reason. Zeros are omitted."""
    if "phase" in facts and "after" in facts:
        return _phase_text(facts)
    subjects = [key for key in SUBJECTS if facts.get(key) not in (None, "")] or [HOST]
    words = [str(facts[key]) for key in subjects if key in facts]
    for key, value in facts.items():
        if key in (*SUBJECTS, *subjects, "why", "cause") or value in (None, "", 0, [], {}):
            continue
        words.append(_fact(key, value))
    why = facts.get("why") or facts.get("cause")
    if isinstance(why, dict):
        why = why.get("message") or why.get("reason")
    return escape(" ".join(words) + (f" ({why})" if why else "")).strip()


def _phase_text(facts: dict[str, Any]) -> str:
    """Format a phase of a start and the previous one's duration: `worker-0 enters device (cpu)   spawn took 5.1 s`."""
    detail, took = facts.get("detail"), facts.get("after_s")
    text = f"{facts.get('child', '')} enters {facts['phase']}" + (f" ({detail})" if detail else "")
    return escape(text + (f"   {facts['after']} took {duration_text(float(took))}" if took else "")).strip()


def _fact(key: str, value: Any) -> str:
    if isinstance(value, float) and key.endswith("_s"):
        return f"{key.removesuffix('_s').replace('_', ' ')} {duration_text(value)}"
    if isinstance(value, dict) and key.endswith("_s"):
        parts = ", ".join(f"{name} {duration_text(float(part))}" for name, part in value.items())
        return f"({parts})"
    if isinstance(value, list):
        return f"{key.replace('_', ' ')} {', '.join(str(part) for part in value)}"
    if isinstance(value, int) and key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes').replace('_', ' ')} {size_text(value)}"
    if isinstance(value, int) and key in AMOUNTS:
        return counted(value, key.removesuffix("s"))
    return f"{key.replace('_', ' ')} {value}"


def tick_text(missed_ticks: int | None, *, has_ended: bool) -> str:
    """Format the ticks that one request of a control loop missed: `in time`, `late`, `late +2` if two more passed."""
    if missed_ticks is None or not (missed_ticks or has_ended):
        return ""
    return "in time" if not missed_ticks else "late" if missed_ticks == 1 else f"late +{missed_ticks - 1}"
