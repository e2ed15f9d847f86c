"""Brings the tensors of safetensors files to a device: a few threads read in file order into pinned buffers.

Used by `weights.py` for modules on a GPU. Each thread has a CUDA stream and two buffers: while one travels, the next
part of the file is read into the other. A tensor goes straight to its place; only a cast takes a detour on the device.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.weights.files import Stored

THREADS: Final = 4
BUFFERS: Final = 2
CHUNK_BYTES: Final = 16 << 20
"""Of one read and one buffer; pinned are THREADS * BUFFERS of them, 128 MiB."""
AHEAD: Final = 2 * THREADS
"""Chunks that the kernel is asked to read ahead of those in hand."""
ALIGN: Final = 16
"""Bytes at which a tensor may be cut: whole elements of every dtype."""
REPORT_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A stored tensor and the tensor that it goes to, of the same shape."""

    stored: Stored
    place: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a tensor in a chunk. target: index; start: in the tensor; at: in the chunk."""

    target: int
    start: int
    at: int
    size: int


@dataclass(slots=True)
class Chunk:
    """One read. offset: bytes from the start of the file."""

    path: Path
    offset: int
    size: int = 0
    parts: list[Part] = field(default_factory=list)


def chunks(stored: Sequence[Stored], limit: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut tensors, sorted by file and offset, into reads of at most `limit` bytes; bytes of no tensor are not read."""
    now: Chunk | None = None
    for index, tensor in enumerate(stored):
        start = 0
        while start < tensor.size:
            at = tensor.offset + start
            if now is not None and (now.path != tensor.path or now.offset + now.size != at):
                yield now
                now = None
            now = now or Chunk(tensor.path, at)
            size = min(tensor.size - start, limit - now.size)
            if start + size < tensor.size:
                size -= size % ALIGN
            if size:
                now.parts.append(Part(index, start, now.size, size))
                now.size += size
                start += size
            if start < tensor.size:
                yield now
                now = None
    if now is not None:
        yield now


def upload(
    targets: Sequence[Target], progress: Callable[[int, Path], None] | None = None, *, chunk_bytes: int = CHUNK_BYTES,
    threads: int = THREADS,
) -> None:  # fmt: skip
    """Fill every place from its file, casting where dtypes differ; complete when this returns.

    All places are on one device. progress is called on this thread with the bytes read so far and the file being read.
    Raises WeightsError for a file that cannot be read or ends early.
    """
    if not targets:
        return
    ordered = sorted(targets, key=lambda target: (target.stored.path, target.stored.offset))
    with ExitStack() as stack:
        _Upload(ordered, chunk_bytes, stack).run(threads, progress)


class _Upload:
    """One call of `upload`."""

    def __init__(self, targets: list[Target], chunk_bytes: int, stack: ExitStack) -> None:
        self._stored = [target.stored for target in targets]
        self._device = targets[0].place.device
        # A place that is no plain run of memory is filled by one copy at the end.
        self._landed = [_landing(target) for target in targets]
        self._late = [
            (target.place.detach(), landed)
            for target, landed in zip(targets, self._landed, strict=True)
            if not target.place.is_contiguous()
        ]
        self._chunk_bytes = chunk_bytes
        self._chunks = list(chunks(self._stored, chunk_bytes))
        self._numbers = itertools.count()
        paths = {chunk.path for chunk in self._chunks}
        self._files = {path: _opened(path, stack) for path in paths}
        self._moved = threading.Condition()
        self._read = 0
        self._reading = self._stored[0].path
        self._error: BaseException | None = None
        self._main = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def run(self, threads: int, progress: Callable[[int, Path], None] | None) -> None:
        """Read everything. Raises what a thread met first, once all of them have ended."""
        workers = [threading.Thread(target=self._work, name=f"weights-{n}", daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        try:
            while any(worker.is_alive() for worker in workers):
                with self._moved:
                    self._moved.wait(REPORT_S)
                    read, reading = self._read, self._reading
                if progress is not None and self._error is None:
                    progress(read, reading)
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            for worker in workers:
                worker.join()
        if self._error is not None:
            raise self._error
        for place, landed in self._late:
            place.copy_(landed)
        if progress is not None:
            progress(self._read, self._reading)

    def _work(self) -> None:
        try:
            # The mode is a thread's own; places that were made in it may be written in it alone.
            with torch.inference_mode():
                self._read_chunks()
        except BaseException as error:  # noqa: BLE001 what ends a thread is raised by the one that waits for it
            with self._moved:
                self._error = self._error or error
                self._moved.notify()

    def _read_chunks(self) -> None:
        stream = torch.cuda.Stream(self._device) if self._main is not None else None
        if stream is not None and self._main is not None:
            stream.wait_stream(self._main)  # the places may have been in use by what was launched before
        buffers = [_Buffer(self._chunk_bytes, is_pinned=stream is not None) for _ in range(BUFFERS)]
        for buffer in itertools.cycle(buffers):
            number = next(self._numbers)
            if number >= len(self._chunks) or self._error is not None:
                break
            chunk = self._chunks[number]
            buffer.wait()
            self._advise(number + AHEAD)
            _fill(self._files[chunk.path], chunk, buffer.view[: chunk.size])
            with _on(stream):
                for part in chunk.parts:
                    self._send(part, buffer.values[part.at : part.at + part.size])
                buffer.mark(stream)
            with self._moved:
                self._read += chunk.size
                self._reading = chunk.path
                self._moved.notify()
        if stream is not None:
            stream.synchronize()

    def _advise(self, number: int) -> None:
        if number < len(self._chunks):
            chunk = self._chunks[number]
            os.posix_fadvise(self._files[chunk.path], chunk.offset, chunk.size, os.POSIX_FADV_WILLNEED)

    def _send(self, part: Part, values: Tensor) -> None:
        """Bytes of a part into their place, in stream order."""
        place, dtype = self._landed[part.target], self._stored[part.target].dtype
        flat = place.view(-1)
        if dtype == place.dtype:
            flat.view(torch.uint8)[part.start : part.start + part.size].copy_(values, non_blocking=True)
            return
        # Fresh memory is aligned for every dtype, which bytes in the middle of a chunk need not be.
        raw = torch.empty(part.size, dtype=torch.uint8, device=place.device)
        raw.copy_(values, non_blocking=True)
        first, count = part.start // dtype.itemsize, part.size // dtype.itemsize
        flat[first : first + count].copy_(raw.view(dtype))


class _Buffer:
    """Bytes on their way. Owned by one thread; not filled again before its last copy has left it."""

    def __init__(self, size: int, *, is_pinned: bool) -> None:
        self.values = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        self.view = self.values.numpy().data
        self._event = torch.cuda.Event() if is_pinned else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()  # one that was never recorded is done

    def mark(self, stream: torch.cuda.Stream | None) -> None:
        if self._event is not None:
            self._event.record(stream)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _landing(target: Target) -> Tensor:
    """Where bytes go: the place itself, or memory of its shape where it is no plain run of memory."""
    place = target.place.detach()
    return place if place.is_contiguous() else torch.empty(place.shape, dtype=target.stored.dtype, device=place.device)


def _opened(path: Path, stack: ExitStack) -> int:
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read", str(error), "fetch it again", file=str(path)) from error
    stack.callback(os.close, number)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return number


def _fill(file: int, chunk: Chunk, view: memoryview) -> None:
    """Read a chunk whole; the system may give less than asked for."""
    done = 0
    while done < chunk.size:
        try:
            got = os.preadv(file, [view[done:]], chunk.offset + done)
        except OSError as error:
            raise WeightsError(f"{chunk.path} cannot be read", str(error), file=str(chunk.path)) from error
        if got == 0:
            raise WeightsError(
                f"{chunk.path} was cut short while it was read", f"nothing follows byte {chunk.offset + done}",
                "fetch it again", file=str(chunk.path),
            )  # fmt: skip
        done += got
