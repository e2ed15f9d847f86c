"""Playback of sound while it arrives, by a player program of this machine. Used by `call`, `chat` and `talk`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, cast

from mstar_core.client import WavFile
from mstar_core.errors import UsageError

STREAMING: Final = {
    "ffplay": ("-nodisp", "-autoexit", "-loglevel", "error", "-i", "-"),
    "aplay": ("-q", "-"),
}
"""Players that read WAV from a pipe, by preference, with their arguments."""

WHOLE: Final = "afplay"
"""The player of macOS, which takes a complete file only."""


def find_player() -> tuple[str, ...] | None:
    """Return the command of a player, without the file that afplay needs; None if there is none."""
    for name, arguments in STREAMING.items():
        path = shutil.which(name)
        if path is not None:
            return (path, *arguments)
    path = shutil.which(WHOLE)
    return None if path is None else (path,)


def required_player() -> tuple[str, ...]:
    """Return the command of a player. Raises UsageError if this machine has none."""
    player = find_player()
    if player is None:
        raise UsageError(
            "no program that plays sound was found",
            f"looked for {', '.join(STREAMING)} and {WHOLE}",
            "install ffmpeg or alsa-utils, or write a file: --out answer.wav",
        )
    return player


class Player:
    """Plays PCM16 samples. A player that ends early, such as by its own error, does not end the request."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self.is_whole = Path(command[0]).name == WHOLE
        """Whether the sound begins with `close`, because the player takes a complete file."""
        self._process: subprocess.Popen[bytes] | None = None
        self._wav: WavFile | None = None
        self._file: Path | None = None
        self.is_broken = False
        self._is_stopped = False

    def write(self, pcm: bytes, rate: int, channels: int) -> None:
        """Play samples after those before."""
        if self.is_broken:
            return
        try:
            if self._wav is None:
                self._wav = WavFile(self._open(), rate, channels)
            self._wav.write(pcm)
        except (OSError, ValueError):  # ValueError: `stop` has closed the pipe
            self.is_broken = True

    def _open(self) -> BinaryIO:
        if self.is_whole:
            number, name = tempfile.mkstemp(suffix=".wav")
            self._file = Path(name)
            return cast(BinaryIO, os.fdopen(number, "wb"))
        self._process = self._start(self._command)
        if self._is_stopped:  # meanwhile, by another thread
            self.stop()
        if self._process.stdin is None:
            raise AssertionError("Popen was called with a pipe")
        return cast(BinaryIO, self._process.stdin)

    def _start(self, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        # A session of its own: Ctrl-C stops the answer, and `stop` ends the player.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)

    def close(self) -> None:
        """Wait until everything has been played."""
        if self._wav is not None:
            with suppress(OSError, ValueError):
                self._wav.close()
        if self._file is not None and not self.is_broken and not self._is_stopped:
            self._process = self._start((*self._command, str(self._file)))
        try:
            if self._process is not None:
                self._process.wait()
        finally:
            self.stop()

    def stop(self) -> None:
        """End the player at once. Safe to call twice, and while another thread writes."""
        self._is_stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
