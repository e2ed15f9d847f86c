"""Sizes of memory as texts: bytes with a unit, and budgets that may be a share of a device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

DECIMAL: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
AUTO: Final = "auto"
SIZE_HINT: Final = "a number of bytes, or a size such as 20GiB"
BUDGET_HINT: Final = "a size such as 20GiB, a share of each device such as 25%, or auto"

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?")
_PERCENT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True, slots=True)
class BudgetText:
    """A parsed `memory_budget`: bytes, or a share of a device, 0 to 1; neither: as planned."""

    size_bytes: int | None = None
    share: float | None = None

    def of(self, total_bytes: int) -> int | None:
        """Return the bytes of a device with this much memory, None if they are to be planned."""
        return self.size_bytes if self.share is None else int(total_bytes * self.share)


def parse_size(text: str) -> int:
    """Parse a number of bytes, or a size such as `20GiB` or `1.5 GB`. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    units = DECIMAL | BINARY
    if found is None or (found[2] or "") not in units:
        raise ValueError(text)
    return int(float(found[1]) * units[found[2] or ""])


def parse_budget(text: str) -> BudgetText:
    """Parse `20GiB`, `25%` or `auto`. Raises ValueError for another text and for a size that is not positive."""
    if text.strip() == AUTO:
        return BudgetText()
    percent = _PERCENT.fullmatch(text.strip())
    if percent is not None:
        share = float(percent[1]) / 100
        if not 0 < share <= 1:
            raise ValueError(text)
        return BudgetText(share=share)
    size = parse_size(text)
    if size <= 0:
        raise ValueError(text)
    return BudgetText(size_bytes=size)
