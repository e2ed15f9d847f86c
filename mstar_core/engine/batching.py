"""Who runs in the next step and who gives way: policy over plain data. Used by the KV and stateless engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A request that holds pages. order: age, small is old. is_fixed: cannot give way now (a step of it is out)."""

    order: int
    pages: int
    is_fixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Tokens that a row could compute now. must_be_whole: its tokens see each other and cannot be cut."""

    tokens: int
    must_be_whole: bool = False


def share_budget(offers: Sequence[Offer], budget: int) -> list[int]:
    """Tokens for each offer, oldest first, until the budget is used up.

    A whole segment larger than the budget runs alone with the rows before it rather than never: it may overdraw
    once, when it is the first.
    """
    counts = []
    left = budget
    for index, offer in enumerate(offers):
        if offer.must_be_whole:
            count = offer.tokens if offer.tokens <= left or index == 0 else 0
        else:
            count = min(offer.tokens, max(left, 0))
        left -= count
        counts.append(count)
    return counts


def youngest(holders: Iterable[Holder], apart_from: int | None = None) -> Holder | None:
    """The youngest request that holds pages and can give way."""
    able = [holder for holder in holders if holder.pages and not holder.is_fixed and holder.order != apart_from]
    return max(able, key=lambda holder: holder.order, default=None)
