"""Media of a request: paths, bytes, named bytes, arrays. Files are read here, so the server never sees a path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from mstar_core.client.arrays import npy_of

Medium = str | os.PathLike[str] | bytes | bytearray | memoryview | tuple[str, bytes]
"""A path, the bytes of a file, or (name, bytes)."""

Media = Medium | Sequence[Medium]
NPY: Final = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class MediaFile:
    """One file of a request. kind: the caller's modality for it, which decides what the bytes leave open."""

    name: str
    data: bytes
    kind: str

    @property
    def content_type(self) -> str:
        return "application/octet-stream" if self.kind == "tensor" else f"{self.kind}/octet-stream"


def files_of(kind: str, media: Media | None) -> list[MediaFile]:
    """Return the files of one kind, in order. Raises OSError for an unreadable path, TypeError, ValueError."""
    if media is None:
        return []
    is_series = isinstance(media, list) or _is_series(media)
    items: Sequence[Any] = cast("Sequence[Any]", media) if is_series else [media]
    return [_file(kind, item, number) for number, item in enumerate(items)]


def tensor_files(tensors: Any) -> list[MediaFile]:
    """Return tensors as files. Arrays are sent as npy; npy and safetensors files are given like other media."""
    if tensors is None:
        return []
    is_one = _is_array(tensors) or not (isinstance(tensors, list) or _is_series(tensors))
    items = [tensors] if is_one else tensors
    return [_tensor_file(item, number) for number, item in enumerate(items)]


def _is_series(media: object) -> bool:
    """Return whether a tuple is a series of media; a single (name, bytes) is not."""
    return isinstance(media, tuple) and not (len(media) == 2 and isinstance(media[0], str) and _is_bytes(media[1]))


def _is_bytes(item: object) -> bool:
    return isinstance(item, (bytes, bytearray, memoryview))


def _is_array(item: object) -> bool:
    return hasattr(item, "__array__")


def _file(kind: str, item: Any, number: int) -> MediaFile:
    match item:
        case bytes() | bytearray() | memoryview():
            return MediaFile(f"{kind}-{number}", bytes(item), kind)
        case (str() as name, bytes() | bytearray() | memoryview() as data):
            return MediaFile(name, bytes(data), kind)
        case str() if "://" in item or item.startswith("data:"):
            raise ValueError(f"{item[:60]!r} is a URL; give a path, or the bytes of the file")
        case str() | os.PathLike():
            path = Path(item)
            return MediaFile(path.name, path.read_bytes(), kind)
        case _:
            raise TypeError(f"{kind} must be a path, bytes, (name, bytes) or a list of them, not {type(item).__name__}")


def _tensor_file(item: Any, number: int) -> MediaFile:
    if _is_array(item):
        return MediaFile(f"tensor-{number}.npy", npy_of(item), "tensor")
    file = _file("tensor", item, number)
    is_named = file.name.lower().endswith((".npy", ".safetensors"))
    suffix = ".npy" if file.data.startswith(NPY) else ".safetensors"
    return file if is_named else MediaFile(f"{file.name}{suffix}", file.data, "tensor")


def json_value(value: Any) -> Any:
    """Return an array or numpy number as a list or number for JSON. Raises TypeError for other types."""
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"a parameter cannot have the type {type(value).__name__}")
    return tolist()


def all_files(*, images: Media | None, audio: Media | None, video: Media | None, tensors: Any) -> Iterator[MediaFile]:
    """Yield every file of a request in the default order in which the model reads them."""
    yield from files_of("image", images)
    yield from files_of("audio", audio)
    yield from files_of("video", video)
    yield from tensor_files(tensors)
