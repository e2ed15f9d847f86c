"""Messages between api and conductor: the life of a request."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_core.errors import MstarError
from mstar_core.messages.tensors import TensorRef


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error in a message: the public sentence, its code and HTTP status. detail goes to logs only."""

    message: str
    code: str = "internal_error"
    status: int = 500
    param: str | None = None
    detail: str = ""


def error_info(error: BaseException, otherwise: str) -> ErrorInfo:
    """Return an error as a message. A foreign error becomes the sentence `otherwise`, with its own text in `detail`."""
    if not isinstance(error, MstarError):
        return ErrorInfo(message=otherwise, code="engine_error", detail=f"{type(error).__name__}: {error}")
    field = error.facts.get("field")
    param = None if field is None else str(field)
    return ErrorInfo(message=error.public, code=error.code, status=error.status, param=param, detail=error.detail)


class SegmentRef(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt segment: its kind, length in tokens, and tensors by walk input name.

    content: key of what determines the tensors; empty if unknown.
    """

    kind: str
    length: int
    inputs: dict[str, TensorRef]
    content: bytes = b""


class SavedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """State of a loop before an iteration: its carried values by input port. See `Loop.save_every`."""

    iteration: int
    values: dict[str, TensorRef]


class Resume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of the earlier attempts of a request, which a death has ended, for its new attempt.

    attempt: 2 for the first new one. ids: drawn ids by place (see `Drawn`), to be forced in this order. delivered:
    units by output port that the api has, which need not be sent again (see `units_of`). chunks: by port, the chunks of
    a stream walk whose outputs the api has as a whole, and the units of these outputs; they need not be computed again.
    saved: the latest states of loops that save, by place (see `Saved`).
    """

    attempt: int
    ids: dict[str, list[int]] = {}
    delivered: dict[str, int] = {}
    chunks: dict[str, tuple[int, int]] = {}
    saved: dict[str, SavedLoop] = {}


class GrowingInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Input to which the client adds while the request runs. values: all so far. is_over: no more follow."""

    values: list[int | float] = []
    is_over: bool = False


class NewRequest(msgspec.Struct, frozen=True, kw_only=True, tag="new_request", omit_defaults=True):
    """Api to conductor: an admitted request. handle: unique for the api's incarnation and never reused.

    params: checked values by parameter name. deadline_s: seconds until the deadline. salt: part of every cache key;
    requests share prefixes and features only with those of the same salt. resume: None for the first attempt; the
    conductor keeps later ones until a replica is ready. is_journaled: whether workers report the ids that the request
    draws, see `Drawn`. adapter: number of its LoRA adapter, 0 without one. session: name of its session, empty without
    one. Requests of a session go to the ranks that served it. These keep the cached prefix of the last request for
    `lease_s` seconds after its end. reads_only: the request reads its prompt into the caches and ends; it draws nothing
    and has no output. is_heard: the client plays its sound while it comes. facts: what the
    processor tells the programs. growing: inputs that grow by `MoreInput`, with what is known of them.
    """

    handle: int
    request_id: str
    params: dict[str, Any]
    outputs: list[str]
    inputs: dict[str, TensorRef] = {}
    segments: list[SegmentRef] = []
    seed: int = 0
    deadline_s: float = 600.0
    prompt_tokens: int = 0
    salt: bytes = b""
    resume: Resume | None = None
    is_journaled: bool = False
    adapter: int = 0
    session: str = ""
    lease_s: float = 0.0
    reads_only: bool = False
    facts: dict[str, Any] = {}
    growing: dict[str, GrowingInput] = {}
    is_heard: bool = True


class MoreInput(msgspec.Struct, frozen=True, kw_only=True, tag="more_input", omit_defaults=True):
    """Api to conductor: more values of an input that grows, behind those before. is_over: no more follow."""

    handle: int
    name: str
    values: list[int | float] = []
    is_over: bool = False


class EndSession(msgspec.Struct, frozen=True, kw_only=True, tag="end_session"):
    """Api to conductor, which passes it to the workers: a session has ended, its cached prefix is no longer kept."""

    session: str


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_request"):
    """Api to conductor: cancel a request. why: `disconnect`, `by_id`, `deadline`, `stalled`, `drain`."""

    handle: int
    why: str = "by_id"


class RequestFinished(msgspec.Struct, frozen=True, kw_only=True, tag="request_finished", omit_defaults=True):
    """Conductor or worker to api: every partition ended.

    emitted: number of outputs by worker; the api waits for all of them. reason: `stop` or `length`. counts: loop and
    port counts over all walks. cached_tokens: prompt tokens found in caches.
    """

    handle: int
    reason: str
    emitted: dict[str, int] = {}
    counts: dict[str, int] = {}
    cached_tokens: int = 0


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="request_failed", omit_defaults=True):
    """Conductor to api: the request ended with an error; no further message follows.

    lost: name of the process whose death ended it. With the code `worker_lost` and no name, no replica was ready.
    is_excused: no request can be the cause, see PeerDown.
    """

    handle: int
    error: ErrorInfo
    lost: str = ""
    is_excused: bool = False


class Reconcile(msgspec.Struct, frozen=True, kw_only=True, tag="reconcile"):
    """Api to conductor: its live requests, once a minute; the conductor sends those of each worker in the same way.

    live: their handles. newest: the highest handle that the sender has known. The receiver closes older requests that
    are not live, see `Leftovers`.
    """

    live: list[int]
    newest: int


RequestMessage = NewRequest | MoreInput | EndSession | CancelRequest | RequestFinished | RequestFailed | Reconcile
