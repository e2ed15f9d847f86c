"""Main function of a pool process: creates the model's processor, then runs jobs until its pipe closes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from mstar_core.api.preprocess.forms import encoded
from mstar_core.api.preprocess.media_check import check_media, decoded_bytes, heard_s
from mstar_core.api.preprocess.pipe import PoolPipe
from mstar_core.api.preprocess.seccomp import deny_network
from mstar_core.errors import MstarError, PluginError
from mstar_core.plugin.media import encode_image, read_image
from mstar_core.plugin.media.decoders import load_decoders
from mstar_core.plugin.media.limits import MediaLimits, check_decoded
from mstar_core.plugin.processor import (
    InlineProcessor,
    MediaPart,
    ParallelDecodeProcessor,
    Processor,
    TokenizingProcessor,
    WarmedProcessor,
)
from mstar_core.process.system import die_with_parent, keep_freed_memory
from mstar_core.targets import load_target

HEADROOM_BYTES: Final = 3 << 30
"""Address space of one job beyond the processor's own: 1 GiB of decoded media, a copy of it, and working memory."""

KEPT_BYTES: Final = 32 << 20
"""Freed memory that the process keeps, so that a clip or an image of each job causes no page faults."""

CPU_S: Final = 30
"""CPU time limit of one job."""


JobCall = tuple[str, tuple[Any, ...]]
"""Name and arguments of a job."""

Answer = tuple[bool, Any]
"""(True, value) or (False, error)."""


@runtime_checkable
class GrammarJudge(Protocol):
    """Checker of grammars, which runs in a pool process as processors do. cpu_s: CPU time limit of one check."""

    cpu_s: int

    def problem(self, constraint: str) -> str:
        """Return why a grammar cannot hold an answer; empty if it can."""
        ...


def load_processor(target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> Processor:
    """Create the processor of `target` ("pkg.mod:Class"). Raises PluginError if the class does not exist."""
    try:
        factory = load_target(target)
    except (ImportError, PluginError) as error:
        raise PluginError(f"the processor {target} cannot be loaded", str(error), phase="processor") from error
    processor: Processor = factory(folder, model_kwargs)
    return processor


def serve(pipe: PoolPipe, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
    """Run the process: send (True, (is_inline, is_parallel)) when ready, then a list of answers per list of jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keep_freed_memory(KEPT_BYTES)
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            processor = load_processor(target, folder, model_kwargs)
            limit_memory()
            deny_network()
        except Exception as error:  # noqa: BLE001  reported to the pool
            pipe.send((False, as_ours(error)))
            return
        pipe.send((True, (isinstance(processor, InlineProcessor), isinstance(processor, ParallelDecodeProcessor))))
        while True:
            answers = []
            for call in pipe.receive():
                limit_cpu(processor.cpu_s if isinstance(processor, GrammarJudge) else CPU_S)
                answers.append(answer(processor, call))
            try:
                pipe.send(answers)
            except OSError:
                raise
            except Exception:  # noqa: BLE001  a plugin's own type has no form
                pipe.send([sendable(result) for result in answers])


def answer(processor: Processor, call: JobCall) -> Answer:
    """Run one job and return its answer. Raises nothing."""
    name, args = call
    try:
        match name:
            case "prompt":
                check_media(args[0].media, args[0].limits)
                inputs = processor.process_prompt(*args)
                seconds = heard_s(args[0].media)
                return True, replace(inputs, heard_s=seconds) if seconds else inputs
            case "decode":
                return True, decode_files(processor, *args)
            case "recode":
                data, form, limits = args
                return True, encode_image(read_image(data, limits), form)
            case "postprocess":
                return True, processor.postprocess(*args)
            case "tokenize":
                request, adds_special = args
                check_media(request.media, request.limits)
                return True, list(tokenizing(processor).tokenize(request, adds_special=adds_special))
            case "spell":
                return True, list(tokenizing(processor).spell(*args))
            case "warm":
                if isinstance(processor, WarmedProcessor):
                    processor.warm_up()
                load_decoders(*args)
                return True, ""
            case "problem":
                assert isinstance(processor, GrammarJudge)
                return True, processor.problem(*args)
            case _:
                return False, PluginError(f"the pool has no job {name!r}")
    except Exception as error:  # noqa: BLE001  isolation boundary: one job
        return False, as_ours(error)


def tokenizing(processor: Processor) -> TokenizingProcessor:
    """Return the processor as one that shows its tokens. Raises PluginError if it does not."""
    if not isinstance(processor, TokenizingProcessor):
        raise PluginError("the processor does not show its tokens", phase="processor")
    return processor


def decode_files(
    processor: Processor, limits: MediaLimits, numbers: tuple[int, ...], *parts: MediaPart
) -> list[tuple[int, float, MediaPart]]:
    """Return the decoded size, the seconds of audio and the tensor of each file. Raises like `check_media`."""
    assert isinstance(processor, ParallelDecodeProcessor)
    sizes = [decoded_bytes(part, limits) for part in parts]
    check_decoded(sum(sizes), limits)
    decoded = (processor.decode_file(part, number) for part, number in zip(parts, numbers, strict=True))
    return list(zip(sizes, (heard_s([part]) for part in parts), decoded, strict=True))


def sendable(result: Answer) -> Answer:
    """Return the answer, or the error of encoding it."""
    try:
        encoded(result, lambda data: 0)
    except Exception as error:  # noqa: BLE001  whatever a plugin's type raises
        return False, as_ours(error)
    return result


def as_ours(error: Exception) -> MstarError:
    """Return an error that can be sent; foreign errors become PluginError."""
    if isinstance(error, MstarError):
        return error
    return PluginError("the processor failed", f"{type(error).__name__}: {error}", phase="processor")


def limit_memory() -> None:
    """Limit the growth of the address space."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + HEADROOM_BYTES, mapped + HEADROOM_BYTES))


def limit_cpu(seconds: int) -> None:
    """Set the CPU time limit of the next job; the kernel ends the process beyond it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
