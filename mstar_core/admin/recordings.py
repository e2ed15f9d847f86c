"""Recordings for load tests: the trace of each request that ends, one JSON object per line, in bounded files.

The files are in the run directory and are deleted with it. All recordings together take at most 1 GiB.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from mstar_core.admin.messages import as_json
from mstar_core.errors import NotFound, StateConflict, UsageError, did_you_mean

if TYPE_CHECKING:
    from mstar_core.observe.request_log import RequestLog, RequestRecord

LIMIT_BYTES: Final = 1 << 30
MOST: Final = 4
CHUNK_BYTES: Final = 256 * 1024


@dataclass(slots=True, kw_only=True)
class Recording:
    """One recording. dropped: requests that did not fit. progress: last reported by the load test."""

    id: str
    name: str
    limit_bytes: int
    path: Path
    file: IO[bytes]
    started_at: float = field(default_factory=time.time)
    requests: int = 0
    size_bytes: int = 0
    dropped: int = 0
    progress: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return the state of the recording for clients."""
        return {
            "id": self.id,
            "name": self.name,
            "state": "full" if self.dropped else "recording",
            "started_at": round(self.started_at, 3),
            "requests": self.requests,
            "size_bytes": self.size_bytes,
            "limit_bytes": self.limit_bytes,
            "dropped": self.dropped,
            "progress": self.progress,
        }


class Recordings:
    """All recordings of a deployment. Owned by the admin server; the request log calls `ended`."""

    def __init__(self, folder: Path, requests: RequestLog) -> None:
        self._folder = folder
        self._requests = requests
        self._all: dict[str, Recording] = {}

    def begin(self, name: str = "", max_bytes: int | None = None) -> Recording:
        """Start a recording. Raises StateConflict if no further one is possible, UsageError for an invalid limit."""
        if max_bytes is not None and not 0 < max_bytes <= LIMIT_BYTES:
            raise UsageError(f"max_bytes is {max_bytes}", hint=f"1 to {LIMIT_BYTES}")
        room = LIMIT_BYTES - sum(recording.limit_bytes for recording in self._all.values())
        if len(self._all) >= MOST or room <= 0:
            raise StateConflict(
                "no further recording is possible",
                f"{len(self._all)} of at most {MOST} exist, with 1 GiB together",
                "delete one, or give each a smaller max_bytes",
            )
        key = secrets.token_hex(4)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{key}.ndjson"
        recording = Recording(
            id=key, name=name[:200], limit_bytes=min(max_bytes or room, room), path=path, file=path.open("xb")
        )
        self._all[key] = recording
        return recording

    def all(self) -> list[Recording]:
        """Return all recordings, oldest first."""
        return list(self._all.values())

    def get(self, key: str) -> Recording:
        """Return one recording. Raises NotFound."""
        if key not in self._all:
            raise NotFound(f"no recording {key!r}", hint=did_you_mean(key, self._all), kind="recording", name=key)
        return self._all[key]

    def erase(self, key: str) -> None:
        """Stop a recording and delete its file. Raises NotFound."""
        recording = self.get(key)
        del self._all[key]
        recording.file.close()
        recording.path.unlink(missing_ok=True)

    def lines(self, key: str) -> Iterator[bytes]:
        """Yield the contents so far in chunks. Raises NotFound."""
        recording = self.get(key)
        recording.file.flush()
        with recording.path.open("rb") as file:
            yield from iter(lambda: file.read(CHUNK_BYTES), b"")

    def ended(self, request: RequestRecord) -> None:
        """Write a request that ended to every recording that has room."""
        if not self._all:
            return
        trace = self._requests.trace(request)
        line = (as_json({name: trace[name] for name in ("request", "sums", "parts")}) + "\n").encode()
        for recording in self._all.values():
            if recording.dropped or recording.size_bytes + len(line) > recording.limit_bytes:
                recording.dropped += 1
                continue
            try:
                recording.file.write(line)
            except OSError:  # a full disk counts as a dropped request
                recording.dropped += 1
                continue
            recording.requests += 1
            recording.size_bytes += len(line)

    def close(self) -> None:
        """Close all files. They are deleted with the run directory."""
        for recording in self._all.values():
            recording.file.close()
        self._all.clear()
