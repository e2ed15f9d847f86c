"""One process of the pool: makes the model's processor once, then serves jobs until its pipe closes."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mstar_core.api.preprocess.pipe import PoolPipe
from mstar_core.api.preprocess.seccomp import deny_network
from mstar_core.errors import MstarError, PluginError, StartError
from mstar_core.plugin.media import check_media, encode_image, read_image
from mstar_core.plugin.media.check import decoded_bytes
from mstar_core.plugin.media.limits import MediaLimits, check_decoded
from mstar_core.plugin.processor import InlineProcessor, MediaPart, ParallelDecodeProcessor, Processor
from mstar_core.process.system import die_with_parent

HEADROOM_BYTES: Final = 3 << 30
"""Memory that one job may map beyond what the processor itself holds: 1 GiB decoded, its copy, and working space."""

CPU_S: Final = 30
"""Processor time of one job."""


def load_processor(target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> Processor:
    """Make the processor that `target` ("pkg.mod:Class") names. Raises PluginError when there is no such class."""
    module, _, name = target.partition(":")
    try:
        made = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        raise PluginError(f"the processor {target} cannot be loaded", str(error), phase="processor") from error
    processor: Processor = made(folder, model_kwargs)
    return processor


def serve(pipe: PoolPipe, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
    """The process's main. Says when it is ready, and what its processor can (`is_inline`, `is_parallel`); then sends an
    answer per job: (True, value) or (False, error).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the supervisor's to handle
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            processor = load_processor(target, folder, model_kwargs)
        except Exception as error:  # noqa: BLE001  reported over the pipe; the pool decides
            pipe.send((False, as_ours(error)))
            return
        limit_memory()
        try:
            deny_network()
        except StartError as error:
            pipe.send((False, error))
            return
        pipe.send((True, (isinstance(processor, InlineProcessor), isinstance(processor, ParallelDecodeProcessor))))
        while True:
            job, is_alone = pipe.receive()
            limit_cpu()
            told = answer(processor, job)
            try:
                pipe.send(told, is_alone=is_alone)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001  one job's: a plugin's own type cannot be sent
                pipe.send((False, as_ours(error)), is_alone=is_alone)


def answer(processor: Processor, job: tuple[str, tuple[Any, ...]]) -> tuple[bool, Any]:
    """Do one job. Whatever goes wrong is the job's own answer."""
    name, args = job
    try:
        match name:
            case "prompt":
                check_media(args[0].media, args[0].limits)
                return True, processor.process_prompt(*args)
            case "decode":
                return True, decode_files(processor, *args)
            case "recode":
                data, form, limits = args
                return True, encode_image(read_image(data, limits), form)
            case "postprocess":
                return True, processor.postprocess(*args)
            case _:
                return False, PluginError(f"the pool has no job {name!r}")
    except Exception as error:  # noqa: BLE001  isolation boundary: one job
        return False, as_ours(error)


def decode_files(
    processor: Processor, limits: MediaLimits, numbers: tuple[int, ...], *parts: MediaPart
) -> list[tuple[int, MediaPart]]:
    """Some files of one request: what each decodes to, in bytes, and its tensor. Raises as `check_media` does."""
    assert isinstance(processor, ParallelDecodeProcessor)
    sizes = [decoded_bytes(part, limits) for part in parts]
    check_decoded(sum(sizes), limits)
    made = (processor.decode_file(part, number) for part, number in zip(parts, numbers, strict=True))
    return list(zip(sizes, made, strict=True))


def as_ours(error: Exception) -> MstarError:
    """An error that survives the way to the api: ours as it is, others as what they say."""
    if isinstance(error, MstarError):
        return error
    return PluginError("the processor failed", f"{type(error).__name__}: {error}", phase="processor")


def limit_memory() -> None:
    """Bound the address space from here on."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + HEADROOM_BYTES, mapped + HEADROOM_BYTES))


def limit_cpu() -> None:
    """Give the next job its processor time; the kernel ends the process beyond it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
