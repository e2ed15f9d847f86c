"""Wire form of the kinds of captured steps, by which the ranks of a tensor-parallel group name their buckets."""

from __future__ import annotations

import msgspec
import torch


class WirePort(msgspec.Struct, frozen=True, array_like=True):
    """An input of a pass; the fields are those of `passes.Port`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_per_row: bool = False


class WirePass(msgspec.Struct, frozen=True, array_like=True, tag="pass"):
    """A kind of loop passes; the fields are those of `passes.PassKind`."""

    tokens: int
    ports: tuple[WirePort, ...]
    writes: bool
    iterations: int
    carry: tuple[tuple[str, str], ...]
    is_append_only: bool


class WirePrefix(msgspec.Struct, frozen=True, array_like=True, tag="prefix"):
    """A kind of prefixes, see `prefixes.PrefixKind`."""

    ports: tuple[WirePort, ...]


def encoded(kind: WirePass | WirePrefix) -> bytes:
    """Return a kind as bytes."""
    return msgspec.msgpack.encode(kind)


def decoded(code: bytes) -> WirePass | WirePrefix:
    """Return the kind in these bytes."""
    return msgspec.msgpack.decode(code, type=WirePass | WirePrefix)


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` and so on."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name."""
    found: torch.dtype = getattr(torch, name)
    return found
