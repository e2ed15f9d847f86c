"""Route table: path, handler, access, request and response types of every route. Used by the app and OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.responses.create import create
from mstar_core.api.responses.options import INCLUDED
from mstar_core.api.responses.schema import DeletedResponse, ItemList, ResponseObject, ResponsesRequest
from mstar_core.api.responses.stored import ITEMS, MOST_ITEMS, delete, input_items, retrieve
from mstar_core.api.responses.stored import cancel as cancel_response
from mstar_core.api.routes import videos
from mstar_core.api.routes.chat import chat
from mstar_core.api.routes.console import (
    asset_file,
    docs_page,
    live,
    other_deployments,
    page,
    page_or_robot_policy,
    trace,
)
from mstar_core.api.routes.deployment import (
    ENDPOINTS,
    health,
    metrics,
    model,
    models,
    openapi_document,
    ready,
    version,
)
from mstar_core.api.routes.generate import generate
from mstar_core.api.routes.images import image, image_edit
from mstar_core.api.routes.realtime import client_secret, realtime
from mstar_core.api.routes.realtime_calls import SDP, hang_up, realtime_call
from mstar_core.api.routes.request_state import cancel, end_session, events, request_state
from mstar_core.api.routes.robot_policy import healthz, robot_policy
from mstar_core.api.routes.samples import samples
from mstar_core.api.routes.sound import voices
from mstar_core.api.routes.sound.speech import speech
from mstar_core.api.routes.text.completions import completion
from mstar_core.api.routes.text.embeddings import embedding
from mstar_core.api.routes.text.schema import (
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Embeddings,
    PlainText,
    TextCompletion,
    TokenizeRequest,
    Tokens,
)
from mstar_core.api.routes.text.tokens import detokenize, tokenize
from mstar_core.api.routes.transcriptions import transcription, translation
from mstar_core.api.schema import (
    CancelState,
    ChatCompletion,
    ChatRequest,
    ClientSecretAnswer,
    ClientSecretRequest,
    DeletedSession,
    DeletedVoice,
    Generated,
    GenerateRequest,
    Health,
    ImageRequest,
    Images,
    ModelCard,
    ModelList,
    Ready,
    RequestState,
    Samples,
    SpeechRequest,
    Transcription,
    TranscriptionRequest,
    TranslationRequest,
    Version,
    VoiceList,
    VoiceObject,
    VoiceRequest,
)
from mstar_core.api.videos.schema import DeletedVideo, VideoList, VideoObject, VideoRequest

Handler = Callable[[Exchange], Awaitable[HTTPResponse | None]]
Struct = type[msgspec.Struct]

JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
URLENCODED: Final = "application/x-www-form-urlencoded"
EVENTS: Final = "text/event-stream"
MSGPACK: Final = "application/msgpack"
SOUNDS: Final = ("audio/wav", "audio/pcm", "audio/flac", "audio/mpeg", "audio/ogg", EVENTS)
ASKED: Final = (400, 401, 404, 408, 409, 413, 415, 422, 429, 499, 500, 503, 504)
"""Error statuses of inference requests."""

STORED: Final = (400, 401, 404, 410, 503)
"""Error statuses of routes for stored responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    """One route. needs: mappings of which the model must have one. is_open: requires no API key.

    is_socket: a WebSocket. is_console: absent with `--no-console`. is_hidden: absent from the API description.
    shares_path: another route has the same path and another method. has_parameters: the body may set parameters of the
    model.

    body: type of the request body, sent as one of the content types in `takes`. files: upload fields, and whether each
    may be repeated. answer: type of the JSON response. gives: other content types of responses. query: schemas of the
    parameters in the query. errors: possible error statuses.
    """

    method: str
    path: str
    handler: Handler
    name: str
    summary: str
    needs: tuple[str, ...] = ()
    is_native: bool = False
    is_open: bool = False
    reads_body: bool = False
    has_parameters: bool = True
    is_socket: bool = False
    is_console: bool = False
    is_hidden: bool = False
    shares_path: bool = False
    body: Struct | None = None
    takes: tuple[str, ...] = ()
    files: Mapping[str, bool] = field(default_factory=dict)
    answer: Struct | None = None
    gives: tuple[str, ...] = ()
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: tuple[int, ...] = (401,)


ROUTES: Final = (
    HttpRoute(
        method="POST",
        path="/generate",
        handler=generate,
        name="generate",
        is_native=True,
        reads_body=True,
        summary="Any modalities in and out; streamed by default",
        body=GenerateRequest,
        takes=(FORM, URLENCODED, JSON),
        files={"files": True},
        answer=Generated,
        gives=("application/x-ndjson", "application/x-mstar-frames"),
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["chat"],
        handler=chat,
        name="chat",
        needs=("chat",),
        reads_body=True,
        summary="Create a chat completion",
        body=ChatRequest,
        takes=(JSON,),
        answer=ChatCompletion,
        gives=(EVENTS,),
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["responses"],
        handler=create,
        name="responses",
        needs=("chat",),
        reads_body=True,
        summary="Create a response",
        body=ResponsesRequest,
        takes=(JSON,),
        answer=ResponseObject,
        gives=(EVENTS,),
        errors=ASKED,
    ),
    HttpRoute(
        method="GET",
        path="/v1/responses/<name:str>",
        handler=retrieve,
        name="response",
        needs=("chat",),
        answer=ResponseObject,
        gives=(EVENTS,),
        summary="A stored response, or the events of one in the background",
        query={
            "stream": {"type": "boolean", "default": False},
            "starting_after": {"type": "integer", "minimum": 0},
            "include": {"type": "array", "items": {"enum": list(INCLUDED)}},
        },
        errors=STORED,
    ),
    HttpRoute(
        method="DELETE",
        path="/v1/responses/<name:str>",
        handler=delete,
        name="response_delete",
        needs=("chat",),
        shares_path=True,
        answer=DeletedResponse,
        summary="Delete a stored response",
        errors=STORED,
    ),
    HttpRoute(
        method="POST",
        path="/v1/responses/<name:str>/cancel",
        handler=cancel_response,
        name="response_cancel",
        needs=("chat",),
        answer=ResponseObject,
        summary="Cancel a response in the background",
        errors=STORED,
    ),
    HttpRoute(
        method="GET",
        path="/v1/responses/<name:str>/input_items",
        handler=input_items,
        name="response_items",
        needs=("chat",),
        answer=ItemList,
        summary="The items that a response was generated from",
        query={
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS, "default": ITEMS},
            "after": {"type": "string"},
            "include": {"type": "array", "items": {"enum": list(INCLUDED)}},
        },
        errors=STORED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["completion"],
        handler=completion,
        name="completion",
        needs=("completion",),
        reads_body=True,
        summary="Continue prompts without a chat template",
        body=CompletionRequest,
        takes=(JSON,),
        answer=TextCompletion,
        gives=(EVENTS,),
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["embedding"],
        handler=embedding,
        name="embedding",
        needs=("embedding",),
        reads_body=True,
        summary="Turn texts into vectors",
        body=EmbeddingRequest,
        takes=(JSON,),
        answer=Embeddings,
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["tokenize"],
        handler=tokenize,
        name="tokenize",
        needs=("tokenize",),
        reads_body=True,
        has_parameters=False,
        summary="Token ids of a prompt or of messages",
        body=TokenizeRequest,
        takes=(JSON,),
        answer=Tokens,
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        name="detokenize",
        needs=("tokenize",),
        reads_body=True,
        has_parameters=False,
        summary="Text of token ids",
        body=DetokenizeRequest,
        takes=(JSON,),
        answer=PlainText,
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["speech"],
        handler=speech,
        name="speech",
        needs=("speech",),
        reads_body=True,
        summary="Convert text to speech",
        body=SpeechRequest,
        takes=(JSON,),
        gives=SOUNDS,
        errors=ASKED,
    ),
    HttpRoute(
        method="GET",
        path="/v1/audio/voices",
        handler=voices.voices,
        name="voices",
        needs=("speech",),
        shares_path=True,
        answer=VoiceList,
        summary="The model's own voices, and uploaded ones",
    ),
    HttpRoute(
        method="POST",
        path="/v1/audio/voices",
        handler=voices.upload,
        name="voice_upload",
        needs=("speech",),
        reads_body=True,
        has_parameters=False,
        summary="Upload a voice to clone",
        body=VoiceRequest,
        takes=(FORM,),
        files={"file": False},
        answer=VoiceObject,
        errors=(400, 401, 409, 413, 415, 429),
    ),
    HttpRoute(
        method="DELETE",
        path="/v1/audio/voices/<name:str>",
        handler=voices.delete,
        name="voice_delete",
        needs=("speech",),
        answer=DeletedVoice,
        summary="Delete an uploaded voice",
        errors=(401, 404),
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["image"],
        handler=image,
        name="image",
        needs=("image",),
        reads_body=True,
        summary="Generate images from text",
        body=ImageRequest,
        takes=(JSON,),
        answer=Images,
        gives=(EVENTS,),
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["image_edit"],
        handler=image_edit,
        name="image_edit",
        needs=("image_edit",),
        reads_body=True,
        summary="Edit images by a prompt",
        body=ImageRequest,
        takes=(FORM,),
        files={"image": True},
        answer=Images,
        gives=(EVENTS,),
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["video"],
        handler=videos.create,
        name="video",
        needs=("video",),
        reads_body=True,
        summary="Begin to generate a video",
        body=VideoRequest,
        takes=(FORM, JSON),
        files={"input_reference": False},
        answer=VideoObject,
        errors=ASKED,
    ),
    HttpRoute(
        method="GET",
        path=ENDPOINTS["video"],
        handler=videos.page,
        name="videos",
        needs=("video",),
        shares_path=True,
        answer=VideoList,
        summary="A page of videos",
        query={
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "limit": {"type": "integer", "minimum": 1, "maximum": videos.MOST, "default": videos.USUAL},
            "after": {"type": "string"},
        },
        errors=STORED,
    ),
    HttpRoute(
        method="GET",
        path=f"{ENDPOINTS['video']}/<name:str>",
        handler=videos.retrieve,
        name="video_state",
        needs=("video",),
        answer=VideoObject,
        summary="A video and its progress",
        errors=STORED,
    ),
    HttpRoute(
        method="DELETE",
        path=f"{ENDPOINTS['video']}/<name:str>",
        handler=videos.delete,
        name="video_delete",
        needs=("video",),
        shares_path=True,
        answer=DeletedVideo,
        summary="Delete a video, or cancel one that is generated",
        errors=STORED,
    ),
    HttpRoute(
        method="GET",
        path=f"{ENDPOINTS['video']}/<name:str>/content",
        handler=videos.content,
        name="video_content",
        needs=("video",),
        gives=("video/mp4", "image/webp"),
        summary="The file of a finished video",
        query={"variant": {"enum": list(videos.FILES), "default": "video"}},
        errors=(*STORED, 409),
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["transcription"],
        handler=transcription,
        name="transcription",
        needs=("transcription",),
        reads_body=True,
        summary="Transcribe speech",
        body=TranscriptionRequest,
        takes=(FORM,),
        files={"file": False},
        answer=Transcription,
        gives=("text/plain", "text/vtt", EVENTS),
        errors=ASKED,
    ),
    HttpRoute(
        method="POST",
        path=ENDPOINTS["translation"],
        handler=translation,
        name="translation",
        needs=("translation",),
        reads_body=True,
        summary="Translate speech into English",
        body=TranslationRequest,
        takes=(FORM,),
        files={"file": False},
        answer=Transcription,
        gives=("text/plain", "text/vtt"),
        errors=ASKED,
    ),
    HttpRoute(
        method="GET",
        path=ENDPOINTS["robot_policy"],
        handler=robot_policy,
        name="robot_policy",
        needs=("robot_policy",),
        is_socket=True,
        summary="Robot observations in, actions out",
        takes=("WebSocket",),
        gives=(MSGPACK,),
    ),
    HttpRoute(
        method="GET",
        path=ENDPOINTS["realtime"],
        handler=realtime,
        name="realtime",
        needs=("chat", "speech"),
        is_socket=True,
        is_open=True,  # the handler checks the key, which may be a client secret
        summary="Conversations in text and sound",
        takes=("WebSocket",),
        gives=(JSON,),
    ),
    HttpRoute(
        method="POST",
        path="/v1/realtime/calls",
        handler=realtime_call,
        name="realtime_call",
        needs=("chat", "speech"),
        reads_body=True,
        is_open=True,  # the handler checks the key, which may be a client secret
        has_parameters=False,
        summary="Conversations over WebRTC: an SDP offer in, its answer out",
        takes=(FORM, SDP),
        gives=(SDP,),
        errors=(400, 401, 404, 408, 413, 415, 429, 503),
    ),
    HttpRoute(
        method="POST",
        path="/v1/realtime/calls/<call_id:str>/hangup",
        handler=hang_up,
        name="realtime_hangup",
        needs=("chat", "speech"),
        summary="End a call",
        gives=("text/plain",),
        errors=(401, 404),
    ),
    HttpRoute(
        method="POST",
        path="/v1/realtime/client_secrets",
        handler=client_secret,
        name="client_secret",
        needs=("chat", "speech"),
        reads_body=True,
        has_parameters=False,
        summary="Create a short-lived key for realtime sessions",
        body=ClientSecretRequest,
        takes=(JSON,),
        answer=ClientSecretAnswer,
        errors=(400, 401, 404, 408, 413, 415, 429, 503),
    ),
    HttpRoute(
        method="GET",
        path="/",
        handler=page_or_robot_policy,
        name="robot_policy_root",
        needs=("robot_policy",),
        is_socket=True,
        is_open=True,  # the handler checks the key of sockets
        summary="The same at the path that openpi clients use; plain HTTP returns the web page",
        takes=("WebSocket",),
        gives=(MSGPACK,),
    ),
    HttpRoute(
        method="GET",
        path="/healthz",
        handler=healthz,
        name="healthz",
        needs=("robot_policy",),
        is_open=True,
        summary="Whether the port responds",
        gives=("text/plain",),
        errors=(),
    ),
    HttpRoute(
        method="GET",
        path="/v1/models",
        handler=models,
        name="models",
        summary="The served model, as a list",
        answer=ModelList,
    ),
    HttpRoute(
        method="GET",
        path="/v1/models/<name:path>",
        handler=model,
        name="model",
        answer=ModelCard,
        errors=(401, 404),
        summary="The served model, with the JSON schema of its parameters",
    ),
    HttpRoute(
        method="GET",
        path="/v1/samples",
        handler=samples,
        name="samples",
        answer=Samples,
        summary="Inputs that fit the model, with their files",
    ),
    HttpRoute(
        method="DELETE",
        path="/v1/sessions/<name:str>",
        handler=end_session,
        name="session_delete",
        answer=DeletedSession,
        summary="End a session of requests with `session_id`",
        errors=(401, 404),
    ),
    HttpRoute(
        method="GET",
        path="/v1/requests/<name:str>",
        handler=request_state,
        name="request",
        answer=RequestState,
        summary="State or outcome of a request",
        errors=(401, 404),
    ),
    HttpRoute(
        method="GET",
        path="/v1/requests/<name:str>/events",
        handler=events,
        name="events",
        gives=(EVENTS, "application/x-ndjson", "application/x-mstar-frames"),
        summary="Events of a request with `X-Mstar-Detach`, after a number",
        query={"after": {"type": "integer", "minimum": 0, "default": 0}},
        errors=(400, 401, 404, 410),
    ),
    HttpRoute(
        method="POST",
        path="/v1/requests/<name:str>/cancel",
        handler=cancel,
        name="cancel",
        answer=CancelState,
        summary="Cancel a request",
        errors=(401, 404),
    ),
    HttpRoute(
        method="GET",
        path="/health",
        handler=health,
        name="health",
        is_open=True,
        answer=Health,
        errors=(503,),
        summary="Whether every process is alive",
    ),
    HttpRoute(
        method="GET",
        path="/ready",
        handler=ready,
        name="ready",
        is_open=True,
        answer=Ready,
        errors=(503,),
        summary="Whether requests are accepted",
    ),
    HttpRoute(
        method="GET",
        path="/version",
        handler=version,
        name="version",
        answer=Version,
        summary="Versions of the server and the model",
    ),
    HttpRoute(
        method="GET",
        path="/metrics",
        handler=metrics,
        name="metrics",
        gives=("text/plain",),
        summary="Prometheus metrics",
    ),
    HttpRoute(
        method="GET",
        path="/openapi.json",
        handler=openapi_document,
        name="openapi",
        gives=(JSON,),
        summary="This description",
    ),
    HttpRoute(
        method="GET",
        path="/docs",
        handler=docs_page,
        name="docs",
        gives=("text/html",),
        is_open=True,
        errors=(),
        summary="This description as a web page",
    ),
    HttpRoute(
        method="GET",
        path="/assets/<name:path>",
        handler=asset_file,
        name="asset",
        is_open=True,
        is_hidden=True,
        summary="Scripts and styles of the pages",
        gives=("text/javascript", "text/css"),
        errors=(404,),
    ),
    HttpRoute(
        method="GET",
        path="/",
        handler=page,
        name="page",
        is_open=True,
        is_console=True,
        is_hidden=True,
        summary="The web page",
        gives=("text/html",),
        errors=(),
    ),
    HttpRoute(
        method="GET",
        path="/console/live",
        handler=live,
        name="live",
        is_console=True,
        is_hidden=True,
        summary="The graph with rates and placement, for the web page",
        gives=(EVENTS,),
        errors=(401, 403, 503),
    ),
    HttpRoute(
        method="GET",
        path="/console/trace/<name:str>",
        handler=trace,
        name="trace",
        is_console=True,
        is_hidden=True,
        summary="The spans of a request, for the web page",
        gives=(JSON,),
        errors=(401, 403, 404, 503),
    ),
    HttpRoute(
        method="GET",
        path="/console/deployments",
        handler=other_deployments,
        name="other_deployments",
        is_console=True,
        is_hidden=True,
        summary="Other deployments of the host, for the web page",
        gives=(JSON,),
        errors=(401, 403),
    ),
)


def shown_path(path: str) -> str:
    """Return a path in OpenAPI notation: `/v1/models/{name}`."""
    head, *parts = path.split("<")
    return head + "".join(f"{{{part.partition(':')[0]}}}{part.partition('>')[2]}" for part in parts)
