"""Types of /v1/videos, by the names of OpenAI's client."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mstar_core.api.schema import ModelName, RequestId

SIZE = "^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$"
Status = Literal["queued", "in_progress", "completed", "failed"]


class VideoRequest(msgspec.Struct, kw_only=True):
    """Video request. Other fields are parameters of the model."""

    prompt: Annotated[str, Meta(min_length=1, description="description of the video")]
    model: ModelName = None
    seconds: Annotated[str | float, Meta(description="length in seconds; num_frames wins")] | None = None
    size: Annotated[str, Meta(pattern=SIZE, description="WIDTHxHEIGHT or auto")] | None = None
    input_reference: Annotated[Any, Meta(description="first image: a file, or an object with image_url")] = None
    request_id: RequestId = None


class VideoError(msgspec.Struct, kw_only=True):
    """Reason of a failure."""

    code: str
    message: str


class VideoObject(msgspec.Struct, kw_only=True):
    """A video and its progress in percent. Times are seconds since the epoch."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status = "queued"
    progress: int = 0
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    prompt: str
    seconds: str
    size: str
    error: VideoError | None = None
    remixed_from_video_id: str | None = None


class VideoList(msgspec.Struct, kw_only=True):
    """A page of videos."""

    object: Literal["list"] = "list"
    data: list[VideoObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedVideo(msgspec.Struct, kw_only=True):
    """Confirmation of a deletion."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True
