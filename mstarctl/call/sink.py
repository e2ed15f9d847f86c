"""Output of an answer: a growing WAV file, images, arrays, text, subtitles, or stdout. Owned and closed by the command.

A file is opened with the first output, so that a refused request does not overwrite an existing file.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from mstar_core.client import Line
from mstar_core.client.arrays import array_of
from mstar_core.client.file_formats import (
    SOUNDS,
    FilmWriter,
    SoundWriter,
    check_image,
    film_writer,
    image_file,
    sound_format,
    sound_writer,
)
from mstar_core.client.subtitles import SegmentFile
from mstar_core.codec import RawArray, npy_header
from mstar_core.errors import ConfigError, UsageError
from mstarctl.call.tensors import TensorFile
from mstarctl.output.units import counted

T = TypeVar("T")
STDOUT: Final = "-"
SUFFIXES: Final = {
    "audio": tuple(SOUNDS),
    "image": (".png", ".jpg", ".jpeg", ".webp"),
    "video": (".mp4", ".npy", ".json", ".bin", ".safetensors"),
    "text": (".txt", ".md"),
    "segments": (".srt", ".vtt", ".json"),
    "action": (".npy", ".json", ".bin", ".safetensors"),
    "tensor": (".npy", ".json", ".bin", ".safetensors"),
    "embedding": (".npy", ".json", ".bin", ".safetensors"),
    "scalar": (".npy", ".json", ".bin", ".safetensors"),
}
"""File endings by modality, the default first. Latents sent as `video` are arrays; frames become one MP4 file."""

FRAMES_PER_S: Final = 24
"""Rate of a film whose frames name none."""

NUMBERS: Final = ("action", "tensor", "embedding", "scalar", "video")
"""Modalities whose outputs are arrays. An answer may have several, each with a name."""

UNWRITTEN: Final = {
    ".m4a": ".wav",
    ".aac": ".wav",
    ".gif": ".png",
    ".bmp": ".png",
    ".tif": ".png",
    ".tiff": ".png",
    ".avif": ".png",
    ".avi": ".mp4",
    ".mov": ".mp4",
    ".mkv": ".mp4",
    ".webm": ".mp4",
    ".npz": ".npy",
}
"""Endings of formats that this command does not write, with the ending to use instead."""


def chosen_output(name: str, outputs: Sequence[str], out: str | None) -> str:
    """Return the modality to request: the model's first, or the first that fits --out's ending. Raises UsageError."""
    suffix = Path(out).suffix.lower() if out not in (None, STDOUT) and out is not None else ""
    if out is not None and suffix in UNWRITTEN:
        written = Path(out).with_suffix(UNWRITTEN[suffix])
        raise UsageError(
            f"call does not write {suffix} files", f"--out {out}", f"--out {written}, then: ffmpeg -i {written} {out}"
        )
    if not any(suffix in endings for endings in SUFFIXES.values()):
        return outputs[0]
    fitting = [kind for kind in outputs if suffix in SUFFIXES.get(kind, ())]
    if not fitting:
        ways = ", ".join(f"{kind} ({' '.join(SUFFIXES.get(kind, ()))})" for kind in outputs)
        raise UsageError(f"{name} has no output for a {suffix} file", hint=f"its outputs: {ways}")
    return fitting[0]


class Sink:
    """Writes output lines. kind: the modality to write; lines of others are skipped, except of arrays beside arrays.

    text: all text of the answer. One array is written to the file of --out. Several become a file each, named after the
    outputs: plan.json becomes plan.actions.json and plan.best_energy.json. Further ones of a name are numbered.
    """

    def __init__(self, kind: str, path: Path | None) -> None:
        self.kind = kind
        self.path = path
        self.size_bytes = 0
        self.files: list[Path] = []
        self.text = ""
        self._file: BinaryIO | None = None
        self._sound_writer: SoundWriter | None = None
        self._sound: tuple[int, int] | None = None
        self._film: FilmWriter | None = None
        self._parts: list[bytes] = []
        self._outputs: list[str] = []  # names of the arrays in `files`
        self._has_failed = False
        form = "srt" if path is None else path.suffix.lower().removeprefix(".")
        self._segments = SegmentFile(form) if kind == "segments" else None
        self._tensors = TensorFile() if path is not None and path.suffix.lower() == ".safetensors" else None

    @classmethod
    def of(cls, kind: str, out: str | None, name: str) -> Sink:
        """Return the sink of one modality. Text goes to stdout unless --out names a file. Raises ConfigError."""
        if out == STDOUT or out is None and kind == "text":
            return cls(kind, None)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        path = Path(out) if out is not None else Path(f"{name}-{stamp}{SUFFIXES.get(kind, ('.bin',))[0]}")
        check_writable(path)
        if kind == "image":
            check_image(path if path.suffix else path.with_suffix(".png"))
        elif kind == "audio" and path.suffix:
            sound_format(path)
        return cls(kind, path)

    @property
    def seconds(self) -> float:
        """Seconds of audio so far, 0 for other modalities."""
        if self._sound is None:
            return 0.0
        rate, channels = self._sound
        return self.size_bytes / (2 * channels * rate)

    @property
    def amount(self) -> str:
        """Size so far, as text."""
        if self.kind == "audio":
            return f"{self.seconds:.1f} s of audio"
        files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        return f"{counted(self.size_bytes, 'byte')}{files}"

    def add(self, line: Line) -> None:
        """Write one output line. Raises ConfigError if the file cannot be written, or the disk is full."""
        if line.modality == "text":
            self.text += line.data.decode("utf-8", "replace")
        if line.modality != self.kind and not (self.kind in NUMBERS and line.modality in NUMBERS):
            return
        with self._writing():
            self._add(line)
        self.size_bytes += len(line.data)

    def _add(self, line: Line) -> None:
        if self.kind == "audio":
            self._add_sound(line)
        elif self._segments is not None:
            self._segments.add(line.data, line.metadata)
        elif self.path is None:
            stdout = self._open()
            stdout.write(line.data)
            stdout.flush()
        elif self.kind == "text":
            file = self._open()
            file.write(line.data)
            file.flush()
        else:
            self._add_whole(line)

    def _add_sound(self, line: Line) -> None:
        if self._sound is None:
            facts = line.metadata
            self._sound = (int(facts.get("sample_rate", 24000)), int(facts.get("num_channels", 1)))
        self._open()
        if self._sound_writer is not None:
            self._sound_writer.write(line.data)

    def _add_whole(self, line: Line) -> None:
        """Write an image or array: a file each, or one safetensors file for all. A large array arrives in parts."""
        self._parts.append(line.data)
        if int(line.metadata.get("part", 0)) + 1 < int(line.metadata.get("parts", 1)):
            return
        data, self._parts = b"".join(self._parts), []
        if self._tensors is not None:
            self._tensors.add(data, line.metadata)
            return
        if self.path is not None and self.path.suffix.lower() == ".mp4" and _are_frames(line):
            self._add_frames(data, line, self.path)
            return
        path = self._next_path(str(line.metadata.get("name") or ""))
        suffix, shape, dtype = path.suffix.lower(), line.metadata.get("shape"), str(line.metadata.get("dtype"))
        if shape is not None and suffix == ".npy":
            data = _converted(dtype, lambda: npy_header(shape, dtype)) + data
        elif shape is not None and suffix == ".json":
            numbers = _converted(dtype, RawArray(data, tuple(shape), dtype).to_lists)
            data = json.dumps(numbers).encode() + b"\n"
        elif self.kind == "image" and path.suffix:
            data = image_file(data, path)
        with _create(path) as file:
            self.files.append(path)
            file.write(data)

    def _add_frames(self, data: bytes, line: Line, path: Path) -> None:
        """Append frames to the film, which begins with the first ones."""
        if self._film is None:
            _create(path).close()
            self.files.append(path)
            _, height, width, _ = line.metadata["shape"]
            self._film = film_writer(path, width, height, int(line.metadata.get("fps") or FRAMES_PER_S))
        self._film.add(array_of(data, line.metadata))

    def _next_path(self, name: str) -> Path:
        """Return the path of the next array or image. The second name of an answer renames the files of the first."""
        if self.path is None:
            raise AssertionError("stdout takes bytes as they arrive")
        if len(set(self._outputs)) == 1 and name not in self._outputs:
            for number, before in enumerate(self.files):
                self.files[number] = before.rename(self._named(self._outputs[0], number))
        self._outputs.append(name)
        number = self._outputs.count(name) - 1
        return self._named(name if len(set(self._outputs)) > 1 else "", number)

    def _named(self, name: str, number: int) -> Path:
        if self.path is None:
            raise AssertionError("stdout takes bytes as they arrive")
        stem = f"{self.path.stem}.{name}" if name else self.path.stem
        return self.path.with_stem(f"{stem}-{number + 1}" if number else stem)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise ConfigError for a file that cannot be written further. A closed pipe stays as it is."""
        try:
            yield
        except OSError as error:
            if self.path is None or isinstance(error, BrokenPipeError):
                raise
            self._has_failed = True
            raise _write_error(self.path, self.files, error) from error

    def begin(self) -> None:
        """Create the file of an answer that may have no text or audio."""
        if self.kind in ("audio", "text"):
            with self._writing():
                self._open()

    def _open(self) -> BinaryIO:
        if self._file is None:
            if self.path is None:
                self._file = sys.stdout.buffer
            else:
                self._file = _create(self.path)
                self.files.append(self.path)
            if self.kind == "audio":
                rate, channels = self._sound or (24000, 1)
                suffix = ".wav" if self.path is None else self.path.suffix.lower()
                self._sound_writer = sound_writer(SOUNDS.get(suffix, SOUNDS[".wav"]), self._file, rate, channels)
        return self._file

    def close(self) -> None:
        """Complete the file. stdout stays open. Raises ConfigError if the disk is full, once."""
        if self._has_failed:
            with suppress(OSError, ValueError):
                self._close()
            if self._file is not None and self.path is not None:
                with suppress(OSError):  # what is buffered still does not fit
                    self._file.close()
            return
        with self._writing():
            self._close()

    def _close(self) -> None:
        if self._segments is not None:
            segments, self._segments = self._segments, None
            self._open().write(segments.text().encode())
        if self._tensors is not None and self._tensors.arrays and self.path is not None:
            tensors, self._tensors = self._tensors, TensorFile()
            with _create(self.path) as file:
                self.files.append(self.path)
                tensors.write(file)
        if self._film is not None:
            self._film.close()
        if self._file is None or self._file.closed:
            return
        if self.path is None:
            if self.kind == "text":
                self._file.write(b"\n")
            self._file.flush()
            self._file = None
        elif self._sound_writer is not None:
            self._sound_writer.close()
        else:
            self._file.close()


def _are_frames(line: Line) -> bool:
    """Return whether a line holds frames of a film, and not latents."""
    facts = line.metadata
    shape: Sequence[int] = facts.get("shape") or ()
    return line.modality == "video" and facts.get("dtype") == "uint8" and len(shape) == 4 and shape[3] == 3


def check_writable(path: Path) -> None:
    """Raise ConfigError if the answer cannot be written. Called before the request is sent."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", hint="name a file with --out", file=str(path), key="out")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written",
            f"the directory {path.parent} does not exist",
            f"mkdir -p {path.parent}",
            key="out",
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written", "permission denied", "choose another file with --out", key="out")


def _converted(dtype: str, make: Callable[[], T]) -> T:
    """Call an encoder. Raises ConfigError if the file format does not support the dtype."""
    try:
        return make()
    except ValueError as error:
        hint = "write raw bytes: --out FILE.bin"
        raise ConfigError(f"{dtype} cannot be written in this format", str(error), hint, key="out") from error


def _write_error(path: Path, files: Sequence[Path], error: OSError) -> ConfigError:
    """Return the error of a write that failed. It names the files that are left."""
    left = f"left incomplete: {', '.join(map(str, files))}" if files else "nothing was written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = {errno.ENOSPC: "no space left", errno.EDQUOT: "the disk quota is used up"}
        title = f"{reason.get(error.errno or 0, 'the file would be too large')} in {path.parent.resolve()}"
        hint = "free some space, or choose another directory with --out"
        return ConfigError(title, left, hint, file=str(path), key="out", code="disk_full")
    return ConfigError(
        f"{path} cannot be written",
        f"{error.strerror or error}; {left}",
        "choose another file with --out",
        file=str(path),
        key="out",
    )


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written", error.strerror or str(error), file=str(path), key="out"
        ) from error
