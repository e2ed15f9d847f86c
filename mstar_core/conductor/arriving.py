"""Inputs that grow while their request runs. Owned by the conductor's requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mstar_core.messages.requests import MoreInput, NewRequest
    from mstar_core.plugin.program import Numbers


@dataclass(slots=True)
class ArrivingInput:
    """Values that the program has not received yet. is_over: no more follow."""

    name: str
    values: list[int | float] = field(default_factory=list)
    is_over: bool = False

    @property
    def is_ready(self) -> bool:
        """Return whether a program that waits for the input can go on."""
        return bool(self.values) or self.is_over

    def add(self, values: Sequence[int | float], *, is_over: bool) -> None:
        """Append values."""
        self.values += values
        self.is_over |= is_over

    def take(self) -> Numbers | None:
        """Return all values, None if there are none because the input is over."""
        taken, self.values = tuple(self.values), []
        return taken or None


def arriving_inputs(message: NewRequest) -> dict[str, ArrivingInput]:
    """Return the growing inputs of a request, with what is known of them."""
    return {name: ArrivingInput(name, list(known.values), known.is_over) for name, known in message.growing.items()}


def grown(message: NewRequest, more: MoreInput) -> NewRequest:
    """Return the message of a request that has not begun, with more of an input."""
    known = message.growing.get(more.name)
    if known is None:
        return message
    values, is_over = [*known.values, *more.values], known.is_over or more.is_over
    grown_input = msgspec.structs.replace(known, values=values, is_over=is_over)
    return msgspec.structs.replace(message, growing={**message.growing, more.name: grown_input})
