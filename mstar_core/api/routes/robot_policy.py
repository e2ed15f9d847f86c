"""WebSocket / and /v1/robot/policy: observations in, action chunks out, in the protocol of openpi. GET /healthz."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from sanic.response import HTTPResponse

from mstar_core.api.errors import reply_of
from mstar_core.api.exchange import Exchange
from mstar_core.api.http.websocket import WebSocket
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.parse.params import RequestParams, check_params
from mstar_core.api.routes.fields import rules_of
from mstar_core.api.service import Completion
from mstar_core.client.arrays import array_of
from mstar_core.errors import MstarError, RequestError
from mstar_core.plugin.observation import packed

OUTPUT: Final = "action"
PACKING: Final = frozenset(("shape", "dtype", "name", "format"))
"""Metadata that is implied by the array in the message."""

log = logging.getLogger("mstar.api")


async def healthz(exchange: Exchange) -> HTTPResponse:
    """Return whether the port responds; polled by robot clients."""
    return exchange.whole(b"OK\n", "text/plain; charset=utf-8")


async def robot_policy(exchange: Exchange) -> HTTPResponse | None:
    """Serve one robot until it disconnects. Refusals before the handshake are plain HTTP responses."""
    service = exchange.service
    problem = service.link.deployment.problem()
    if problem is not None:
        raise problem
    sent = _query_params(exchange)
    _checked_params(exchange, sent, exchange.request_id)
    limits = service.deployment.api
    socket = await WebSocket.open(exchange.request, limits.cors_origins, limits.stall_timeout_s)
    exchange.has_begun = True
    try:
        await _converse(exchange, socket, sent)
    except asyncio.CancelledError:
        # The client is gone, so no response is possible. Sanic would respond to a cancelled task by HTTP.
        return None
    return None


async def _converse(exchange: Exchange, socket: WebSocket, sent: Mapping[str, Any]) -> None:
    service = exchange.service
    await socket.send(packed(_greeting(exchange, sent)))
    number, before_ms = 0, None
    while True:
        message = await socket.receive()
        number, started = number + 1, service.clock()
        request_id = f"{exchange.request_id}-{number}"
        code, status = "ok", 200
        try:
            answer = await _infer(exchange, message, sent, request_id, started)
            if before_ms is not None:
                answer["server_timing"]["prev_total_ms"] = before_ms
            await socket.send(packed(answer))
            before_ms = (service.clock() - started) * 1000
        except asyncio.CancelledError:
            code, status = "disconnected", 499
            raise
        except Exception as error:  # noqa: BLE001  isolation boundary: one observation
            code, status = await _fail(exchange, socket, error, request_id)
            return
        finally:
            exchange.note(request_id, code, status, service.clock() - started)


def _greeting(exchange: Exchange, sent: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model's metadata, and the period of the control loop if this connection names one."""
    metadata = exchange.service.model.surface("robot_policy").metadata
    loop = _checked_params(exchange, sent, exchange.request_id).loop
    return metadata if loop is None else {"period_ms": loop.period_ms, **metadata}


async def _infer(
    exchange: Exchange, message: bytes | str, sent: Mapping[str, Any], request_id: str, started: float
) -> dict[str, Any]:
    if isinstance(message, str):
        raise RequestError("the message is text", hint="send a binary msgpack map", field="observation")
    checked = _checked_params(exchange, sent, request_id)
    call = replace(checked.request(request_id, exchange.route, outputs=(OUTPUT,)), observation=message)
    async with exchange.service.open(call, key=exchange.key, scope=exchange.scope, started=started) as session:
        chunks = [chunk async for ready in session.chunks() for chunk in ready]
        done = session.done()
    return answer_of(chunks, done, request_id)


def answer_of(chunks: list[EncodedChunk], done: Completion, request_id: str) -> dict[str, Any]:
    """Return the message of one inference: actions [steps, values], times, and metadata of the outputs."""
    arrays = [array_of(chunk.data, chunk.metadata) for chunk in chunks if chunk.modality == OUTPUT]
    if not arrays:
        raise RequestError("the model returned no actions", field="observation")
    facts = {name: value for name, value in chunks[0].metadata.items() if name not in PACKING}
    times = done.times_ms
    return {
        "actions": arrays[0] if len(arrays) == 1 else np.concatenate(arrays),
        "policy_timing": {"infer_ms": times["total_ms"] - times["queue_ms"]},
        "server_timing": {"infer_ms": times["total_ms"]},
        **facts,
        "request_id": request_id,
        "warnings": list(done.warnings),
    }


def _query_params(exchange: Exchange) -> dict[str, str]:
    """Return the parameters of all inferences on a connection, from the query string of the path."""
    query: Mapping[str, list[str]] = exchange.request.get_args(keep_blank_values=True)
    twice = next((name for name, values in query.items() if len(values) > 1), None)
    if twice is not None:
        raise RequestError(f"{twice[:40]} is given more than once", hint="send it once", field=twice[:40])
    if "output_format" in query:
        raise RequestError(
            "output_format is not supported here",
            hint="actions are sent as msgpack arrays",
            field="output_format",
            code="unsupported_parameter",
        )
    return {name: values[0] for name, values in query.items()}


def _checked_params(exchange: Exchange, sent: Mapping[str, Any], request_id: str) -> RequestParams:
    spec = exchange.service.model
    rules = rules_of(exchange, (OUTPUT,), request_id)
    return check_params(spec, {**spec.surface("robot_policy").params, **sent}, rules)


async def _fail(exchange: Exchange, socket: WebSocket, error: Exception, request_id: str) -> tuple[str, int]:
    """Report the error and close the connection. Returns the code and status to log."""
    reply = reply_of(error, request_id)
    if not isinstance(error, MstarError):
        log.error("an observation failed", exc_info=error)
    exchange.service.count_refusal(reply, error)
    try:
        await socket.fail(reply.message, reply.code)
    except Exception:  # noqa: BLE001 the connection is broken or not read, so the error cannot be reported
        exchange.abort()
    return reply.code, reply.status
