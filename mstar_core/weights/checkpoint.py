"""Checkpoint reader: safetensors (one file or a sharded index) and weights-only torch files, loaded into modules.

Called by plugins while a worker starts. For a GPU, bytes go straight from the file to the parameters (`upload`). On the
CPU files are memory-mapped, so only the requested tensors are read.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mstar_core.errors import WeightsError, did_you_mean
from mstar_core.parallel.shards import Slice, module_slices
from mstar_core.weights.files import read_header
from mstar_core.weights.random_fill import fill_randomly, random_seed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.plugin.model import DeferredReads

Progress = Callable[[int, int, str], None]
"""Called with (bytes read so far, total bytes, file name)."""

INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES: Final = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Index of a checkpoint's tensors and files. Made by `find` or `of_files`; holds no tensors.

    seed: of random weights in place of files, see `random_fill`; None for a real checkpoint.
    """

    folder: Path
    file_of: Mapping[str, Path]
    seed: int | None = None

    @classmethod
    def find(cls, folder: Path) -> Checkpoint:
        """Find a checkpoint in a folder: an index, else a single file, else all safetensors files.

        Raises WeightsError with the names looked for, or with the first missing or truncated shard.
        """
        if not folder.is_dir():
            raise WeightsError(f"no such folder: {folder}", hint="give the folder of a checkpoint", file=str(folder))
        seed = random_seed(folder)
        if seed is not None:
            return cls(folder, {}, seed)
        for name in INDEXES:
            if (folder / name).is_file():
                return cls(folder, _read_index(folder / name))
        for name in SINGLE_FILES:
            if (folder / name).is_file():
                return cls.of_files([folder / name])
        loose = sorted(folder.glob(f"*{SAFETENSORS}"))
        if loose:
            return cls.of_files(loose)
        looked = [*INDEXES, *SINGLE_FILES, f"*{SAFETENSORS}"]
        raise WeightsError(
            f"{folder} contains no weights", f"looked for {', '.join(looked)}", file=str(folder), looked=looked
        )

    @classmethod
    def of_files(cls, files: Iterable[Path]) -> Checkpoint:
        """Index all tensors of these files. Raises WeightsError for a damaged file or a tensor in two files."""
        file_of: dict[str, Path] = {}
        folder = Path()
        for path in files:
            folder = path.parent
            for name in tensor_names(path):
                if name in file_of:
                    raise WeightsError(f"{name} is in two files", f"{file_of[name]} and {path}", file=str(path))
                file_of[name] = path
        return cls(folder, file_of)

    def files(self) -> list[Path]:
        """Return the files that contain tensors, by name."""
        return sorted(set(self.file_of.values()))

    def tensors(
        self,
        names: Iterable[str] | None = None,
        progress: Progress | None = None,
        slices: Mapping[str, Slice] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one by one, file by file; of those in `slices` only the part.

        Raises WeightsError for a missing or unreadable tensor, and for one that is not as long as its slice declares.
        """
        chosen = set(self.file_of) if names is None else set(names)
        unknown = sorted(chosen - set(self.file_of))
        if unknown:
            raise WeightsError(
                f"{self.folder} lacks {unknown[0]}",
                f"missing tensors: {len(unknown)}",
                did_you_mean(unknown[0], self.file_of),
                file=str(self.folder),
            )
        total = sum(path.stat().st_size for path in self.files())
        before = 0
        for path in self.files():
            read = 0
            with open_tensors(path) as reader:
                for name in in_file_order(path, {name for name in chosen if self.file_of[name] == path}):
                    part = slices.get(name) if slices else None
                    value = reader.get_tensor(name) if part is None else _read_part(reader, path, name, part)
                    read += value.numel() * value.element_size()
                    yield name, value
                    if progress is not None:
                        progress(min(before + read, total), total, path.name)
            before += path.stat().st_size
            if progress is not None:
                progress(before, total, path.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """Mapping from checkpoint names to module names. The first matching prefix is replaced.

    prefixes: checkpoint prefix -> module prefix. ignore: prefixes of tensors to skip. optional: module names that may
    keep their initial values.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()

    def target(self, name: str) -> str | None:
        """Return the module's name of a checkpoint tensor; None if it is skipped."""
        if name.startswith(self.ignore) and self.ignore:
            return None
        for prefix, replacement in self.prefixes.items():
            if name.startswith(prefix):
                return replacement + name.removeprefix(prefix)
        return name


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    names: NameMap | None = None,
    progress: Progress | None = None,
    parts: Mapping[str, Mapping[str, Tensor]] | None = None,
    deferred: DeferredReads | None = None,
) -> None:
    """Load a module's parameters and persistent buffers, each cast to its own dtype.

    parts: name of a fused parameter -> the names that replace it, each with its view of the parameter.
    deferred: takes the reads of a module whose layers are quantized one by one; the module then has no values yet, and
    the caller must not change any. Names are checked now, shapes when a layer is read.
    Of a sharded parameter (`parallel.shards`) only this rank's part is read; rows beyond the part become zero.
    Checkpoint and module must have the same names. Raises WeightsError with file and key otherwise, before anything
    changes; a file that ends early fails in the middle.
    """
    if checkpoint.seed is not None:
        fill_randomly(module, checkpoint.seed, deferred)
        return
    names = names or NameMap()
    targets = module.state_dict(keep_vars=True)
    for fused, views in (parts or {}).items():
        del targets[fused]
        targets.update(views)
    slices = {name: part for name, part in module_slices(module).items() if name in targets}
    for name, part in slices.items():
        targets[name] = _filled_part(targets[name], part)
    source_of: dict[str, str] = {}
    for name in checkpoint.file_of:
        target = names.target(name)
        if target is None:
            continue
        if target not in targets:
            raise WeightsError(
                f"{checkpoint.file_of[name]} contains {name}, which the model does not have",
                f"its name in the model would be {target}",
                did_you_mean(target, targets),
                file=str(checkpoint.file_of[name]),
            )
        source_of[target] = name
    missing = sorted(set(targets) - set(source_of) - names.optional)
    if missing:
        raise WeightsError(
            f"{checkpoint.folder} lacks {missing[0]}",
            f"missing: {len(missing)} of {len(targets)} tensors",
            "the checkpoint is incomplete, or of another model",
            file=str(checkpoint.folder),
        )
    target_of = {name: targets[target] for target, name in source_of.items()}
    part_of = {source_of[name]: part for name, part in slices.items() if name in source_of}
    reader = _Reader(checkpoint, part_of)
    if deferred is not None and not part_of and all(path.suffix == SAFETENSORS for path in checkpoint.files()):
        target_of = {**deferred.add(module, target_of, reader.read)}
    reader.read(target_of, progress)


class _Reader:
    """Reads tensors of a checkpoint. parts: by name, of those of which a rank reads a part."""

    def __init__(self, checkpoint: Checkpoint, parts: Mapping[str, Slice]) -> None:
        self._checkpoint = checkpoint
        self._parts = parts
        self._stored: dict[str, StoredTensor] = {}

    def read(self, target_of: Mapping[str, Tensor], progress: Progress | None = None) -> None:
        """Read tensors into their targets. Raises WeightsError."""
        checkpoint, rest = self._checkpoint, dict(target_of)
        if rest and _can_stream(checkpoint, rest):
            streamed = {name for name in rest if name not in self._parts or _is_contiguous(self._parts[name])}
            self._upload({name: rest.pop(name) for name in streamed}, progress)
        if not rest:
            return
        with torch.no_grad():
            for name, value in checkpoint.tensors(rest, progress, self._parts):
                _check_shape(checkpoint, name, value.shape, rest[name])
                rest[name].copy_(value)

    def _upload(self, targets: Mapping[str, Tensor], progress: Progress | None) -> None:
        checkpoint = self._checkpoint
        if not self._stored:  # a layer of many is read at a time
            files = checkpoint.files()
            self._stored = {tensor.name: tensor for path in files for tensor in stored_tensors(path)}
        stored = [stored_part(self._stored[name], self._parts.get(name)) for name in targets]
        for tensor in stored:
            _check_shape(checkpoint, tensor.name, torch.Size(tensor.shape), targets[tensor.name])
        total = sum(path.stat().st_size for path in checkpoint.files())

        def report(read: int, path: Path) -> None:
            if progress is not None:
                progress(min(read, total), total, path.name)

        upload([UploadTarget(stored=tensor, tensor=targets[tensor.name]) for tensor in stored], report)
        report(total, checkpoint.files()[-1])


def _filled_part(target: Tensor, part: Slice) -> Tensor:
    """Return the view of a parameter that its part fills; the rest, padding of a vocabulary, is set to zero."""
    if target.shape[part.dim] == part.count:
        return target
    with torch.no_grad():
        target.narrow(part.dim, part.count, target.shape[part.dim] - part.count).zero_()
    return target.detach().narrow(part.dim, 0, part.count)


def _is_contiguous(part: Slice) -> bool:
    """Return whether a part is one run of bytes in a file."""
    return part.dim == 0 and len(part.spans) == 1


def _read_part(reader: TensorReader, path: Path, name: str, part: Slice) -> Tensor:
    """Read a part of a stored tensor. Raises WeightsError if the tensor is not as long as the part declares."""
    if isinstance(reader, _TorchFile):
        whole = reader.get_tensor(name)
        _check_whole(path, name, tuple(whole.shape), part)
        return torch.cat([whole.narrow(part.dim, span.start, len(span)) for span in part.spans], dim=part.dim)
    stored = reader.get_slice(name)
    _check_whole(path, name, tuple(stored.get_shape()), part)
    before = (slice(None),) * part.dim
    pieces = [stored[(*before, slice(span.start, span.stop))] for span in part.spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=part.dim)


def _check_whole(path: Path, name: str, shape: tuple[int, ...], part: Slice) -> None:
    if len(shape) <= part.dim or shape[part.dim] != part.whole:
        raise WeightsError(
            f"{path}: {name} has shape {list(shape)}",
            f"the model has {part.whole} in dimension {part.dim}",
            "use config and weights of the same checkpoint",
            file=str(path),
        )


def stored_part(tensor: StoredTensor, part: Slice | None) -> StoredTensor:
    """Return the rows of a stored tensor that a contiguous part names. Raises WeightsError for another length."""
    if part is None:
        return tensor
    _check_whole(tensor.path, tensor.name, tensor.shape, part)
    (span,), row = part.spans, tensor.size // tensor.shape[0]
    return replace(
        tensor, offset=tensor.offset + span.start * row, size=len(span) * row, shape=(len(span), *tensor.shape[1:])
    )


def _can_stream(checkpoint: Checkpoint, targets: Mapping[str, Tensor]) -> bool:
    """Return whether all targets are on one GPU and all files are safetensors, which give each tensor's offset."""
    devices = {target.device for target in targets.values()}
    are_safetensors = all(checkpoint.file_of[name].suffix == SAFETENSORS for name in targets)
    return len(devices) == 1 and next(iter(devices)).type == "cuda" and are_safetensors


def _check_shape(checkpoint: Checkpoint, name: str, shape: torch.Size, target: Tensor) -> None:
    if shape != target.shape:
        raise WeightsError(
            f"{checkpoint.file_of[name]}: {name} has shape {list(shape)}",
            f"the model has {list(target.shape)}",
            "use config and weights of the same checkpoint",
            file=str(checkpoint.file_of[name]),
        )


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): path.parent / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{path} is not a valid weight index", repr(error), "download it again", file=str(path)
        ) from error
    names_in: dict[Path, set[str]] = {}
    for name, file in file_of.items():
        if ".." in file.relative_to(path.parent).parts if file.is_relative_to(path.parent) else True:
            raise WeightsError(f"{path} names a file outside its folder", str(file), file=str(path))
        if file not in names_in:
            if not file.is_file():
                raise WeightsError(f"{file} is missing", f"{path.name} lists {name} in it", file=str(file))
            names_in[file] = set(tensor_names(file)) if file.suffix == SAFETENSORS else {name for name in file_of}
        if name not in names_in[file]:
            raise WeightsError(f"{file} lacks {name}", f"{path.name} lists it in this file", file=str(file))
    return file_of


# ------------------------------------------------------------------------------------------------------------ files

SAFETENSORS: Final = ".safetensors"

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Supported dtypes of safetensors files, by their name in the header."""


class TensorReader(Protocol):
    """Reader of one open file."""

    def get_tensor(self, name: str) -> Tensor:
        """Return the tensor called `name`, on the host."""

    def get_slice(self, name: str) -> Any:
        """Return the tensor called `name` unread; indexing reads a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Location of a tensor in a safetensors file. offset (from the start of the file) and size in bytes."""

    name: str
    path: Path
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file by offset. Raises WeightsError for a damaged file or unknown dtype."""
    start, entries = _safetensors_header(path)
    tensors = []
    for name, entry in entries.items():
        try:
            begin, end = map(int, entry["data_offsets"])
            dtype, shape = DTYPES.get(entry["dtype"]), tuple(map(int, entry["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"{path}: invalid header entry for {name}", repr(error), file=str(path)) from error
        size = end - begin
        if dtype is None:
            detail = f"supported: {', '.join(DTYPES)}"
            raise WeightsError(f"{path}: {name} has dtype {entry['dtype']}", detail, file=str(path))
        if size != torch.Size(shape).numel() * dtype.itemsize:
            detail = f"{list(shape)} of {entry['dtype']} in {size} bytes"
            raise WeightsError(f"{path}: inconsistent header entry for {name}", detail, file=str(path))
        tensors.append(StoredTensor(name=name, path=path, offset=start + begin, size=size, shape=shape, dtype=dtype))
    return sorted(tensors, key=lambda tensor: tensor.offset)


def in_file_order(path: Path, names: set[str]) -> list[str]:
    """Sort names by their offset in the file, which suits read-ahead; names of a torch file alphabetically."""
    if path.suffix != SAFETENSORS:
        return sorted(names)
    _, entries = _safetensors_header(path)
    return sorted(names & set(entries), key=lambda name: (int(entries[name]["data_offsets"][0]), name))


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises WeightsError if the file is damaged."""
    if path.suffix != SAFETENSORS:
        return sorted(_read_torch(path))
    return sorted(_safetensors_header(path)[1])


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorReader]:
    """Open a file for reading tensors. Raises WeightsError if it is damaged."""
    if path.suffix != SAFETENSORS:
        yield _TorchFile(path, _read_torch(path))
        return
    _safetensors_header(path)
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except SafetensorError as error:
        raise WeightsError(f"{path} cannot be read", str(error), "download it again", file=str(path)) from error


@dataclass(frozen=True, slots=True)
class _TorchFile:
    """Tensors of a torch file, which can only be read as a whole."""

    path: Path
    values: Mapping[str, Tensor]

    def get_tensor(self, name: str) -> Tensor:
        """Return the tensor called `name`."""
        if name not in self.values:
            detail = "the index lists it in this file"
            raise WeightsError(f"{self.path} lacks {name}", detail, "download it again", file=str(self.path))
        return self.values[name]

    def get_slice(self, name: str) -> Any:
        """Return the tensor itself, which is in memory."""
        return self.get_tensor(name)


def _safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the start of the data and the tensor entries. Raises WeightsError if the file size does not match."""
    try:
        size = path.stat().st_size
        begin, entries = read_header(path)
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read", repr(error), "download it again", file=str(path)) from error
    if size != begin + end:
        raise WeightsError(
            f"{path} is truncated" if size < begin + end else f"{path} is too long",
            f"{size} bytes; expected from its header: {begin + end}",
            "download it again",
            file=str(path),
        )
    return begin, entries


def _read_torch(path: Path) -> Mapping[str, Tensor]:
    """Read a `.bin` or `.pt` file with weights_only=True."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file can raise anything
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{path} cannot be read", detail, "download it again, or use safetensors", file=str(path)
        ) from error
    if not isinstance(values, dict) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise WeightsError(f"{path} does not contain only tensors", type(values).__name__, file=str(path))
    return values


# ----------------------------------------------------------------------------------------------------------- upload

THREADS: Final = 8
LEAST_THREADS: Final = 4
"""Threads that read: one per two cores, within these."""

SWITCH_S: Final = 1e-4
"""Time slice of Python's threads meanwhile. At the usual 5 ms, imports on another thread delay each read by as much."""

BUFFERS: Final = 2
CHUNK_BYTES: Final = 16 << 20
"""Size of one read and one buffer. THREADS * BUFFERS of them are pinned: 256 MiB."""
AHEAD: Final = 2 * THREADS
"""Chunks of read-ahead (posix_fadvise) beyond the current ones."""
ALIGN: Final = 16
"""Tensors are split at multiples of this many bytes: whole elements of every dtype."""
REPORT_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadTarget:
    """A stored tensor and the tensor of the same shape that receives it."""

    stored: StoredTensor
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Bytes of one tensor in a chunk. target: index; start: offset in the tensor; at: offset in the chunk."""

    target: int
    start: int
    at: int
    size: int


@dataclass(slots=True)
class ReadChunk:
    """One read. offset: bytes from the start of the file."""

    path: Path
    offset: int
    size: int = 0
    parts: list[ChunkPart] = field(default_factory=list)


def chunks(stored: Sequence[StoredTensor], limit: int = CHUNK_BYTES) -> Iterator[ReadChunk]:
    """Split tensors, sorted by file and offset, into reads of at most `limit` bytes. Gaps are not read."""
    now: ReadChunk | None = None
    for index, tensor in enumerate(stored):
        start = 0
        while start < tensor.size:
            at = tensor.offset + start
            if now is not None and (now.path != tensor.path or now.offset + now.size != at):
                yield now
                now = None
            now = now or ReadChunk(tensor.path, at)
            size = min(tensor.size - start, limit - now.size)
            if start + size < tensor.size:
                size -= size % ALIGN
            if size:
                now.parts.append(ChunkPart(index, start, now.size, size))
                now.size += size
                start += size
            if start < tensor.size:
                yield now
                now = None
    if now is not None:
        yield now


def upload(
    targets: Sequence[UploadTarget],
    progress: Callable[[int, Path], None] | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    threads: int | None = None,
) -> None:
    """Copy stored tensors to their targets on one device, casting if dtypes differ. Complete on return.

    A few threads read in file order into pinned buffers. Each has a CUDA stream and two buffers: while one is copied
    to the device, the thread reads into the other. progress: called on this thread with the bytes read so far and the
    current file. threads: None: by the number of cores. Raises WeightsError for a file that cannot be read or ends
    early.
    """
    if not targets:
        return
    ordered = sorted(targets, key=lambda target: (target.stored.path, target.stored.offset))
    count = threads or max(LEAST_THREADS, min(THREADS, len(os.sched_getaffinity(0)) // 2))
    with ExitStack() as stack, _short_turns():
        _Upload(ordered, chunk_bytes, stack).run(count, progress)


@contextmanager
def _short_turns() -> Iterator[None]:
    """Let Python's threads take turns often while the block runs."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Upload:
    """State of one call of `upload`."""

    def __init__(self, targets: list[UploadTarget], chunk_bytes: int, stack: ExitStack) -> None:
        self._stored = [target.stored for target in targets]
        self._device = targets[0].tensor.device
        # Non-contiguous targets are filled by one copy at the end.
        self._landed = [_landing(target) for target in targets]
        self._staged = [
            (target.tensor.detach(), landed)
            for target, landed in zip(targets, self._landed, strict=True)
            if not target.tensor.is_contiguous()
        ]
        self._chunk_bytes = chunk_bytes
        self._chunks = list(chunks(self._stored, chunk_bytes))
        self._numbers = itertools.count()
        paths = {chunk.path for chunk in self._chunks}
        self._files = {path: _opened(path, stack) for path in paths}
        self._progressed = threading.Condition()
        self._read = self._running = 0
        self._reading = self._stored[0].path
        self._error: BaseException | None = None
        self._main = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def run(self, threads: int, progress: Callable[[int, Path], None] | None) -> None:
        """Read all chunks. Re-raises the first error of a thread once all threads have ended."""
        workers = [threading.Thread(target=self._work, name=f"weights-{n}", daemon=True) for n in range(threads)]
        self._running = threads
        for worker in workers:
            worker.start()
        try:
            while self._running:
                with self._progressed:
                    if self._running:
                        self._progressed.wait(REPORT_S)
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
        for tensor, landed in self._staged:
            tensor.copy_(landed)
        if progress is not None:
            progress(self._read, self._reading)

    def _work(self) -> None:
        try:
            # Inference mode is per thread, and tensors made in it can only be written in it.
            with torch.inference_mode():
                self._read_chunks()
        except BaseException as error:  # noqa: BLE001 re-raised by `run`
            self._error = self._error or error
        finally:
            with self._progressed:
                self._running -= 1
                self._progressed.notify()

    def _read_chunks(self) -> None:
        stream = torch.cuda.Stream(self._device) if self._main is not None else None
        if stream is not None and self._main is not None:
            stream.wait_stream(self._main)  # earlier kernels may still use the targets
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
            with self._progressed:
                self._read += chunk.size
                self._reading = chunk.path
                self._progressed.notify()
        if stream is not None:
            stream.synchronize()

    def _advise(self, number: int) -> None:
        if number < len(self._chunks):
            chunk = self._chunks[number]
            os.posix_fadvise(self._files[chunk.path], chunk.offset, chunk.size, os.POSIX_FADV_WILLNEED)

    def _send(self, part: ChunkPart, values: Tensor) -> None:
        """Copy a part to its target, in stream order."""
        landed, dtype = self._landed[part.target], self._stored[part.target].dtype
        flat = landed.view(-1)
        if dtype == landed.dtype:
            flat.view(torch.uint8)[part.start : part.start + part.size].copy_(values, non_blocking=True)
            return
        # New memory is aligned for every dtype; bytes in the middle of a chunk may not be.
        raw = torch.empty(part.size, dtype=torch.uint8, device=landed.device)
        raw.copy_(values, non_blocking=True)
        first, count = part.start // dtype.itemsize, part.size // dtype.itemsize
        flat[first : first + count].copy_(raw.view(dtype))


class _Buffer:
    """Pinned read buffer. Owned by one thread, which waits for its last copy before it reads again."""

    def __init__(self, size: int, *, is_pinned: bool) -> None:
        self.values = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        self.view = self.values.numpy().data
        self._event = torch.cuda.Event() if is_pinned else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()  # returns at once if never recorded

    def mark(self, stream: torch.cuda.Stream | None) -> None:
        if self._event is not None:
            self._event.record(stream)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _landing(target: UploadTarget) -> Tensor:
    """Return the target itself, or contiguous memory of its shape if it is not contiguous."""
    tensor = target.tensor.detach()
    if tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=target.stored.dtype, device=tensor.device)


def _opened(path: Path, stack: ExitStack) -> int:
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read", str(error), "download it again", file=str(path)) from error
    stack.callback(os.close, number)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return number


def _fill(file: int, chunk: ReadChunk, view: memoryview) -> None:
    """Read a whole chunk; one system call may read less."""
    done = 0
    while done < chunk.size:
        try:
            got = os.preadv(file, [view[done:]], chunk.offset + done)
        except OSError as error:
            raise WeightsError(f"{chunk.path} cannot be read", str(error), file=str(chunk.path)) from error
        if got == 0:
            raise WeightsError(
                f"{chunk.path} was truncated while it was read",
                f"no data after byte {chunk.offset + done}",
                "download it again",
                file=str(chunk.path),
            )
        done += got
