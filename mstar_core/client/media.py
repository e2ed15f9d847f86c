"""Media that a caller gives: paths, bytes, named bytes, arrays. Read here, so that the server never sees a path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from mstar_core.client.array import npy_of

Medium = str | os.PathLike[str] | bytes | bytearray | memoryview | tuple[str, bytes]
"""A path, the bytes of a file, or (name, bytes)."""

Media = Medium | Sequence[Medium]
NPY: Final = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class Upload:
    """One file of a request. kind: what the caller says it is, which settles what the bytes leave open."""

    name: str
    data: bytes
    kind: str

    @property
    def content_type(self) -> str:
        return "application/octet-stream" if self.kind == "tensor" else f"{self.kind}/octet-stream"


def uploads_of(kind: str, media: Media | None) -> list[Upload]:
    """The files of one kind, in order. Raises OSError for a path that cannot be read, TypeError, ValueError."""
    if media is None:
        return []
    is_series = isinstance(media, list) or _is_series(media)
    items: Sequence[Any] = cast("Sequence[Any]", media) if is_series else [media]
    return [_upload(kind, item, number) for number, item in enumerate(items)]


def tensor_uploads(tensors: Any) -> list[Upload]:
    """Tensors: files as for other media (npy, safetensors), or arrays, which are sent as npy."""
    if tensors is None:
        return []
    is_one = _is_array(tensors) or not (isinstance(tensors, list) or _is_series(tensors))
    items = [tensors] if is_one else tensors
    return [_tensor(item, number) for number, item in enumerate(items)]


def _is_series(media: object) -> bool:
    """A tuple is a series unless it is one (name, bytes)."""
    return isinstance(media, tuple) and not (len(media) == 2 and isinstance(media[0], str) and _is_bytes(media[1]))


def _is_bytes(item: object) -> bool:
    return isinstance(item, (bytes, bytearray, memoryview))


def _is_array(item: object) -> bool:
    return hasattr(item, "__array__")


def _upload(kind: str, item: Any, number: int) -> Upload:
    match item:
        case bytes() | bytearray() | memoryview():
            return Upload(f"{kind}-{number}", bytes(item), kind)
        case (str() as name, bytes() | bytearray() | memoryview() as data):
            return Upload(name, bytes(data), kind)
        case str() if "://" in item or item.startswith("data:"):
            raise ValueError(f"{item[:60]!r} is an address; give a path, or the bytes of the file")
        case str() | os.PathLike():
            path = Path(item)
            return Upload(path.name, path.read_bytes(), kind)
        case _:
            raise TypeError(f"{kind} is a path, bytes, (name, bytes) or a list of them, not {type(item).__name__}")


def _tensor(item: Any, number: int) -> Upload:
    if _is_array(item):
        return Upload(f"tensor-{number}.npy", npy_of(item), "tensor")
    made = _upload("tensor", item, number)
    is_named = made.name.lower().endswith((".npy", ".safetensors"))
    suffix = ".npy" if made.data.startswith(NPY) else ".safetensors"
    return made if is_named else Upload(f"{made.name}{suffix}", made.data, "tensor")


def plain(value: Any) -> Any:
    """What JSON cannot hold of a parameter, in its own terms: arrays and numpy numbers as lists and numbers."""
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"a parameter cannot be of type {type(value).__name__}")
    return tolist()


def all_uploads(*, images: Media | None, audio: Media | None, video: Media | None, tensors: Any) -> Iterator[Upload]:
    """Every file of a request, in the order in which the model reads them unless the request says otherwise."""
    yield from uploads_of("image", images)
    yield from uploads_of("audio", audio)
    yield from uploads_of("video", video)
    yield from tensor_uploads(tensors)
