"""Read-only view of the supervisor through the admin socket: live frames and traces. Used by `routes.console`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from mstar_core.errors import NotFound, Unavailable

SOCKET: Final = "admin.sock"
PARTS: Final = "ranks,nodes,edges,gpus,graph"
"""Requests and events are omitted: they contain ids of other clients."""

HEAD: Final = (
    "name",
    "model",
    "state",
    "reason",
    "running",
    "waiting",
    "slots",
    "tokens_s",
    "audio_x",
    "requests_s",
    "ranks",
    "ttft_p50_ms",
    "ttfa_p50_ms",
    "pages_used",
    "pages_total",
)
"""Fields of the deployment that the page shows; paths and process ids are omitted."""

FRAMES: Final = ("snapshot", "delta", "beat", "resync")
CONNECT_S: Final = 5.0


async def live_frames(run_dir: str, hz: float) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the frames of a watch without what the page may not show. Raises Unavailable."""
    query = f"/v1/watch?hz={hz:g}&parts={PARTS}"
    try:
        async with _client(run_dir, None) as client, client.stream("GET", query) as answer:
            if answer.status_code != 200:
                raise Unavailable("the live view is not available", hint="close other live views")
            async for line in answer.aiter_lines():
                frame = shown_frame(msgspec.json.decode(line)) if line else None
                if frame is not None:
                    yield frame
    except httpx.HTTPError as error:
        raise _unreachable() from error


def shown_frame(frame: dict[str, Any]) -> dict[str, Any] | None:
    """Return a frame with only what the page shows, None for other kinds of frames."""
    if frame.get("k") not in FRAMES:
        return None
    view = {name: value for name, value in frame.items() if name not in ("requests", "events", "children")}
    if "deployment" in view:
        view["deployment"] = {name: value for name, value in (view["deployment"] or {}).items() if name in HEAD}
    for gpus in (view.get("gpus"), (view.get("set") or {}).get("gpus")):
        for gpu in (gpus or {}).values():
            gpu.pop("processes", None)  # names and ids of other processes of the host
    return view


async def request_trace(run_dir: str, request_id: str, handle: int) -> dict[str, Any]:
    """Return the trace of a request. Requests of other API keys may have its id, but not its handle.

    Raises NotFound, Unavailable.
    """
    try:
        async with _client(run_dir, CONNECT_S) as client:
            answer = await client.get(f"/v1/requests/{quote(request_id, safe='')}/trace?handle={handle}")
    except httpx.HTTPError as error:
        raise _unreachable() from error
    if answer.status_code != 200:
        raise NotFound("the request has no trace", hint="traces are kept for a while", code="request_not_found")
    trace: dict[str, Any] = msgspec.json.decode(answer.content)
    return trace


def _client(run_dir: str, read_s: float | None) -> httpx.AsyncClient:
    # This socket has no TLS. With `verify`, each client would read certificates for 17 ms on the event loop.
    transport = httpx.AsyncHTTPTransport(uds=str(Path(run_dir) / SOCKET), verify=False)
    limits = httpx.Timeout(CONNECT_S, read=read_s)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=limits)


def _unreachable() -> Unavailable:
    return Unavailable("the supervisor does not respond", hint="retry later")
