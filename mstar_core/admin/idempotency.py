"""Idempotency keys: a call that is sent again with the same key is answered as the first was, and does nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from mstar_core.admin.responses import StateConflict
from mstar_core.errors import UsageError

KEPT: Final = 256
LONGEST: Final = 200


class Once:
    """The answers of the last 256 keys. Owned by the admin server."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()

    def run(self, key: str | None, what: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer of `act`, or the one it gave before under this key. Raises Conflict for another act's key."""
        if not key:
            return act()
        if len(key) > LONGEST:
            raise UsageError("the Idempotency-Key is too long", f"{len(key)} characters", f"at most {LONGEST}")
        if key in self._answers:
            before, answer = self._answers[key]
            if before != what:
                raise StateConflict(
                    "this Idempotency-Key was used for another call", before, "use a new key for each call"
                )
            return answer
        answer = act()
        self._answers[key] = (what, answer)
        if len(self._answers) > KEPT:
            self._answers.popitem(last=False)
        return answer
