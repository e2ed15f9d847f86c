"""The server's side of a run: a recording at the admin socket, its progress, events, state, and clock offset."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import MstarError
from mstarctl.bench.client.wire import ServerAddress
from mstarctl.bench.target import BenchTarget, get
from mstarctl.client.admin import AdminClient, error_of

SPANS: Final = "spans.jsonl"
STATE: Final = ("running", "waiting", "preparing", "pages_used", "pages_total", "preempted")
POLL_S: Final = 0.2
GPU_READINGS: Final = ("util", "memory_used", "memory_total", "power_w", "clock_mhz", "temperature_c")
TRIPS: Final = 20
LATE_S: Final = 6.0
"""The supervisor writes a request some time after its end, when its last spans have arrived."""

READY_S: Final = 1.0
"""Interval and time limit of the readings of `/ready`."""

RECORDING_BYTES: Final = 256 << 20


class ServerSide:
    """Recording of one run at a deployment. Owned by the run. A URL has no recording; its `/ready` is watched."""

    def __init__(self, target: BenchTarget, name: str) -> None:
        self._admin = target.admin
        self._server = target.server
        self._watch: ReadyWatch | None = None
        self._origin_s = 0.0
        self._key = ""
        self.warning = ""
        if target.admin is None:
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
        answer: dict[str, Any] = json.loads(data)
        return answer

    def progress(self, facts: dict[str, Any]) -> None:
        """Report the progress of the run, which `top` shows. A deployment that does not answer is ignored."""
        if self._key:
            with suppress(MstarError):
                self._post(f"/v1/recordings/{self._key}/progress", facts)

    def state(self) -> dict[str, Any]:
        """Return requests running and waiting, pages, and GPU readings; empty without a deployment."""
        return server_state(self._admin)

    def begin(self, start_ns: int) -> None:
        """Note the start of the measured phase, from which events are counted. start_ns: of our monotonic clock."""
        before = time.monotonic(), time.time()
        self._origin_s = before[1] + start_ns / 1e9 - before[0]
        if self._admin is None:
            self._watch = ReadyWatch(self._server)
            return
        with suppress(MstarError):  # the server may be on another host, whose clock is another one
            told = float(self._admin.get("/v1/clock")["time"])
            self._origin_s += told - (before[1] + time.time()) / 2

    def events(self) -> list[dict[str, Any]]:
        """Return states of the deployment and deaths of its processes, with their times since the measured phase began.

        The last state before it comes first, so that the state at its start is known.
        """
        if self._watch is not None:
            events = self._watch.end()
        else:
            events = []
            with suppress(MstarError):
                events = [event for event in self._admin.lines("/v1/events", since=0) if event] if self._admin else []
        kept = [
            {
                "at_s": round(float(event["time"]) - self._origin_s, 3),
                "type": str(event["type"]),
                **{name: event[name] for name in ("child", "cause", "reason") if event.get(name)},
            }
            for event in events
            if event["type"] == "child.died" or str(event["type"]).startswith("deployment.")
        ]
        before = [event for event in kept if event["at_s"] < 0 and event["type"] != "child.died"]
        return [*before[-1:], *(event for event in kept if event["at_s"] >= 0)]

    def clock(self) -> dict[str, float]:
        """Return the offset of the server's monotonic clock to ours and its error in seconds."""
        if self._admin is None:
            return {}
        best: tuple[float, float] | None = None
        for _ in range(TRIPS):
            before = time.monotonic()
            try:
                clock = self._admin.get("/v1/clock")
            except MstarError:
                return {}
            after = time.monotonic()
            offset = float(clock["monotonic"]) - (before + after) / 2
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
        """Delete the recording at the server, and stop watching it."""
        if self._watch is not None:
            self._watch.end()
        if self._key and self._admin is not None:
            with suppress(MstarError):
                for _ in self._admin.raw("DELETE", f"/v1/recordings/{self._key}")[2]:
                    pass
        self._key = ""


class ReadyWatch:
    """Reads `/ready` once a second in a thread, for servers without an admin socket. Owned by `ServerSide`.

    It ends by itself at a server without that path.
    """

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._events: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ready", daemon=True)
        self._thread.start()

    def end(self) -> list[dict[str, Any]]:
        """Stop, and return each change of the state as an event."""
        self._ended.set()
        self._thread.join(READY_S)
        return list(self._events)

    def _run(self) -> None:
        while not self._ended.is_set():
            asked_s = time.time()
            state, why = ready_state(self._server)
            if not state:
                return
            if not self._events or self._events[-1]["type"] != f"deployment.{state}":
                self._events.append({"time": asked_s, "type": f"deployment.{state}", "reason": why})
            self._ended.wait(READY_S)


def ready_state(server: ServerAddress) -> tuple[str, str]:
    """Return `ready`, `unavailable` or `unreachable`, and why; empty for a server that has no `/ready`."""
    try:
        status, body = get(server, "/ready", timeout_s=READY_S)
    except OSError as error:
        return "unreachable", str(error)
    if status == 503:
        try:
            return "unavailable", str(json.loads(body).get("message") or "")
        except (ValueError, AttributeError):
            return "unavailable", ""
    return ("ready", "") if status == 200 else ("", "")


def server_state(admin: AdminClient | None) -> dict[str, Any]:
    """Return requests running and waiting, pages, and GPU readings; empty without an answer."""
    if admin is None:
        return {}
    try:
        snapshot = admin.snapshot(("gpus",))
    except MstarError:
        return {}
    head = snapshot["deployment"]
    gpus = {
        key: {name: gpu[name] for name in GPU_READINGS if name in gpu}
        for key, gpu in (snapshot.get("gpus") or {}).items()
    }
    return {**{name: head.get(name) for name in STATE}, **({"gpus": gpus} if gpus else {})}


def wait_empty(admin: AdminClient | None, limit_s: float) -> bool:
    """Wait until no request is running or waiting. Returns whether that happened; at once without a deployment."""
    end = time.monotonic() + limit_s
    while admin is not None and time.monotonic() < end:
        state = server_state(admin)
        if state and not any(state.get(name) for name in ("running", "waiting", "preparing")):
            return True
        time.sleep(POLL_S)
    return admin is None
