"""Fake supervisor, conductor and worker of a deployment, as the api sees them, in the test's loop.

A test either gives a `script`, which answers each new request, or sends the messages itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from mstar_core.messages.flow import Drawn, Output, Outputs, Saved
from mstar_core.messages.life import Hello, PeerDown, PeerUp, ServiceState
from mstar_core.messages.requests import (
    CancelRequest,
    ErrorInfo,
    NewRequest,
    RequestFailed,
    RequestFinished,
    SavedLoop,
)
from mstar_core.messages.tensors import ShmTensor, TensorRef
from mstar_core.messages.wire import Envelope, Message, WireCodec
from mstar_core.transport import Courier, Mailbox, Malformed, RemoteAccess, mailbox_endpoint
from mstar_core.transport.blobs.client import Fetch
from mstar_core.transport.shm import TensorTransport

M = TypeVar("M")
Script = Callable[["FakeDeployment", NewRequest], None]


class FakeDeployment:
    """The other processes. received: all messages of the api, in order. script: called for each new request.

    far: access to the worker, if it is on a host of its own.
    """

    def __init__(self, ipc: Path, script: Script | None = None, far: RemoteAccess | None = None) -> None:
        self.ipc = ipc
        self.far = far
        self.script = script
        self.received: list[tuple[str, Message]] = []
        self.greets = True
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._boxes = {name: self._box(name) for name in ("supervisor", "conductor", "worker-0")}
        self._couriers = {name: self._courier(name) for name in ("supervisor", "conductor", "worker-0")}
        self._tensors = TensorTransport("worker-0", 0, ipc, remote=far)
        self._seq: dict[int, int] = {}
        self._lives: dict[str, int] = {}
        self._api = ("", 0)

    @property
    def supervisor(self) -> str:
        return mailbox_endpoint(self.ipc, "supervisor", 0)

    def attach(self) -> None:
        loop = asyncio.get_running_loop()
        for name, box in self._boxes.items():
            box.attach(loop, lambda batch, name=name: self._take(name, batch))  # type: ignore[misc]

    def close(self) -> None:
        for box in self._boxes.values():
            box.close()
        for courier in self._couriers.values():
            courier.close()
        self._tensors.close()
        self._context.term()

    def tell(self, *messages: Message, sender: str = "supervisor") -> None:
        """Send messages to the api."""
        for message in messages:
            self._couriers[sender].send("api", message)

    def ready(self) -> None:
        """Make the deployment ready."""
        self.tell(
            self.up("conductor"),
            PeerUp(
                name="worker-0",
                incarnation=0,
                endpoint=mailbox_endpoint(self.ipc, "worker-0", 0),
                fd_endpoint=self._tensors.endpoint,
                host="" if self.far is None else "far",
                remote_endpoint=self._boxes["worker-0"].remote_endpoint,
                blob_endpoint=self._tensors.blob_endpoint,
            ),
            ServiceState(state="ready"),
        )

    def up(self, name: str, incarnation: int = 0) -> PeerUp:
        return PeerUp(name=name, incarnation=incarnation, endpoint=mailbox_endpoint(self.ipc, name, 0))

    def down(self, name: str, cause: str, public: str = "a process died", *, is_excused: bool = False) -> None:
        life = self._lives.get(name, 0)
        self.tell(PeerDown(name=name, incarnation=life, cause=cause, public=public, is_excused=is_excused))

    def restart(self, name: str) -> None:
        """Let the next incarnation of a process, after its death, appear to the api."""
        self._lives[name] = life = self._lives.get(name, 0) + 1
        self._boxes[name].close()
        self._couriers[name].close()
        self._boxes[name] = box = self._box(name, life)
        self._couriers[name] = courier = self._courier(name, life)
        box.attach(asyncio.get_running_loop(), lambda batch: self._take(name, batch))
        endpoint, incarnation = self._api
        courier.connect("api", endpoint, incarnation)
        self.tell(PeerUp(name=name, incarnation=life, endpoint=mailbox_endpoint(self.ipc, name, life)))

    def lose(
        self, handle: int, process: str = "worker-0", public: str = "a worker died", *, is_excused: bool = False
    ) -> None:
        """Report as the conductor that a death has ended a request."""
        error = ErrorInfo(message=public, code="worker_lost", status=503)
        failed = RequestFailed(handle=handle, error=error, lost=process, is_excused=is_excused)
        self.tell(failed, sender="conductor")

    def audio(self, handle: int, samples: int = 2048, *, value: int = 7, seq: int | None = None) -> None:
        """Send one chunk of audio."""
        self.output(handle, "audio", np.full(samples, value, dtype=np.int16), seq=seq)

    def audio_of(self, handle: int, samples: Any, *, skipped: int = 0, drawn: Sequence[Drawn] = ()) -> None:
        """Send one chunk of audio with these samples."""
        self.output(handle, "audio", samples, skipped=skipped, drawn=drawn)

    def cancel(self, handle: int) -> None:
        """Cancel a request as its operator does."""
        self.tell(CancelRequest(handle=handle, why="by_operator"))

    def text(self, handle: int, data: bytes) -> None:
        """Send one output of ids, one per byte."""
        self.output(handle, "text", np.frombuffer(data, dtype=np.uint8).astype(np.int64))

    def image(self, handle: int, width: int = 4, height: int = 2, *, value: int = 7) -> None:
        """Send one image."""
        self.output(handle, "image", np.full((height, width, 3), value, dtype=np.uint8))

    def fetch(self, ref: ShmTensor) -> Fetch:
        """Begin to fetch an input, as the worker does."""
        return self._tensors.fetch(ref)

    def fetched(self, fetch: Fetch) -> bool:
        """Return whether a fetch has ended."""
        self._tensors.deliver()
        return fetch.is_done

    def silence(self) -> None:
        """Let the worker answer no reader of another host any more, as if it had died."""
        assert self._tensors._blobs is not None, "the worker is on another host"
        self._tensors._blobs.close()

    def end_loans(self) -> None:
        """End all loans of the worker, although the api has not returned them."""
        self._tensors.reclaim("api")

    def prompt(self, request: NewRequest) -> str:
        """Return the processed prompt as text: ids that are bytes."""
        return bytes(self._tensors.copy(request.inputs["tokens"]).astype(np.uint8).tolist()).decode()

    def input(self, request: NewRequest, name: str) -> Any:
        """Return a processed input, as a worker reads it."""
        return self._tensors.copy(request.inputs[name])

    def output(
        self,
        handle: int,
        modality: str,
        array: Any,
        *,
        port: str = "pcm",
        meta: dict[str, Any] | None = None,
        seq: int | None = None,
        finishes: bool = False,
        skipped: int = 0,
        drawn: Sequence[Drawn] = (),
    ) -> None:
        """Send an output. finishes: with the end of the request, as a worker does in its last run."""
        number = self._seq.get(handle, 0) if seq is None else seq
        self._seq[handle] = max(number + 1, self._seq.get(handle, 0))
        ref = self._tensors.put(array, "api")
        item = Output(
            handle=handle, seq=number, port=port, modality=modality, ref=ref, meta=meta or {}, skipped=skipped
        )
        end = RequestFinished(handle=handle, reason="stop", emitted={"worker-0": self._seq[handle]})
        finished = [end] if finishes else []
        message = Outputs(worker="worker-0", items=[item], finished=finished, drawn=list(drawn))
        self.tell(message, sender="worker-0")

    def save(self, handle: int, place: str, iteration: int, *, dtype: str | None = None, **values: Any) -> None:
        """Send the state of a loop, as a worker does."""
        refs = {port: self._tensors.put(array, "api", dtype=dtype) for port, array in values.items()}
        saved = Saved(handle=handle, place=place, loop=SavedLoop(iteration=iteration, values=refs))
        self.tell(Outputs(worker="worker-0", items=[], saved=[saved]), sender="worker-0")

    def read(self, ref: TensorRef) -> np.ndarray:
        """Return a copy of a tensor that the api lends."""
        return self._tensors.copy(ref)

    def finish(self, handle: int, reason: str = "stop", *, emitted: int | None = None, **counts: int) -> None:
        sent = self._seq.get(handle, 0) if emitted is None else emitted
        done = RequestFinished(handle=handle, reason=reason, emitted={"worker-0": sent}, counts=counts)
        self.tell(done, sender="conductor")

    def fail(
        self, handle: int, code: str = "engine_error", status: int = 500, message: str = "node LLM failed"
    ) -> None:
        error = ErrorInfo(message=message, code=code, status=status, detail="Traceback in /secret/path")
        self.tell(RequestFailed(handle=handle, error=error), sender="conductor")

    @property
    def live_loans(self) -> int:
        return self._tensors.live

    def of(self, kind: type[M]) -> list[M]:
        """Return all messages of a type received so far."""
        return [message for _, message in self.received if isinstance(message, kind)]

    @property
    def requests(self) -> list[NewRequest]:
        return self.of(NewRequest)

    @property
    def cancels(self) -> list[CancelRequest]:
        return self.of(CancelRequest)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until a message makes `condition` true."""
        if condition():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((condition, future))
        async with asyncio.timeout(timeout_s):
            await future

    async def next_request(self, count: int = 1) -> NewRequest:
        """Return the `count`-th request since the start."""
        await self.until(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    def _take(self, name: str, batch: list[Envelope | Malformed]) -> None:
        for envelope in batch:
            assert isinstance(envelope, Envelope)
            self._one(name, envelope.body)
        waiting, self._waiting = self._waiting, []
        for condition, future in waiting:
            if condition():
                if not future.done():
                    future.set_result(None)
            else:
                self._waiting.append((condition, future))

    def _one(self, name: str, message: Message) -> None:
        self.received.append((name, message))
        match message:
            case Hello():
                self._api = message.endpoint, message.incarnation
                self._tensors.connect("api", message.fd_endpoint, message.incarnation, message.blob_endpoint)
                for name, courier in self._couriers.items():
                    is_far = self.far is not None and name == "worker-0"
                    endpoint = message.remote_endpoint if is_far else message.endpoint
                    courier.connect("api", endpoint, message.incarnation)
                if self.greets:
                    self.tell(PeerUp(name="api", incarnation=message.incarnation, endpoint=message.endpoint))
            case NewRequest() if self.script is not None:
                self.script(self, message)
            case _ if type(message).__name__ == "TensorFreed":
                for slot, generation in message.slots:  # type: ignore[union-attr]
                    self._tensors.release(slot, generation)

    def _box(self, name: str, life: int = 0) -> Mailbox:
        remote = self.far if name == "worker-0" else None
        return Mailbox(self._context, mailbox_endpoint(self.ipc, name, life), WireCodec(name, life), remote=remote)

    def _courier(self, name: str, life: int = 0) -> Courier:
        return Courier(self._context, WireCodec(name, life), keys=None if self.far is None else self.far.keys)


def speak(chunks: int, reason: str = "stop") -> Script:
    """Script: some chunks of audio, then the end."""

    def answer(fake: FakeDeployment, request: NewRequest) -> None:
        for index in range(chunks):
            fake.audio(request.handle, value=index + 1)
        fake.finish(request.handle, reason, token=7 * chunks)

    return answer


def begin(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: one chunk of audio; the test sends the rest."""
    fake.audio(request.handle)


def say(*pieces: bytes) -> Script:
    """Script: text in these pieces of ids, then the end."""

    def answer(fake: FakeDeployment, request: NewRequest) -> None:
        for piece in pieces:
            fake.text(request.handle, piece)
        fake.finish(request.handle)

    return answer


def echo(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: every requested output; the text is the prompt, one id per byte."""
    if "text" in request.outputs:
        for byte in fake.prompt(request).encode():
            fake.text(request.handle, bytes([byte]))
    if "audio" in request.outputs:
        fake.audio(request.handle, 100)
        fake.audio(request.handle, 100)
    if "image" in request.outputs:
        fake.image(request.handle, request.params.get("width", 4), request.params.get("height", 2))
    fake.finish(request.handle)
