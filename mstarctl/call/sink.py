"""Output of an answer: a growing WAV file, images, arrays, text, or stdout. Owned and closed by the command.

A file is opened with the first output, so that a refused request does not overwrite an existing file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from mstar_core.client import Line, WavFile
from mstar_core.codec import RawArray, npy_header
from mstar_core.errors import ConfigError, UsageError
from mstarctl.call.tensors import TensorFile
from mstarctl.output.units import counted

T = TypeVar("T")
STDOUT: Final = "-"
SUFFIXES: Final = {
    "audio": (".wav", ".pcm"),
    "image": (".png", ".jpg", ".jpeg", ".webp"),
    "video": (".mp4", ".npy", ".json", ".bin", ".safetensors"),
    "text": (".txt", ".md"),
    "action": (".npy", ".json", ".bin", ".safetensors"),
    "tensor": (".npy", ".json", ".bin", ".safetensors"),
    "scalar": (".npy", ".json", ".bin", ".safetensors"),
}
"""File endings by modality, the default first. Latents sent as `video` are arrays."""

UNWRITTEN: Final = {
    ".mp3": ".wav", ".flac": ".wav", ".ogg": ".wav", ".opus": ".wav", ".m4a": ".wav", ".aac": ".wav",
    ".gif": ".png", ".bmp": ".png", ".tif": ".png", ".tiff": ".png", ".avif": ".png",
    ".avi": ".mp4", ".mov": ".mp4", ".mkv": ".mp4", ".webm": ".mp4", ".npz": ".npy",
}  # fmt: skip
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
    """Writes output lines. kind: the modality to write; lines of others are skipped. text: all text of the answer."""

    def __init__(self, kind: str, path: Path | None) -> None:
        self.kind = kind
        self.path = path
        self.size_bytes = 0
        self.files: list[Path] = []
        self.text = ""
        self._file: BinaryIO | None = None
        self._wav: WavFile | None = None
        self._sound: tuple[int, int] | None = None
        self._parts: list[bytes] = []
        self._tensors = TensorFile() if path is not None and path.suffix.lower() == ".safetensors" else None

    @classmethod
    def of(cls, kind: str, out: str | None, name: str) -> Sink:
        """Return the sink of one modality. Text goes to stdout unless --out names a file. Raises ConfigError."""
        if out == STDOUT or out is None and kind == "text":
            return cls(kind, None)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        path = Path(out) if out is not None else Path(f"{name}-{stamp}{SUFFIXES.get(kind, ('.bin',))[0]}")
        check_writable(path)
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
        """Write one output line. Raises ConfigError if the file cannot be written."""
        if line.modality == "text":
            self.text += line.data.decode("utf-8", "replace")
        if line.modality != self.kind:
            return
        self.size_bytes += len(line.data)
        if self.kind == "audio":
            self._add_sound(line)
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
        file = self._open()
        if self._wav is not None:
            self._wav.write(line.data)
        else:
            file.write(line.data)
            file.flush()

    def _add_whole(self, line: Line) -> None:
        """Write an image or array: a file each, or one safetensors file for all. A large array arrives in parts."""
        self._parts.append(line.data)
        if int(line.metadata.get("part", 0)) + 1 < int(line.metadata.get("parts", 1)):
            return
        data, self._parts = b"".join(self._parts), []
        if self._tensors is not None:
            self._tensors.add(data, line.metadata)
            return
        path = self._next_path()
        suffix, shape, dtype = path.suffix.lower(), line.metadata.get("shape"), str(line.metadata.get("dtype"))
        if shape is not None and suffix == ".npy":
            data = _converted(dtype, lambda: npy_header(shape, dtype)) + data
        elif shape is not None and suffix == ".json":
            numbers = _converted(dtype, RawArray(data, tuple(shape), dtype).to_lists)
            data = json.dumps(numbers).encode() + b"\n"
        with _create(path) as file:
            file.write(data)
        self.files.append(path)

    def _next_path(self) -> Path:
        path = self.path
        if path is None:
            raise AssertionError("stdout takes bytes as they arrive")
        return path if not self.files else path.with_stem(f"{path.stem}-{len(self.files) + 1}")

    def begin(self) -> None:
        """Create the file of an answer that may have no text or audio."""
        if self.kind in ("audio", "text"):
            self._open()

    def _open(self) -> BinaryIO:
        if self._file is None:
            if self.path is None:
                self._file = sys.stdout.buffer
            else:
                self._file = _create(self.path)
                self.files.append(self.path)
            if self.kind == "audio" and (self.path is None or self.path.suffix.lower() != ".pcm"):
                rate, channels = self._sound or (24000, 1)
                self._wav = WavFile(self._file, rate, channels)
        return self._file

    def close(self) -> None:
        """Complete the file. stdout stays open."""
        if self._tensors is not None and self._tensors.arrays and self.path is not None:
            with _create(self.path) as made:
                self._tensors.write(made)
            self.files.append(self.path)
            self._tensors = TensorFile()
        if self._file is None or self._file.closed:
            return
        if self.path is None:
            if self.kind == "text":
                self._file.write(b"\n")
            self._file.flush()
            self._file = None
        elif self._wav is not None:
            self._wav.close()
        else:
            self._file.close()


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


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written", error.strerror or str(error), file=str(path), key="out"
        ) from error
