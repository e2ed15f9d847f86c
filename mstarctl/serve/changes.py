"""Changes of the models of a gateway, as lines for the terminal in which it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

STEP_PERCENT: Final = 10
"""Least progress of a load or wake between two lines about it."""

MOVING: Final = ("loading", "sleeping", "failed", "absent")
"""States of which a line says why. Between `ready` and `idle` a model changes with each request."""


@dataclass(slots=True)
class ModelChanges:
    """The models as they were last told. said: by name, the state and the tens of percent of its progress."""

    said: dict[str, tuple[str, int]] = field(default_factory=dict)

    def lines(self, items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield a line for each model whose state has changed, or whose load or wake went on."""
        for item in items:
            name, state = str(item["name"]), str(item["state"])
            shown = state if state in MOVING else "ready"
            percent = percent_of(item)
            now = (shown, -1 if percent is None else percent // STEP_PERCENT)
            before = self.said.get(name)
            self.said[name] = now
            if now == before or before is None and shown == "absent":
                continue
            why = progress_text(item) or (" ".join(str(item.get("reason") or "").split()) if shown in MOVING else "")
            yield f"{name}: {shown}{' ' if why else ''}{why}"


def percent_of(item: Mapping[str, Any]) -> int | None:
    """Return the progress of a model's load or wake in percent, None if it is not known."""
    share = (item.get("progress") or {}).get("share")
    return None if share is None else int(100 * share)


def places_text(places: Sequence[Mapping[str, Any]]) -> str:
    """Return the hosts of a model's deployments, such as `local, 2 gpu7, 1 gpu8 lost`; empty if none runs."""
    counts: dict[str, int] = {}
    for each in places:
        is_serving = each["state"] in ("ready", "idle")
        shown = each["host"] if is_serving else f"{each['host']} {each['state']}"
        counts[shown] = counts.get(shown, 0) + 1
    return ", ".join(shown if count == 1 else f"{count} {shown}" for shown, count in counts.items())


def progress_text(item: Mapping[str, Any]) -> str:
    """Return the progress of a model such as `40 % wake`; empty for one that does not load."""
    progress = item.get("progress")
    if not progress:
        return ""
    percent = percent_of(item)
    return f"{'' if percent is None else f'{percent} % '}{progress['text']}"
