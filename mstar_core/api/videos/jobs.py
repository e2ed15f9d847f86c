"""Videos that are generated without their clients. Owned by the service.

A job survives deaths: those of workers and the conductor as every request does, that of the api because its row, its
image and the last saved state of its loops are on the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from mstar_core.api.errors import reply_of
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.requests.record import SavedLoops
from mstar_core.api.videos.schema import VideoError, VideoObject
from mstar_core.api.videos.store import StoredVideo, VideoStore
from mstar_core.errors import EngineError, MstarError
from mstar_core.messages.flow import Saved
from mstar_core.plugin.media.images import encode_image
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.surface import PROGRESS
from mstar_core.video_files import Film

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from mstar_core.plugin.spec import ModelSpec

VIDEO: Final = "video.mp4"
THUMBNAIL: Final = "thumbnail.webp"
STATE: Final = "state.msgpack"
STEPS_SHARE: Final = 90
"""Progress in percent behind the last denoise step; the rest belongs to the decoder."""

PROGRESS_S: Final = 1.0
"""Shortest interval between two rows with progress."""

log = logging.getLogger("mstar.api.videos")


class RunningVideo(Protocol):
    """A running request: its chunks are read to the end, then `done` is called."""

    def chunks(self) -> AsyncIterator[list[EncodedChunk]]:
        """Yield chunks as they become ready. Raises the error that ended the request."""

    def done(self) -> object:
        """Count the request as complete."""


class Generates(Protocol):
    """Runner of the requests of jobs: the service."""

    model: ModelSpec
    clock: Callable[[], float]

    def open(
        self,
        call: ParsedRequest,
        *,
        key: str,
        started: float,
        is_continued: bool,
        saved_before: SavedLoops | None,
        on_saved: Callable[[Saved], None],
    ) -> AbstractAsyncContextManager[RunningVideo]:
        """Run a request for the duration of the block."""


class JobRequest(msgspec.Struct, kw_only=True):
    """Request that a video can be generated from again. params: values by name. images: file names in its folder.

    parent: id of the HTTP request that asked for it.
    """

    prompt: str
    params: dict[str, Any]
    seed: int
    timeout_s: float
    route: str
    images: list[str] = []
    parent: str = ""


@dataclass(slots=True, eq=False)
class _Job:
    """A video that is generated. entry: its row. task: of its generation. is_deleted: its client does not want it.

    saved: states of its loops; is_unwritten: newer than those on the disk. writing: task that writes them.
    """

    entry: StoredVideo
    video: VideoObject
    task: asyncio.Task[None] | None = None
    is_deleted: bool = False
    noted: float = 0.0
    saved: SavedLoops | None = None
    is_unwritten: bool = False
    writing: asyncio.Task[None] | None = None


class VideoJobs:
    """Generates videos, one task each; the admission queue bounds how many run at once."""

    def __init__(self, service: Generates, store: VideoStore) -> None:
        self.store = store
        self._service = service
        self._jobs: dict[str, _Job] = {}
        self._is_closing = False

    async def resume(self) -> None:
        """Go on with the videos that an earlier api was generating."""
        try:
            entries = await self.store.unfinished()
        except MstarError as error:
            log.error("videos cannot be resumed", extra={"facts": {"why": str(error)}})
            return
        for entry in entries:
            if entry.id not in self._jobs:
                self._start(entry, is_continued=True)

    async def create(self, entry: StoredVideo, images: list[bytes]) -> VideoObject:
        """Store a video and begin to generate it. Raises Unavailable if it cannot be stored."""
        await self.store.save(entry)
        await asyncio.to_thread(_write_images, self.store.files(entry.id), images)
        return self._start(entry).video

    def running(self, video_id: str, owner: bytes) -> VideoObject | None:
        """Return a video that is generated, with its progress."""
        job = self._jobs.get(video_id)
        return job.video if job is not None and job.entry.owner == owner else None

    async def delete(self, video_id: str, owner: bytes) -> bool:
        """Delete a video; one that is generated is cancelled. Returns whether there was one."""
        job = self._jobs.get(video_id)
        if job is not None and job.entry.owner == owner and job.task is not None:
            job.is_deleted = True
            job.task.cancel()
            await asyncio.wait({job.task})
        return await self.store.delete(video_id, owner)

    async def close(self) -> None:
        """Stop all jobs; their rows stay, so that the next api goes on with them."""
        self._is_closing = True
        tasks = {job.task for job in self._jobs.values() if job.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.store.close()

    def _start(self, entry: StoredVideo, *, is_continued: bool = False) -> _Job:
        job = _Job(entry, msgspec.json.decode(entry.body, type=VideoObject))
        self._jobs[entry.id] = job
        job.task = asyncio.create_task(self._run(job, is_continued=is_continued))
        return job

    async def _run(self, job: _Job, *, is_continued: bool) -> None:
        try:
            await self._generate(job, is_continued=is_continued)
        except asyncio.CancelledError:
            if not job.is_deleted and not self._is_closing:
                raise
        except Exception as error:  # isolation boundary: one video, whose status becomes `failed` with the error
            if not isinstance(error, MstarError):
                log.exception("a video failed")
            if not self._is_closing or not isinstance(error, MstarError):
                reply = reply_of(error, job.entry.id).body["error"]
                job.video.error = VideoError(code=str(reply.get("code")), message=str(reply.get("message")))
                await self._end(job, "failed")
        finally:
            if job.writing is not None:
                await job.writing
            self._jobs.pop(job.entry.id, None)

    async def _generate(self, job: _Job, *, is_continued: bool) -> None:
        service, folder = self._service, self.store.files(job.entry.id)
        request = msgspec.json.decode(job.entry.request, type=JobRequest)
        call = await asyncio.to_thread(_call, service, job.entry.id, request, folder)
        job.saved = await asyncio.to_thread(_read_state, folder) if is_continued else None
        film: Film | None = None
        async with service.open(
            call,
            key=job.entry.key,
            started=service.clock(),
            is_continued=is_continued,
            saved_before=job.saved,
            on_saved=lambda saved: self._keep(job, saved),
        ) as session:
            job.video.status = "in_progress"
            await self._note(job, is_due=True)
            async for chunks in session.chunks():
                for chunk in chunks:
                    if chunk.modality == PROGRESS:
                        job.video.progress = chunk.metadata["step"] * STEPS_SHARE // chunk.metadata["steps"]
                        continue
                    film = film or _film(folder, chunk)
                    await asyncio.to_thread(_add, film, folder, chunk)
                    whole = max(1, int(chunk.metadata.get("frames") or 1))
                    job.video.progress = STEPS_SHARE + (99 - STEPS_SHARE) * film.frames // whole
                await self._note(job)
            session.done()
        if film is None:
            raise EngineError("the model returned no frames")
        await asyncio.to_thread(film.close)
        job.video.progress = 100
        await self._end(job, "completed")

    async def _note(self, job: _Job, *, is_due: bool = False) -> None:
        """Write the progress to the row, not too often."""
        now = self._service.clock()
        if not is_due and now < job.noted + PROGRESS_S:
            return
        job.noted = now
        job.entry = replace(job.entry, status=job.video.status, body=msgspec.json.encode(job.video))
        await self.store.save(job.entry)

    async def _end(self, job: _Job, status: Any) -> None:
        folder, now = self.store.files(job.entry.id), time.time()
        if job.writing is not None:
            await job.writing
        job.video.status = status
        job.video.completed_at = int(now) if status == "completed" else None
        job.video.expires_at = int(now + self.store.limits.ttl_s)
        size = await asyncio.to_thread(_finished_size, folder)
        body = msgspec.json.encode(job.video)
        job.entry = replace(job.entry, status=status, ended=now, size=size, body=body)
        try:
            await self.store.save(job.entry)
        except MstarError as error:
            log.error("a video was not stored", extra={"facts": {"why": str(error)}})

    def _keep(self, job: _Job, saved: Saved) -> None:
        """Write the states of the loops to the disk. The event loop does not wait for it."""
        job.saved = job.saved or SavedLoops()
        job.saved.keep(saved.place, saved.loop)
        job.is_unwritten = True
        if job.writing is None or job.writing.done():
            job.writing = asyncio.create_task(self._write(job))

    async def _write(self, job: _Job) -> None:
        """Write the newest states until none is newer. One thread at a time: states may be large."""
        while job.is_unwritten and job.saved is not None:
            job.is_unwritten = False
            states = SavedLoops(places=dict(job.saved.places))
            await asyncio.to_thread(_write_state, self.store.files(job.entry.id), states)


def _call(service: Generates, video_id: str, request: JobRequest, folder: Path) -> ParsedRequest:
    media = [MediaPart(modality="image", data=(folder / name).read_bytes()) for name in request.images]
    order = [*(("image", index) for index in range(len(media))), ("text", 0)]
    return ParsedRequest(
        request_id=video_id,
        route=request.route,
        text=request.prompt,
        media=media,
        order=order,
        outputs=("video", PROGRESS),
        params=service.model.params(**request.params),
        seed=request.seed,
        timeout_s=request.timeout_s,
        parent=request.parent,
    )


def _film(folder: Path, chunk: EncodedChunk) -> Film:
    _, height, width, _ = chunk.metadata["shape"]
    folder.mkdir(mode=0o700, exist_ok=True)
    return Film(folder / VIDEO, width, height, int(chunk.metadata.get("fps") or 24))


def _add(film: Film, folder: Path, chunk: EncodedChunk) -> None:
    from PIL import Image

    frames = np.frombuffer(chunk.data, dtype=np.uint8).reshape(chunk.metadata["shape"])
    if not film.frames:
        (folder / THUMBNAIL).write_bytes(encode_image(Image.fromarray(frames[0]), "webp"))
    film.add(frames)


def _write_images(folder: Path, images: list[bytes]) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for number, data in enumerate(images):
        (folder / f"image_{number}").write_bytes(data)


def _write_state(folder: Path, states: SavedLoops) -> None:
    with suppress(OSError):  # deleted meanwhile, or a full disk: the video then begins anew after a death
        scratch = folder / f"{STATE}.new"
        scratch.write_bytes(msgspec.msgpack.encode(states))
        scratch.replace(folder / STATE)


def _read_state(folder: Path) -> SavedLoops | None:
    try:
        return msgspec.msgpack.decode((folder / STATE).read_bytes(), type=SavedLoops)
    except (OSError, msgspec.MsgspecError):
        return None


def _finished_size(folder: Path) -> int:
    """Delete what a finished video does not need, and return the bytes of the rest."""
    if not folder.is_dir():
        return 0
    for path in folder.iterdir():
        if path.name not in (VIDEO, THUMBNAIL):
            path.unlink(missing_ok=True)
    return sum(path.stat().st_size for path in folder.iterdir())
