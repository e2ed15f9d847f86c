"""Items of a conversation in order, by id. Owned by the conversation."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Final

from mstar_core.api.realtime.items import CallEntry, Entry, ResultEntry
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
