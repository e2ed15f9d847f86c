"""Shapes of numbers that clients send as nested lists. Used by the parameter checks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mstar_core.errors import RequestError


def shape_of(value: object, field: str) -> tuple[int, ...]:
    """Shape of a nested list of finite numbers. Raises RequestError when it is ragged or holds something else."""
    if isinstance(value, (list, tuple)):
        inner = {shape_of(item, field) for item in value}
        if len(inner) != 1:
            raise RequestError(
                f"{field} is not a table of numbers",
                hint="every row needs the same length, and at least one",
                field=field,
            )
        return (len(value), *inner.pop())
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{field} holds {value!r}"[:80], hint="send finite numbers", field=field)
    return ()


def check_shape(value: object, field: str, *forms: tuple[int | None, ...]) -> Iterator[RequestError]:
    """Nothing when `value` is None or has one of the forms (None: any length), else the error that says so."""
    if value is None:
        return
    try:
        shape = shape_of(value, field)
    except RequestError as error:
        yield error
        return
    fits = (
        len(shape) == len(form) and all(want in (None, got) for got, want in zip(shape, form, strict=True))
        for form in forms
    )
    if not any(fits):
        allowed = " or ".join(str(["n" if size is None else size for size in form]).replace("'", "") for form in forms)
        yield RequestError(
            f"{field} has shape {list(shape)}, allowed is {allowed}",
            field=field,
            value=str(list(shape)),
            allowed=allowed,
        )
