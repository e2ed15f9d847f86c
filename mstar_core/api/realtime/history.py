"""Items of a conversation in order, by id, and those that stay in a full context. Owned by the conversation."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Final

from mstar_core.api.realtime.items import CallEntry, Entry, MessageEntry, ResultEntry
from mstar_core.api.realtime.settings import Truncation
from mstar_core.errors import NotFound, RequestError

ROOT: Final = "root"
"""The place before the first item, as clients name it."""

MOST_ITEMS: Final = 4096
ID_CHARS: Final = 128


def new_id(kind: str) -> str:
    """Return an id such as `item_...`."""
    return f"{kind}_{secrets.token_hex(11)}"


class History:
    """The items. Methods raise RequestError with the field of the client's event."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last_id(self) -> str | None:
        """Return the id of the last item, None if there is none."""
        return self._entries[-1].id if self._entries else None

    def insert(self, entry: Entry, after: str | None = None) -> str | None:
        """Insert an item behind another, by default at the end. Returns the id of the one before it, None for none."""
        if any(each.id == entry.id for each in self._entries):
            raise RequestError(
                f"an item has the id {entry.id[:80]!r} already", hint="use another id, or omit it", field="item.id"
            )
        if len(self._entries) >= MOST_ITEMS:
            raise RequestError(f"the conversation has {MOST_ITEMS} items", hint="delete some", field="item")
        if isinstance(entry, ResultEntry) and not self._has_call(entry.call_id):
            raise RequestError(
                f"no item is the call {entry.call_id[:80]!r}",
                hint="create its function_call first",
                field="item.call_id",
            )
        place = len(self._entries)
        if after is not None:
            place = 0 if after == ROOT else self._place(after, "previous_item_id") + 1
        self._entries.insert(place, entry)
        return self._entries[place - 1].id if place else None

    def find(self, item_id: str) -> Entry:
        """Return the item of an id."""
        return self._entries[self._place(item_id, "item_id")]

    def holds(self, item_id: str) -> bool:
        """Return whether there is an item of this id."""
        return any(entry.id == item_id for entry in self._entries)

    def before(self, item_id: str) -> str | None:
        """Return the id of the item before another, None for the first."""
        place = self._place(item_id, "item_id")
        return self._entries[place - 1].id if place else None

    def delete(self, item_id: str) -> Entry:
        """Remove an item and return it."""
        return self._entries.pop(self._place(item_id, "item_id"))

    def clear(self) -> None:
        """Remove all items, after the end of the conversation."""
        self._entries.clear()

    def _has_call(self, call_id: str) -> bool:
        return any(isinstance(entry, CallEntry) and entry.call_id == call_id for entry in self._entries)

    def _place(self, item_id: str, field: str) -> int:
        for place, entry in enumerate(self._entries):
            if entry.id == item_id:
                return place
        raise NotFound(
            f"the conversation has no item {item_id[:80]!r}",
            hint="it may have been deleted",
            code="item_not_found",
            field=field,
        )


class PromptSizes:
    """Tokens of items, as far as prompts have told. Owned by the conversation."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._last: list[str] = []
        self._last_tokens = 0

    def note(self, entries: Sequence[Entry], tokens: int) -> None:
        """Note the tokens of a prompt. One that continues the last prompt tells the tokens of its further items."""
        ids = [entry.id for entry in entries]
        known, present = len(self._last), set(ids)
        if len(ids) > known > 0 and ids[:known] == self._last:
            unknown = [name for name in ids[known:] if name not in self._tokens]
            rest = tokens - self._last_tokens - sum(self._tokens.get(name, 0.0) for name in ids[known:])
            self._tokens |= dict.fromkeys(unknown, max(0.0, rest / len(unknown)) if unknown else 0.0)
        self._last, self._last_tokens = ids, tokens
        self._tokens = {name: size for name, size in self._tokens.items() if name in present}

    def answered(self, entries: Sequence[Entry], tokens: int) -> None:
        """Note the tokens that a response has written into its items."""
        self._tokens |= {entry.id: tokens / len(entries) for entry in entries}

    def of(self, entries: Sequence[Entry]) -> list[float]:
        """Return the tokens of each item. Unknown ones have the mean of the known; if none is known, all have 1."""
        known = list(self._tokens.values())
        mean = sum(known) / len(known) if sum(known) else 1.0
        return [self._tokens.get(entry.id, mean) for entry in entries]

    def exceed(self, entries: Sequence[Entry], tokens: int) -> bool:
        """Return whether the items behind the system's are known to have more tokens."""
        head, body = _parted(entries)
        return bool(self._tokens) and sum(self.of([*head, *body])[len(head) :]) > tokens


def shortened(entries: Sequence[Entry], rules: Truncation, sizes: PromptSizes) -> list[Entry] | None:
    """Return the items without the oldest ones, for a context that cannot hold all; None if there is nothing to drop.

    The rest begins with a message of the user. Messages of the system at the begin stay. So many items leave at once
    that the next turns have room, because every change of the beginning makes the cached prefix useless.
    """
    if rules.is_off:
        return None
    head, body = _parted(entries)
    left = sizes.of(body)
    total = sum(left)
    room = rules.keeps * (total if rules.most is None else min(total, rules.most))
    begins = [number for number, entry in enumerate(body) if number and _is_of(entry, "user")]
    fitting = (number for number in begins if sum(left[number:]) <= room)
    start = next(fitting, begins[-1] if begins else None)
    return None if start is None else [*head, *body[start:]]


def _parted(entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Return the messages of the system at the begin, and the rest."""
    first = next((number for number, entry in enumerate(entries) if not _is_of(entry, "system")), len(entries))
    return list(entries[:first]), list(entries[first:])


def _is_of(entry: Entry, role: str) -> bool:
    return isinstance(entry, MessageEntry) and entry.role == role
