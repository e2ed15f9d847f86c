"""POST /v1/images/generations and POST /v1/images/edits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mstar_core.api.schema.answers import Usage


class ImageRequest(msgspec.Struct, kw_only=True):
    """Other fields are parameters of the model."""

    prompt: Annotated[str, Meta(min_length=1, description="what to paint, or to change")]
    model: Annotated[str, Meta(description="any name of the served model")] | None = None
    n: Annotated[int, Meta(ge=1, description="images to make; image i has seed + i")] = 1
    size: (
        Annotated[
            str,
            Meta(
                pattern="^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$",
                description="WIDTHxHEIGHT, or auto; width and height win",
            ),
        ]
        | None
    ) = None
    response_format: Annotated[Literal["b64_json", "url"], Meta(description="`url` is answered with a data URL")] = (
        "b64_json"
    )
    output_format: Annotated[Literal["png", "jpeg", "webp"], Meta(description="kind of the files")] = "png"
    stream: Annotated[bool, Meta(description="not supported: false alone")] = False
    request_id: Annotated[str, Meta(description="the client's own id, as the header X-Request-ID")] | None = None


class MadeImage(msgspec.Struct, kw_only=True):
    """One image. revised_prompt: the model's thought, where it had one."""

    b64_json: str | None
    url: str | None
    seed: int
    revised_prompt: str | None


class Images(msgspec.Struct, kw_only=True):
    """A whole answer."""

    created: int
    data: list[MadeImage]
    usage: Usage
    output_format: str
