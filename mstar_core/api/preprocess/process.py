"""Process that runs the model's processor, and its pipe. Owned by the pool."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import numpy as np

from mstar_core.api.preprocess.child import Answer, JobCall, serve
from mstar_core.api.preprocess.forms import InvalidForm, restored
from mstar_core.api.preprocess.pipe import PoolPipe
from mstar_core.errors import BadMedia, MstarError, PluginError, StartError
from mstar_core.plugin.processor import InputPart, Inputs, KeptMedia, MediaPart, SegmentInputs

START_S: Final = 300.0

Note = tuple[int, int]
"""Sizes of an answer and of its MessagePack."""

log = logging.getLogger("mstar.api.pool")


class ProcessorProcess:
    """A process and its pipe. Used by one thread at a time; `kill` and `end` may be called from any thread.

    is_inline, is_parallel: its processor implements `InlineProcessor`, `ParallelDecodeProcessor`.
    """

    def __init__(self, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        self._args = (target, folder, dict(model_kwargs))
        self._process: SpawnProcess | None = None
        self._pipe: PoolPipe | None = None
        self._is_ending = False
        self.jobs = 0
        self.is_inline = False
        self.is_parallel = False

    @property
    def pid(self) -> int | None:
        """Return the id of the running process."""
        return self._process.pid if self._process is not None else None

    @property
    def is_ready(self) -> bool:
        """Return whether it accepts jobs; otherwise call `start` first."""
        return self._process is not None and self._process.is_alive()

    @property
    def answers(self) -> int:
        """Return the descriptor that becomes readable with an answer, or when the process ends."""
        assert self._pipe is not None
        return self._pipe.fileno()

    def start(self) -> None:
        """Start the process, in place of a dead one, and wait for its processor. Raises its error, or StartError."""
        self.stop()
        ours, theirs = PoolPipe.pair()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, *self._args), name="mstar-pool", daemon=True
        )
        process.start()
        theirs.close(is_shared=True)
        self._process, self._pipe, self.jobs = process, ours, 0
        if self._is_ending:
            self.kill()  # `end` may have been called before there was a process
        if not ours.poll(START_S):
            self.kill()
        try:
            first = ours.receive()
        except (EOFError, OSError, InvalidForm):
            first = (False, StartError("a pool process ended while it was starting", phase="pool"))
        match first:
            case (True, (bool() as is_inline, bool() as is_parallel)):
                self.is_inline, self.is_parallel = is_inline, is_parallel
            case (False, MstarError() as error):
                self.stop()
                raise error
            case _:
                self.stop()
                raise StartError("a pool process started with an invalid message", phase="pool")

    def send(self, calls: Sequence[JobCall]) -> None:
        """Send jobs without blocking. Raises TypeError without a form, MemoryError if they are too large."""
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # found again by `answer`
            self._pipe.send(calls)
        self.jobs += len(calls)

    def note(self) -> Note | None:
        """Return the sizes of an answer once `answers` is readable; None if the process died."""
        assert self._pipe is not None
        try:
            return self._pipe.note()
        except (EOFError, OSError):
            return None

    def load(self, note: Note, calls: Sequence[JobCall]) -> list[Answer]:
        """Return the answers to `calls`. Raises BadMedia, and ends the process, if they are not valid.

        A decoder that a file took over can answer anything.
        """
        assert self._pipe is not None
        try:
            answers = self._pipe.load(note)
            if not isinstance(answers, list) or len(answers) != len(calls):
                raise InvalidForm("the number of answers is wrong")
            return [checked(call, answer) for call, answer in zip(calls, answers, strict=True)]
        except InvalidForm as error:
            log.error("a pool process sent an invalid answer and is ended: %s", error)
            self.stop()
            raise unreadable() from error

    def run(self, calls: Sequence[JobCall]) -> list[Answer]:
        """Run jobs of any size and wait for their answers. Raises BadMedia if the process dies."""
        self.send(calls)
        return self.answer(self.note(), calls)

    def answer(self, note: Note | None, calls: Sequence[JobCall]) -> list[Answer]:
        """Return the answers to `calls`, and free a dead process (None). Raises BadMedia if it died."""
        if note is not None:
            return self.load(note, calls)
        if self._process is not None:
            self._process.kill()  # its end of the socket may be closed while it goes on
            self._process.join()
            log.error("a pool process ended with status %s during a job", self._process.exitcode)
        self.stop()
        raise unreadable()

    def end(self) -> None:
        """Kill the process for good, even while it starts."""
        self._is_ending = True
        self.kill()

    def kill(self) -> None:
        """Kill the process; its current jobs fail."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Kill the process and free its pipe. Safe to call twice."""
        self.kill()
        if self._process is not None:
            self._process.join()
            self._process.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def unreadable() -> BadMedia:
    """Return the error of a job whose process died or sent an invalid answer."""
    return BadMedia("the input could not be read", hint="decoding it crashed or took too long")


def checked(call: JobCall, answer: Any) -> Answer:
    """Return the answer to one job. Raises InvalidForm if it is not one."""
    name, args = call
    match name, answer:
        case _, (False, MstarError() as error):
            return False, error
        case "prompt", (True, Inputs() as inputs) if _is_whole(inputs):
            try:
                return True, restored(inputs, args[0].params)
            except PluginError as error:
                return False, error
        case "decode", (True, list(parts)) if len(parts) == len(args) - 2 and all(map(_is_decoded, parts)):
            return True, parts
        case "tokenize", (True, list(ids)) if all(type(token) is int for token in ids):
            return True, ids
        case "spell", (True, list(texts)) if len(texts) == len(args[0]) and all(map(_is_bytes, texts)):
            return True, texts
        case "problem" | "warm", (True, str()):
            return True, answer[1]
        case "recode", (True, bytes()):
            return True, answer[1]
        case "postprocess", (True, (bytes(), dict() as metadata)) if all(isinstance(key, str) for key in metadata):
            return True, answer[1]
    raise InvalidForm(f"the answer to {name} has another type")


def _is_whole(inputs: Inputs) -> bool:
    """Return whether the fields of decoded inputs have their types. The class of `params` is checked by `restored`."""
    return (
        _has_arrays(inputs)
        and isinstance(inputs.segments, list | tuple)
        and all(map(_is_segment, inputs.segments))
        and type(inputs.prompt_tokens) is int
        and (inputs.max_output_tokens is None or type(inputs.max_output_tokens) is int)
        and isinstance(inputs.metadata, dict)
        and all(isinstance(entry, dict) for entry in inputs.metadata.values())
        and isinstance(inputs.usage, dict)
        and isinstance(inputs.warnings, list | tuple)
        and all(isinstance(warning, str) for warning in inputs.warnings)
        and isinstance(inputs.heard_s, float | int)
        and type(inputs.needs_ids) is int
        and isinstance(inputs.kept, dict)
        and all(type(number) is int and _is_kept(kept) for number, kept in inputs.kept.items())
        and isinstance(inputs.parts, list | tuple)
        and all(_is_part(part, inputs) for part in inputs.parts)
    )


def _is_part(value: Any, inputs: Inputs) -> bool:
    return (
        isinstance(value, InputPart)
        and isinstance(value.facts, dict)
        and isinstance(value.spans, dict)
        and all(name in inputs.arrays and _is_span(span) for name, span in value.spans.items())
    )


def _is_span(value: Any) -> bool:
    match value:
        case (int(), int()):
            return True
    return False


def _is_segment(value: Any) -> bool:
    return (
        isinstance(value, SegmentInputs)
        and _has_arrays(value)
        and isinstance(value.kind, str)
        and type(value.length) is int
        and isinstance(value.counts, dict)
        and isinstance(value.content, bytes)
    )


def _is_kept(value: Any) -> bool:
    return isinstance(value, KeptMedia) and _has_arrays(value) and isinstance(value.content, bytes)


def _has_arrays(inputs: Inputs | SegmentInputs | KeptMedia) -> bool:
    return isinstance(inputs.arrays, dict) and all(
        isinstance(name, str) and isinstance(value, np.ndarray) for name, value in inputs.arrays.items()
    )


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _is_decoded(value: Any) -> bool:
    match value:
        case (int(), float() | int(), MediaPart()):
            return True
    return False


MakeProcess = Callable[[str, Path | None, Mapping[str, Any]], ProcessorProcess]
"""Creates a process from the processor's target, the model's folder and its settings."""
