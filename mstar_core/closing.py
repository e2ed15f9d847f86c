"""Base of resources that a `with` block closes."""

from __future__ import annotations

from typing import Self


class Closing:
    """Calls `close` at the end of a `with` block."""

    __slots__ = ()

    def close(self) -> None:
        """Free the resource."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
