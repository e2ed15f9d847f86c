"""The server's side of a run: a recording at the admin socket, its progress, its state, and the clock's offset."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import MstarError
from mstarctl.client.admin import AdminClient, error_of

SPANS: Final = "spans.jsonl"
STATE: Final = ("running", "waiting", "preparing", "pages_used", "pages_total", "preempted")
POLL_S: Final = 0.2
GPU_READINGS: Final = ("util", "memory_used", "memory_total", "power_w", "clock_mhz", "temperature_c")
TRIPS: Final = 20
LATE_S: Final = 6.0
"""The supervisor writes a request some time after its end, when its last spans have arrived."""

RECORDING_BYTES: Final = 256 << 20


class ServerSide:
    """Recording of one run at a deployment. Owned by the run. admin: None for a URL, and then nothing is recorded."""

    def __init__(self, admin: AdminClient | None, name: str) -> None:
        self._admin = admin
        self._key = ""
        self.warning = ""
        if admin is None:
            return
        try:
            self._key = str(self._post("/v1/recordings", {"name": name, "max_bytes": RECORDING_BYTES})["id"])
        except MstarError as error:
            self.warning = f"the server's spans are not recorded: {error.title}"

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self._admin is not None
        status, _, pieces = self._admin.raw("POST", path, json.dumps(body).encode())
        data = b"".join(pieces)
        if status >= 400:
            raise error_of(status, data)
        found: dict[str, Any] = json.loads(data)
        return found

    def progress(self, facts: dict[str, Any]) -> None:
        """Report the progress of the run, which `top` shows. A deployment that does not answer is ignored."""
        if self._key:
            with suppress(MstarError):
                self._post(f"/v1/recordings/{self._key}/progress", facts)

    def state(self) -> dict[str, Any]:
        """Return requests running and waiting, pages, and GPU readings; empty without a deployment."""
        return server_state(self._admin)

    def clock(self) -> dict[str, float]:
        """Return the offset of the server's monotonic clock to ours and its error in seconds."""
        if self._admin is None:
            return {}
        best: tuple[float, float] | None = None
        for _ in range(TRIPS):
            before = time.monotonic()
            try:
                found = self._admin.get("/v1/clock")
            except MstarError:
                return {}
            after = time.monotonic()
            offset = float(found["monotonic"]) - (before + after) / 2
            best = min(best or (after - before, offset), (after - before, offset))
        assert best is not None
        return {"offset_s": round(best[1], 9), "error_s": round(best[0] / 2, 9)}

    def fetch(self, folder: Path, prefix: str, expected: int) -> int:
        """Write the summaries of this run's requests to `spans.jsonl` and end the recording. Returns their number."""
        if not self._key or self._admin is None:
            return 0
        end = time.monotonic() + LATE_S
        with suppress(MstarError):
            while self._admin.get(f"/v1/recordings/{self._key}")["requests"] < expected and time.monotonic() < end:
                time.sleep(0.1)
        kept: dict[str, bytes] = {}
        try:
            for line in self._admin.raw_lines(f"/v1/recordings/{self._key}", lines=1):
                name = str(json.loads(line)["request"]["id"])
                if name.startswith(prefix):
                    kept[name] = line  # a later summary of a request replaces an earlier one
        except MstarError as error:
            self.warning = f"the server's spans were not fetched: {error.title}"
        finally:
            self.close()
        (folder / SPANS).write_bytes(b"".join(kept.values()))
        return len(kept)

    def close(self) -> None:
        """Delete the recording at the server."""
        if self._key and self._admin is not None:
            with suppress(MstarError):
                for _ in self._admin.raw("DELETE", f"/v1/recordings/{self._key}")[2]:
                    pass
        self._key = ""


def server_state(admin: AdminClient | None) -> dict[str, Any]:
    """Return requests running and waiting, pages, and GPU readings; empty without an answer."""
    if admin is None:
        return {}
    try:
        found = admin.snapshot(("gpus",))
    except MstarError:
        return {}
    head = found["deployment"]
    gpus = {key: {name: gpu[name] for name in GPU_READINGS if name in gpu}
            for key, gpu in (found.get("gpus") or {}).items()}  # fmt: skip
    return {**{name: head.get(name) for name in STATE}, **({"gpus": gpus} if gpus else {})}


def wait_empty(admin: AdminClient | None, limit_s: float) -> bool:
    """Wait until no request is running or waiting. Returns whether that happened; at once without a deployment."""
    end = time.monotonic() + limit_s
    while admin is not None and time.monotonic() < end:
        found = server_state(admin)
        if found and not any(found.get(name) for name in ("running", "waiting", "preparing")):
            return True
        time.sleep(POLL_S)
    return admin is None
