"""Effects of one event on a run: actions for the caller, deferred steps and reference counts of values.

Owned by WalkState and shared with its parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVarTuple

from mstar_core.graph.runtime.actions import Action, Actions, Free, Key, Ref
from mstar_core.graph.runtime.frames import Pending

Args = TypeVarTuple("Args")


class ActionQueue:
    """Collects actions and frees each stored value with its last reference.

    Steps are queued and never nested, so that long chains of skipped tasks cannot overflow the stack. A value starts
    with one reference, held by the event that brings it. References other than keys are not counted.
    """

    __slots__ = ("_actions", "_references", "_steps")

    def __init__(self) -> None:
        self._actions: Actions = []
        self._references: dict[Key, int] = {}
        self._steps: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()

    @property
    def stored(self) -> int:
        """Number of values that the caller stores for the run."""
        return len(self._references)

    def act(self, action: Action) -> None:
        """Append an action for the caller."""
        self._actions.append(action)

    def later(self, step: Callable[[*Args], None], *args: *Args) -> None:
        """Call `step` after all steps that are already queued."""
        self._steps.append((step, args))

    def settle(self) -> Actions:
        """Run all queued steps, those that they queue included, and return the actions in order."""
        steps = self._steps
        while steps:
            step, args = steps.popleft()
            step(*args)
        actions, self._actions = self._actions, []
        return actions

    def drop_steps(self) -> None:
        """Discard all queued steps."""
        self._steps.clear()

    def store(self, keys: Iterable[Key]) -> None:
        """Count values that the caller has just stored, with one reference each."""
        for key in keys:
            self._references[key] = 1

    def retain(self, ref: Ref | Pending | None) -> None:
        """Add a reference to a value."""
        if isinstance(ref, Key):
            self._references[ref] += 1

    def release(self, ref: Ref | Pending | None) -> None:
        """Drop a reference to a value and free the value with the last one."""
        if isinstance(ref, Key):
            self._references[ref] -= 1
            if not self._references[ref]:
                del self._references[ref]
                self.act(Free(ref))

    def release_all(self, refs: Iterable[Ref | Pending | None]) -> None:
        """Drop one reference to each value."""
        for ref in refs:
            self.release(ref)

    def free_all(self) -> None:
        """Free every stored value, whatever its reference count."""
        for key in self._references:
            self.act(Free(key))
        self._references.clear()
