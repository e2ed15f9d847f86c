"""Display of an answer while it arrives: text on stdout; thinking and calls on stderr; sound and images in files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from mstar_core.client import FunctionCall, WavFile
from mstar_core.errors import ConfigError
from mstarctl.call.player import Player
from mstarctl.chat.answer import ChatAnswer, Delta
from mstarctl.output import Printer
from mstarctl.output.table import escape
from mstarctl.output.units import counted, duration_text

RATE: Final = 24_000
"""Sample rate of streamed chat audio, mono PCM16."""


class AnswerView:
    """Shows one answer. Owned by the session, which calls `end` after the last delta, also of a failed answer."""

    def __init__(
        self, printer: Printer, *, folder: Path, player: tuple[str, ...] | None, shows_thinking: bool, is_streamed: bool
    ) -> None:
        """folder: of files. player: command that plays sound. is_streamed: text goes to stdout as it arrives."""
        self._printer, self._folder, self._command = printer, folder, player
        self._shows_thinking = shows_thinking and not printer.options.quiet
        self._is_streamed = is_streamed
        self._player: Player | None = None
        self._last = ""
        self._is_open = {"thinking": False, "text": False}

    def show(self, delta: Delta) -> None:
        """Show what one event added."""
        match delta.kind:
            case "thinking" if self._shows_thinking:
                self._write("thinking", delta.text)
            case "text" if self._is_streamed:
                self._write("text", delta.text)
            case "sound" if self._command is not None:
                self._player = self._player or Player(self._command)
                self._player.write(delta.data, RATE, 1)

    def end(self, answer: ChatAnswer) -> list[Path]:
        """Complete the display: the end of the line, the rest of the sound, files. Returns the files."""
        self._close("thinking")
        self._close("text")
        if not self._shows_thinking and answer.thinking and not self._printer.options.quiet:
            self._printer.say(self._dim(f"[thought in {counted(len(answer.thinking.split()), 'word')}]"))
        try:
            if self._player is not None and not answer.is_stopped:
                self._player.close()
        finally:
            self.stop()
        is_heard = self._player is not None and not self._player.is_broken
        files = [self._save_sound(answer.sound)] if answer.sound and not is_heard else []
        return [*files, *(self._save(picture.suffix, picture.data, "a picture") for picture in answer.pictures)]

    def stop(self) -> None:
        """End the player at once. Safe to call twice."""
        if self._player is not None:
            self._player.stop()

    def cut(self) -> None:
        """End the line and the sound of an answer that failed."""
        self._close("thinking")
        self._close("text")
        self.stop()

    def show_calls(self, calls: list[FunctionCall]) -> None:
        """Show the functions that an answer calls."""
        for call in calls:
            name = self._printer.paint(plain(call.name), "key", sys.stderr)
            self._printer.say(f"{self._dim('call')} {name} {plain(call.arguments)}")

    def _write(self, kind: str, text: str) -> None:
        if self._last not in ("", kind):
            self._close(self._last)
        self._last = kind
        if kind == "thinking":
            begin = "" if self._is_open[kind] else "thinking: "
            self._is_open[kind] = True
            _write_flushed(sys.stderr, self._dim(begin + plain(text)))
            return
        self._is_open[kind] = True
        _write_flushed(sys.stdout, plain(text))

    def _close(self, kind: str) -> None:
        if self._is_open.get(kind):
            self._is_open[kind] = False
            _write_flushed(sys.stderr if kind == "thinking" else sys.stdout, "\n")

    def _dim(self, text: str) -> str:
        # A painter without colours drops blanks at the end, which a piece of thinking may need.
        return self._printer.paint(text, "dim", sys.stderr) if self._printer.options.is_coloured(sys.stderr) else text

    def _save_sound(self, pcm: bytes | bytearray) -> Path:
        path = self._free(".wav")
        with WavFile.create(path, RATE) as file:
            file.write(bytes(pcm))
        self._printer.say(f"saved {duration_text(len(pcm) / 2 / RATE)} of speech: {path}")
        return path

    def _save(self, suffix: str, data: bytes, what: str) -> Path:
        path = self._free(suffix)
        try:
            path.write_bytes(data)
        except OSError as error:
            hint = "start with --out DIR, a folder that can be written"
            raise ConfigError(f"{path} cannot be written", error.strerror or str(error), hint, key="out") from error
        self._printer.say(f"saved {what}: {path}")
        return path

    def _free(self, suffix: str) -> Path:
        """Return the first free name chat-N."""
        number = 1
        while (path := self._folder / f"chat-{number}{suffix}").exists():
            number += 1
        return path


def plain(text: str) -> str:
    """Return text that cannot control the terminal. Ends of lines and tabs stay."""
    return "".join(char if char in "\n\t" else escape(char) for char in text)


def _write_flushed(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def record_of(answer: ChatAnswer, files: list[Path]) -> Mapping[str, Any]:
    """Return an answer as one object, for `-o json`."""
    return {
        "kind": "answer",
        "request_id": answer.request_id,
        "content": answer.text,
        "reasoning": answer.thinking,
        "tool_calls": [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in answer.calls],
        "finish_reason": answer.finish_reason,
        "usage": dict(answer.usage),
        "files": [str(path) for path in files],
    }
