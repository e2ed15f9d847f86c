"""Recorded frames: a ring in memory to step back, and gzipped files for `--record` and `--replay`."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec

from mstar_core.errors import MstarError, NotFound, UsageError
from mstar_core.observe.frames import Frame, HelloFrame, encode
from mstarctl.client.store import Store, decode

FORMAT: Final = 1
LIMIT_BYTES: Final = 512 * 2**20
"""Limit of a recording, because a replay keeps it in memory."""

FLUSH_S: Final = 1.0


class Recorder:
    """Writes one recording. Owned by the session, closed by it."""

    def __init__(self, path: Path, name: str, *, at: float | None = None) -> None:
        self.path = path
        self._begun = at
        self._flushed = 0.0
        try:
            # No time in the gzip header, so that equal watches give equal files.
            self._plain = path.open("xb")
            self._file = gzip.GzipFile(filename="", mode="wb", fileobj=self._plain, mtime=0)
        except FileExistsError as error:
            raise UsageError(f"{path} exists", hint="choose another name, or remove it") from error
        except OSError as error:
            raise MstarError(f"{path} cannot be written", str(error.strerror), "choose another folder") from error
        head = {"mstar_recording": FORMAT, "deployment": name, "time": time.time() if at is None else at}
        self._write(json.dumps(head).encode())

    def frame(self, at: float, raw: bytes) -> None:
        """Write one line of the watch."""
        self._entry(at, b'"frame":' + raw.rstrip(b"\n"))

    def begin(self, at: float, store: Store) -> None:
        """Write the current state as the first two frames of a recording that starts during a watch."""
        self.frame(at, encode(HelloFrame(boot=store.boot, hz=store.hz, rev=store.rev, readonly=store.readonly)))
        self.frame(at, encode(store.snapshot(events=200)))

    def log(self, at: float, facts: dict[str, Any]) -> None:
        """Write one log line: `from`, `line`."""
        self._entry(at, b'"log":' + msgspec.json.encode(facts))

    def answer(self, at: float, path: str, body: Any) -> None:
        """Write the answer of a read, so that a replay can show it."""
        self._entry(at, b'"answer":' + msgspec.json.encode({"path": path, "body": body}))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
        self._plain.close()

    def _entry(self, at: float, rest: bytes) -> None:
        begun = self._begun = at if self._begun is None else self._begun
        self._write(b'{"at":%.3f,' % max(0.0, at - begun) + rest + b"}")
        if at - self._flushed >= FLUSH_S:  # a crash loses at most one second of the recording
            self._flushed = at
            self._file.flush()
            self._plain.flush()

    def _write(self, text: bytes) -> None:
        self._file.write(text + b"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a recording."""

    at: float
    frame: Frame | None = None
    log: dict[str, Any] | None = None
    answer: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Recording:
    """A recording in memory. Entries are decoded on demand. is_cut: the end of the file is missing."""

    name: str
    lines: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    is_cut: bool = False

    @property
    def length_s(self) -> float:
        return self.times[-1] if self.times else 0.0

    def entry(self, index: int) -> Entry:
        """Decode one entry. Raises TransportError for a malformed frame."""
        raw = msgspec.json.decode(self.lines[index], type=_Raw)
        frame = decode(bytes(raw.frame)) if raw.frame else None
        return Entry(at=raw.at, frame=frame, log=raw.log, answer=raw.answer)


class _Raw(msgspec.Struct):
    at: float
    frame: msgspec.Raw = msgspec.Raw(b"")
    log: dict[str, Any] | None = None
    answer: dict[str, Any] | None = None


class _At(msgspec.Struct):
    at: float


def read_recording(path: Path) -> Recording:
    """Read a file. Raises NotFound, and UsageError if it is not a recording or is too long."""
    try:
        # A gzip stream is bytes; IO[bytes] says so to the type checker.
        with cast(IO[bytes], gzip.open(path, "rb")) as file:
            return _read(path, file)
    except FileNotFoundError as error:
        raise NotFound(f"no recording {path}", hint="write one with: mstarctl top --record FILE") from error
    except (gzip.BadGzipFile, IsADirectoryError, PermissionError) as error:
        raise UsageError(f"{path} is not a recording", str(error)) from error


def _read(path: Path, file: IO[bytes]) -> Recording:
    recording = Recording(name="")
    size = 0
    try:
        recording.name = _head(path, file.readline())
        for line in file:
            size += len(line)
            if size > LIMIT_BYTES:
                raise UsageError(
                    f"{path} is too long to replay", f"more than {LIMIT_BYTES // 2**20} MiB", "make a shorter recording"
                )
            recording.times.append(msgspec.json.decode(line, type=_At).at)
            recording.lines.append(line)
    except (EOFError, zlib.error, msgspec.DecodeError):
        recording.is_cut = True  # the writer was killed: replay the rest
    if not recording.lines:
        raise UsageError(f"{path} contains no frames", "the file ends before the first one")
    return recording


def _head(path: Path, line: bytes) -> str:
    try:
        head = json.loads(line)
        version = int(head["mstar_recording"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a recording", hint="write one with: mstarctl top --record FILE") from error
    if version > FORMAT:
        raise UsageError(f"{path} has format {version}, mstarctl reads {FORMAT}", hint="update mstarctl")
    return str(head.get("deployment", ""))


RING_S: Final = 300.0
KEY_S: Final = 10.0
RING_BYTES: Final = 64 * 2**20
EVENTS: Final = 200


@dataclass(slots=True)
class FrameBlock:
    """A keyframe (encoded hello and snapshot) and the frames after it. first: number of the keyframe's state."""

    first: int
    t: float
    hello: bytes
    snapshot: bytes
    frames: list[bytes] = field(default_factory=list)
    size: int = 0

    @property
    def last(self) -> int:
        return self.first + len(self.frames)


class Ring:
    """Recent states by number, bounded in time and memory."""

    def __init__(self, span_s: float = RING_S, limit_bytes: int = RING_BYTES) -> None:
        self._blocks: deque[FrameBlock] = deque()
        self._span_s, self._limit = span_s, limit_bytes
        self._next = 0
        self.size_bytes = 0

    @property
    def newest(self) -> int:
        """Number of the newest state, -1 if the ring is empty."""
        return self._next - 1

    @property
    def oldest(self) -> int:
        """Number of the oldest state in the ring."""
        return self._blocks[0].first if self._blocks else self._next

    def add(self, raw: bytes, store: Store, *, is_whole: bool) -> None:
        """Add a frame that was applied to `store`. is_whole: it was a snapshot, which starts a block."""
        if not store.is_synced:
            return
        if not self._blocks or is_whole or store.t - self._blocks[-1].t >= KEY_S:
            hello = encode(HelloFrame(boot=store.boot, hz=store.hz, rev=store.rev, readonly=store.readonly))
            snapshot = encode(store.snapshot(events=EVENTS))
            self._blocks.append(FrameBlock(self._next, store.t, hello, snapshot, size=len(snapshot) + len(hello)))
            self.size_bytes += self._blocks[-1].size
        else:
            self._blocks[-1].frames.append(raw)
            self._blocks[-1].size += len(raw)
            self.size_bytes += len(raw)
        self._next += 1
        while len(self._blocks) > 1 and (self.size_bytes > self._limit or store.t - self._blocks[1].t > self._span_s):
            self.size_bytes -= self._blocks.popleft().size

    def at(self, number: int) -> Store:
        """Return the state with this number, or the nearest one. Raises LookupError if the ring is empty."""
        if not self._blocks:
            raise LookupError("the ring is empty")
        index = min(max(number, self.oldest), self.newest)
        block = next(block for block in reversed(self._blocks) if block.first <= index)
        store = Store()
        for raw in (block.hello, block.snapshot, *block.frames[: index - block.first]):
            frame = decode(raw)
            if frame is not None:
                store.apply(frame)
        return store

    def before(self, t: float) -> int:
        """Return the number of the last keyframe at or before `t`, else that of the oldest state."""
        latest = next((block for block in reversed(self._blocks) if block.t <= t), None)
        return self.oldest if latest is None else latest.first
