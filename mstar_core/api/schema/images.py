"""Types of POST /v1/images/generations and POST /v1/images/edits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mstar_core.api.schema.answers import Usage


class ImageRequest(msgspec.Struct, kw_only=True):
    """Image request. Other fields are parameters of the model."""

    prompt: Annotated[str, Meta(min_length=1, description="description of the image or of the edit")]
    model: Annotated[str, Meta(description="any name of the served model")] | None = None
    n: Annotated[int, Meta(ge=1, description="number of images; image i uses seed + i")] = 1
    size: (
        Annotated[
            str,
            Meta(
                pattern="^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$",
                description="WIDTHxHEIGHT or auto; the parameters width and height win",
            ),
        ]
        | None
    ) = None
    response_format: Annotated[Literal["b64_json", "url"], Meta(description="`url` returns data URLs")] = "b64_json"
    output_format: Annotated[Literal["png", "jpeg", "webp"], Meta(description="file format of the images")] = "png"
    stream: Annotated[bool, Meta(description="must be false: streaming is not supported")] = False
    request_id: Annotated[str, Meta(description="the client's own id, as in the header X-Request-ID")] | None = None


class MadeImage(msgspec.Struct, kw_only=True):
    """Generated image. revised_prompt: the reasoning text of the model, if any."""

    b64_json: str | None
    url: str | None
    seed: int
    revised_prompt: str | None


class Images(msgspec.Struct, kw_only=True):
    """Generated images."""

    created: int
    data: list[MadeImage]
    usage: Usage
    output_format: str
