"""Microphone, recorded by a program of this machine. Owned by `mstarctl talk`."""

from __future__ import annotations

import asyncio
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from mstar_core.errors import ConfigError, UsageError
from mstarctl.client.realtime import RATE

RECORDERS: Final = {
    "parec": ("--format=s16le", f"--rate={RATE}", "--channels=1", "--latency-msec=20"),
    "arecord": ("-q", "-t", "raw", "-f", "S16_LE", "-r", str(RATE), "-c", "1", "--buffer-time=100000"),
    "pw-record": ("--raw", "--format", "s16", "--rate", str(RATE), "--channels", "1", "-"),
    "rec": ("-q", "--buffer", "2048", "-t", "raw", "-e", "signed", "-b", "16", "-r", str(RATE), "-c", "1", "-"),
}
"""Programs that write PCM16 of the microphone to a pipe, by preference, with their arguments."""

FFMPEG: Final = "ffmpeg"
FFMPEG_INPUT: Final = {"darwin": ("-f", "avfoundation", "-i", ":default")}
FFMPEG_PULSE: Final = ("-f", "pulse", "-i", "default")

PIECE_S: Final = 0.04
PIECE_BYTES: Final = 2 * round(PIECE_S * RATE)


def find_recorder() -> tuple[str, ...] | None:
    """Return the command of a recorder, None if there is none."""
    for name, arguments in RECORDERS.items():
        path = shutil.which(name)
        if path is not None:
            return (path, *arguments)
    path = shutil.which(FFMPEG)
    if path is None:
        return None
    source = FFMPEG_INPUT.get(sys.platform, FFMPEG_PULSE)
    return (path, "-loglevel", "error", *source, "-ar", str(RATE), "-ac", "1", "-f", "s16le", "-")


def required_recorder() -> tuple[str, ...]:
    """Return the command of a recorder. Raises UsageError if this machine has none."""
    recorder = find_recorder()
    if recorder is None:
        raise UsageError(
            "no program that records sound was found",
            f"looked for {', '.join(RECORDERS)} and {FFMPEG}",
            "install alsa-utils, pulseaudio-utils or sox, or send files: --in FILE.wav, or type: --no-mic",
        )
    return recorder


class Microphone:
    """A running recorder, read as sound. Owned by the session, which calls `stop`."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._process: Process | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield mono PCM16 of 24 kHz, 40 ms each. Raises ConfigError if the recorder ends."""
        # A session of its own: Ctrl-C stops the answer, and `stop` ends the recorder.
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        if process.stdout is None or process.stderr is None:
            raise AssertionError("the process was started with pipes")
        with suppress(asyncio.IncompleteReadError):
            while True:
                yield await process.stdout.readexactly(PIECE_BYTES)
        words = (await process.stderr.read()).decode("utf-8", "replace").strip()
        code = await process.wait()
        why = words.splitlines()[-1] if words else f"exit {code}"
        raise ConfigError(f"{self._command[0]} ended", why, "check the microphone, or type: --no-mic", key="mic")

    async def stop(self) -> None:
        """End the recorder. Called after the last piece was read."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # the end is seen only behind what its pipes hold
