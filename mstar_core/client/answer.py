"""What a whole answer says: its JSON, or the result that its JSON or its frames hold. Used by both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mstar_core.client.event import Chunk, ErrorEvent
from mstar_core.client.failure import MStarError
from mstar_core.client.frame import FRAMES
from mstar_core.client.reader import StreamReader
from mstar_core.client.result import GenerateResult, result_of, result_of_chunks
from mstar_core.client.stream import failure_of_event

if TYPE_CHECKING:
    import httpx


def object_of(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer. Raises MStarError for any other body, such as a proxy's page."""
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        kind = response.headers.get("Content-Type") or "no content type"
        raise MStarError(
            "the answer is not the server's", f"{kind}: {response.text[:80]!r}", "is this the address of a deployment?",
            status=response.status_code, code="malformed",
        )  # fmt: skip
    return found


def result_from(response: httpx.Response) -> GenerateResult:
    """The result of a whole answer of /generate. Raises MStarError."""
    if not (response.headers.get("Content-Type") or "").startswith(FRAMES):
        return result_of(object_of(response))
    reader = StreamReader(response.headers.get("X-Request-ID"), FRAMES)
    events = [*reader.push(response.content), *reader.end()]
    for event in events:
        if isinstance(event, ErrorEvent):
            raise failure_of_event(event)
    chunks = [event for event in events if isinstance(event, Chunk)]
    facts = {
        "request_id": reader.request_id, "finish_reason": reader.finish_reason, "usage": reader.usage,
        "seed": reader.seed, "warnings": reader.warnings,
    }  # fmt: skip
    return result_of_chunks(chunks, facts)
