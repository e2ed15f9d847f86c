"""POST /v1/embeddings: texts or token ids in, one vector for each out."""

from __future__ import annotations

import numpy as np
import pybase64
from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.group import Group, open_prompts
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.output.units import Array
from mstar_core.api.parse.prompts import read_prompts
from mstar_core.api.routes.fields import check_name, read_body
from mstar_core.api.routes.text.completions import raw_calls
from mstar_core.api.routes.text.schema import EmbeddingEntry, EmbeddingRequest, Embeddings, EmbeddingUsage
from mstar_core.errors import EngineError, RequestError
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import Embedding

FLOAT32 = np.dtype("<f4")


async def embedding(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response."""
    service = exchange.service
    body, rest = await read_body(exchange, EmbeddingRequest)
    check_name(exchange, body.model)
    _check_size(service.model, body.dimensions)
    calls = raw_calls(exchange, read_prompts(body.input, "input", exchange.limits), rest, ("embedding",))
    exchange.keep_events(None)
    async with open_prompts(exchange, calls, 1) as group:
        vectors = await _vectors(group)
        exchange.warn(group.warnings)
        entries = [
            EmbeddingEntry(index=index, embedding=_written(cut(vectors[index], body.dimensions), body.encoding_format))
            for index in range(len(calls))
        ]
        count = group.usage["prompt_tokens"]
        usage = EmbeddingUsage(prompt_tokens=count, total_tokens=count)
        return exchange.json(Embeddings(data=entries, model=service.deployment.name, usage=usage))


async def _vectors(group: Group) -> dict[int, Array]:
    """Return the vector of each item, float32 [dim]. Raises EngineError if a model sends none."""
    vectors: dict[int, Array] = {}
    async for piece in group.pieces():
        for chunk in piece.chunks if piece is not None else ():
            if piece is not None and chunk.modality == "embedding":
                vectors[piece.index] = _vector(chunk)
    if len(vectors) < len(group.calls):
        raise EngineError("the model sent no embedding")
    return vectors


def _vector(chunk: EncodedChunk) -> Array:
    return np.frombuffer(chunk.data, FLOAT32)


def cut(vector: Array, size: int | None) -> Array:
    """Return the first `size` values at length 1, the whole vector for None. Raises RequestError if it is shorter."""
    if size is None:
        return vector
    _check_room(size, len(vector))
    first = vector[:size].astype(np.float64)
    length = float(np.linalg.norm(first))
    short: Array = (first / length if length else first).astype(FLOAT32)
    return short


def _check_size(spec: ModelSpec, size: int | None) -> None:
    modality = spec.output("embedding")
    if size is not None and isinstance(modality, Embedding) and modality.dim is not None:
        _check_room(size, modality.dim)


def _check_room(size: int, most: int) -> None:
    if size > most:
        allowed = f"1 to {most}"
        raise RequestError(
            f"dimensions is {size}, but must be {allowed}", field="dimensions", value=size, allowed=allowed
        )


def _written(vector: Array, form: str) -> list[float] | str:
    if form == "base64":
        return pybase64.b64encode_as_string(vector.astype(FLOAT32, copy=False).tobytes())
    values: list[float] = vector.tolist()
    return values
