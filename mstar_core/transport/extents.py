"""Which parts of an address range are free. First fit, merged on return. Used by `Arena`; knows nothing of memory."""

from __future__ import annotations

from bisect import bisect_left


class FreeList:
    """Free extents, sorted, never touching each other. Sizes and offsets in bytes."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._sizes: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def largest_bytes(self) -> int:
        return max(self._sizes.values(), default=0)

    def tail_bytes(self, end: int) -> int:
        """Return the size of the free extent that ends at `end`, 0 when the last bytes are in use."""
        if not self._offsets:
            return 0
        last = self._offsets[-1]
        return self._sizes[last] if last + self._sizes[last] == end else 0

    def take(self, size: int) -> int | None:
        """Take `size` bytes from the first extent that holds them. Returns the offset, None when none does."""
        for index, offset in enumerate(self._offsets):
            free = self._sizes[offset]
            if free < size:
                continue
            del self._sizes[offset]
            if free == size:
                del self._offsets[index]
            else:
                self._offsets[index] = offset + size
                self._sizes[offset + size] = free - size
            return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Add an extent that is not free yet, merging it with its neighbours."""
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + size:
            size += self._sizes.pop(self._offsets.pop(index))
        if index > 0:
            before = self._offsets[index - 1]
            if before + self._sizes[before] == offset:
                self._sizes[before] += size
                return
        self._offsets.insert(index, offset)
        self._sizes[offset] = size
