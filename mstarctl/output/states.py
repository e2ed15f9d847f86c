"""Colour roles of states and levels, the same in `top` and in commands. Pure functions."""

from __future__ import annotations

from typing import Final

ROLES: Final = {
    "ok": ("ready", "ok", "finished", "installed", "loaded", "done"),
    "accent": ("starting", "draining", "stopping", "run", "prepare", "info"),
    "warn": ("degraded", "unhealthy", "warn", "warning", "queue", "resume", "stale", "waiting"),
    "bad": ("failed", "silent", "lost", "unusable", "error", "critical"),
    "dim": ("stopped", "sleeping", "cancelled", "n/a", "debug", "disabled"),
}
BY_WORD: Final = {word: role for role, words in ROLES.items() for word in words}


def state_role(word: str) -> str:
    """Return the role of a state or level; empty for an unknown word."""
    return BY_WORD.get(word.strip().lower(), "")


SOURCES: Final = {"api": "node.1", "conductor": "node.2", "supervisor": "node.4"}


def source_role(process: str) -> str:
    """Return the role of a process in logs."""
    return SOURCES.get(process, "node.0")
