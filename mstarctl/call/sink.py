"""Where an answer goes: a WAV file that grows, pictures, arrays, text, or stdout. Owned by the command, closed by it.

A file is opened with the first output, so that a refused request leaves what was there before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from mstar_core.client import Line, WavFile
from mstar_core.errors import ConfigError, UsageError
from mstarctl.call.arrays import nested, npy
from mstarctl.call.tensors import TensorFile

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
"""File endings by modality, the usual one first. Latents under `video` are arrays."""


def chosen_output(name: str, outputs: Sequence[str], out: str | None) -> str:
    """The modality to ask for: the model's first, or the first that --out's ending can hold. Raises UsageError."""
    suffix = Path(out).suffix.lower() if out not in (None, STDOUT) and out is not None else ""
    if not any(suffix in endings for endings in SUFFIXES.values()):
        return outputs[0]
    fitting = [kind for kind in outputs if suffix in SUFFIXES.get(kind, ())]
    if not fitting:
        ways = ", ".join(f"{kind} ({' '.join(SUFFIXES.get(kind, ()))})" for kind in outputs)
        raise UsageError(f"{name} gives nothing for a {suffix} file", hint=f"it gives {ways}")
    return fitting[0]


class Sink:
    """Takes output lines. kind: the modality that is written; lines of another are left out. text: what was said."""

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
        """The sink of one modality. Text goes to stdout unless --out names a file. Raises ConfigError."""
        if out == STDOUT or out is None and kind == "text":
            return cls(kind, None)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        path = Path(out) if out is not None else Path(f"{name}-{stamp}{SUFFIXES.get(kind, ('.bin',))[0]}")
        check_writable(path)
        return cls(kind, path)

    @property
    def seconds(self) -> float:
        """Seconds of sound so far, 0 for everything else."""
        if self._sound is None:
            return 0.0
        rate, channels = self._sound
        return self.size_bytes / (2 * channels * rate)

    @property
    def amount(self) -> str:
        """How much there is, for people."""
        if self.kind == "audio":
            return f"{self.seconds:.1f} s of audio"
        files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        return f"{self.size_bytes} bytes{files}"

    def add(self, line: Line) -> None:
        """Write one output line. Raises ConfigError when the file cannot be written."""
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
        """Pictures and arrays are one file each, or all one of safetensors; a large array comes in parts."""
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
            data = npy(data, shape, dtype)
        elif shape is not None and suffix == ".json":
            data = json.dumps(nested(data, shape, dtype)).encode() + b"\n"
        with _create(path) as file:
            file.write(data)
        self.files.append(path)

    def _next_path(self) -> Path:
        path = self.path
        if path is None:
            raise AssertionError("stdout takes bytes as they come")
        return path if not self.files else path.with_stem(f"{path.stem}-{len(self.files) + 1}")

    def begin(self) -> None:
        """Begin a file that may stay empty: an answer without any text or sound."""
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
        """Make the file whole. stdout stays open."""
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
    """Raises ConfigError before anything is sent when the answer could not be kept."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint="name a file with --out", file=str(path), key="out")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written", f"there is no folder {path.parent}", f"mkdir -p {path.parent}", key="out"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written", "permission denied", "choose another file with --out", key="out")


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written", error.strerror or str(error), file=str(path), key="out"
        ) from error
