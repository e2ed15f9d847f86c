"""Types of /generate, models, requests and health."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mstar_core.api.schema.answers import ErrorObject, NativeUsage


class NamedFile(msgspec.Struct, kw_only=True):
    """File in a JSON body."""

    data: Annotated[str, Meta(description="base64")]
    name: Annotated[str, Meta(description="a label only")] = ""


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Generate request: a form or a JSON object. Other fields are parameters of the model, as in model_kwargs."""

    text: Annotated[str, Meta(description="the prompt")] | None = None
    files: (
        Annotated[list[NamedFile], Meta(description="uploads, in order; their modality is detected from the content")]
        | None
    ) = None
    input_modalities: Annotated[str | list[str], Meta(description="order of the input segments")] | None = None
    output_modalities: (
        Annotated[str | list[str], Meta(description="default: text, or the first modality of the model")] | None
    ) = None
    streaming: Annotated[bool, Meta(description="stream the response while it is generated")] = True
    stream: Annotated[bool, Meta(description="the same as streaming")] | None = None
    model_kwargs: Annotated[dict[str, Any], Meta(description="parameters of the model")] | None = None
    request_id: Annotated[str, Meta(description="the client's own id, as in the header X-Request-ID")] | None = None
    stream_events: Annotated[Literal["data", "full"], Meta(description="`full` adds a start line and a done line")] = (
        "data"
    )
    model: Annotated[str, Meta(description="any name of the served model")] | None = None


class OutputEntry(msgspec.Struct, kw_only=True):
    """Output. data: base64."""

    data: str
    metadata: dict[str, Any]


class Generated(msgspec.Struct, kw_only=True):
    """Response of /generate without streaming. outputs: by modality."""

    request_id: str
    outputs: dict[str, list[OutputEntry]]
    finish_reason: Literal["stop", "length"]
    usage: NativeUsage
    seed: int
    warnings: list[str]


class ModelCard(msgspec.Struct, kw_only=True):
    """The served model. parameters: JSON schema. speech: whether the speech route answers or reads aloud."""

    id: str
    created: int
    root: str
    aliases: list[str]
    input_modalities: list[str]
    output_modalities: list[str]
    endpoints: list[str]
    max_model_len: int
    parameters: dict[str, Any]
    object: Literal["model"] = "model"
    owned_by: str = "mstar"
    speech: Literal["answer", "verbatim"] | UnsetType = UNSET
    notice: str | UnsetType = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    """List of one model: a deployment serves one model."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class RequestState(msgspec.Struct, kw_only=True):
    """State of a live request or outcome of a finished one."""

    id: str
    status: Literal["preprocessing", "queued", "running", "finished", "failed", "cancelled"]
    route: str
    created: float
    error: ErrorObject | None = None
    object: Literal["request"] = "request"
    total_ms: float | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    usage: dict[str, Any] | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class CancelState(msgspec.Struct, kw_only=True):
    """Result of a cancellation."""

    id: str
    status: Literal["cancelled", "finished"]


class Health(msgspec.Struct, kw_only=True):
    """Health of the deployment: whether every process is alive."""

    status: Literal["healthy", "starting", "draining", "unhealthy"]
    phase: str | UnsetType = UNSET
    component: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Ready(msgspec.Struct, kw_only=True):
    """Readiness of the deployment: whether a request would be accepted now."""

    status: Literal["ready", "unavailable"]
    model: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    phase: str | UnsetType = UNSET
    progress: str | UnsetType = UNSET


class PluginVersion(msgspec.Struct, kw_only=True):
    """Plugin that provides the model."""

    name: str
    distribution: str
    version: str


class Version(msgspec.Struct, kw_only=True):
    """Versions of the server and the model. started_at: seconds since the epoch."""

    version: str
    api: int
    model: str
    plugin: PluginVersion
    started_at: int
