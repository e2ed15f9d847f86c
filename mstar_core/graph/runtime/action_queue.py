"""What one event leads to: actions for the caller, steps of our own. Owned by WalkState, filled by it and its parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVarTuple

from mstar_core.graph.runtime.actions import Action, Actions

Given = TypeVarTuple("Given")


class Agenda:
    """Steps are queued and never nested, so that long chains of skipped parts cannot overflow the stack."""

    __slots__ = ("_actions", "_steps")

    def __init__(self) -> None:
        self._actions: Actions = []
        self._steps: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()

    def act(self, action: Action) -> None:
        """Ask the caller for something."""
        self._actions.append(action)

    def later(self, step: Callable[[*Given], None], *given: *Given) -> None:
        """Call `step` with `given` after the steps that are queued already."""
        self._steps.append((step, given))

    def settle(self) -> Actions:
        """Take all steps, those that they queue included, and give the actions asked for, in order."""
        steps = self._steps
        while steps:
            step, given = steps.popleft()
            step(*given)
        actions, self._actions = self._actions, []
        return actions

    def drop_steps(self) -> None:
        """Forget what was to be done later."""
        self._steps.clear()
