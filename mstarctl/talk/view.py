"""Display of a conversation: answers on stdout, words of the user on stderr; with -o json, events on stdout."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any, Final

from mstar_core.client import WavFile
from mstar_core.errors import ConfigError, MstarError
from mstarctl.chat.view import plain
from mstarctl.client.realtime import RATE, Event
from mstarctl.output import Printer
from mstarctl.output.errors import render_error
from mstarctl.output.units import duration_text
from mstarctl.talk.answer import TalkAnswer
from mstarctl.talk.functions import CalledFunction

SOUND: Final = "response.output_audio.delta"


class TalkView:
    """Shows a conversation. Owned by the session. name: of the model."""

    def __init__(self, printer: Printer, name: str, folder: Path | None) -> None:
        self._printer, self._name, self._folder = printer, name, folder
        self._is_open = False

    def event(self, event: Event) -> None:
        """Print an event of the server for programs. Sound is replaced by its length, because files hold it."""
        if not self._printer.is_machine:
            return
        shown = event
        if event["type"] == SOUND:
            shown = {**event, "delta": None, "samples": len(base64.b64decode(event["delta"])) // 2}
        self._printer.line(shown, event["type"])

    def own(self, kind: str, **fields: Any) -> None:
        """Print an event of this command for programs."""
        if self._printer.is_machine:
            self._printer.line({"type": f"talk.{kind}", **fields}, f"talk.{kind}")

    def say(self, text: str) -> None:
        """Print a line of narration."""
        self._close()
        self._printer.say(text)

    def connection(self, is_lost: bool) -> None:
        """Show that the connection was lost, or that the conversation goes on with another one."""
        self.own("lost" if is_lost else "resumed")
        self.say("[the connection was lost; connecting again]" if is_lost else "[the conversation goes on]")

    def problem(self, error: MstarError) -> None:
        """Print an error that does not end the conversation."""
        self._close()
        self._printer.problem(render_error(error))

    def user(self, text: str) -> None:
        """Show the transcript of a spoken turn."""
        self.say(f"{self._printer.paint('you:', 'key', sys.stderr)} {plain(text)}")

    def call(self, call: CalledFunction) -> None:
        """Show a function that an answer calls."""
        name = self._printer.paint(plain(call.name), "key", sys.stderr)
        self.say(f"call {name} {plain(call.arguments)}")

    def wants(self, call: CalledFunction) -> None:
        """Say whose result the next line is."""
        self.say(f"[the next line is the result of {plain(call.name)}]")

    def text(self, delta: str) -> None:
        """Show text of an answer as it arrives."""
        if self._printer.is_machine:
            return
        if not self._is_open and sys.stdout.isatty():
            sys.stdout.write(f"{self._printer.paint(self._name + ':', 'key')} ")
        self._is_open = True
        sys.stdout.write(plain(delta))
        sys.stdout.flush()

    def interrupted(self, answer: TalkAnswer, heard_ms: int) -> None:
        """Show that an answer was interrupted."""
        self.say(f"[interrupted after {duration_text(heard_ms / 1000)}]" if answer.sound else "[interrupted]")
        self.own("interrupted", item_id=answer.item_id, heard_ms=heard_ms)

    def end(self, answer: TalkAnswer) -> None:
        """Complete an answer: the end of its line, its file. Raises ConfigError if the file cannot be written."""
        self._close()
        if answer.playback is not None and answer.playback.is_broken and not answer.is_cut:
            self._printer.warn("the player ended before its sound; --out DIR saves answers")
        if not answer.text and not answer.sound and not answer.is_cut and not answer.has_calls:
            self._printer.say("[the answer is empty]")
        if self._folder is None or not answer.sound:
            return
        path, seconds = self._free(self._folder), len(answer.sound) / 2 / RATE
        try:
            with WavFile.create(path, RATE) as file:
                file.write(bytes(answer.sound))
        except OSError as error:
            why = error.strerror or str(error)
            hint = "--out DIR, a folder that can be written"
            raise ConfigError(f"{path} cannot be written", why, hint, key="out") from error
        self._printer.say(f"saved {duration_text(seconds)} of speech: {path}")
        self.own("saved", item_id=answer.item_id, file=str(path), seconds=round(seconds, 3))

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _free(self, folder: Path) -> Path:
        """Return the first free name answer-N.wav."""
        number = 1
        while (path := folder / f"answer-{number}.wav").exists():
            number += 1
        return path
