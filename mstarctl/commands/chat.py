"""`mstarctl chat`: a conversation in the terminal with a deployment that has a chat route."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mstar_core.client import WavFile
from mstar_core.errors import ExitCode, MstarError, UsageError
from mstarctl.call.ask import parse_params
from mstarctl.call.conversation import Conversation, delta_of
from mstarctl.call.notice import warn_once
from mstarctl.call.player import Player, find_player, required_player
from mstarctl.commands.call import KEY_VARIABLE, Server, served
from mstarctl.complete import ServedName, voice_names
from mstarctl.output import Printer, duration_text
from mstarctl.output.errors import render_error
from mstarctl.output.table import escape

ROUTE: Final = "/v1/chat/completions"
RATE: Final = 24_000
"""Sample rate of streamed chat audio, mono PCM16."""

HELP: Final = (
    ("/image FILE", "send an image with the next message"),
    ("/audio FILE", "send a sound with the next message"),
    ("/video FILE", "send a video with the next message"),
    ("/new", "forget the conversation"),
    ("/help", "show this"),
    ("/quit", "leave; Ctrl-D does too. Ctrl-C stops an answer"),
)


def chat(
    ctx: typer.Context,
    target: ServedName = None,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="instruction before the conversation")] = "",
    is_spoken: Annotated[
        bool, typer.Option("--speech", help="ask for spoken answers: played, or saved without a player")
    ] = False,
    voice: Annotated[
        str | None, typer.Option("--voice", help="speaker of spoken answers", autocompletion=voice_names)
    ] = None,
    is_played: Annotated[
        bool | None, typer.Option("--play/--no-play", help="play spoken answers, or save them as chat-N.wav")
    ] = None,
    params: Annotated[
        list[str] | None, typer.Option("--param", metavar="KEY=VALUE", help="a parameter of the model; repeatable")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help=f"API key for a deployment of another host; also {KEY_VARIABLE}")
    ] = None,
) -> None:
    """Talk with a model in the terminal."""
    printer = Printer.of(ctx)
    if is_played:
        required_player()
    with served(printer.options, target, api_key, printer) as server:
        check_chat(server)
        outputs = server.card.outputs
        if is_spoken and "audio" not in outputs:
            raise UsageError(f"{server.name} does not speak", hint=f"its outputs: {', '.join(outputs)}")
        body: dict[str, Any] = {"stream": True, **parse_params(params or [])}
        if is_spoken:
            body["modalities"] = ["text", "audio"] if "text" in outputs else ["audio"]
            body["audio"] = {"format": "pcm16", **({"voice": voice} if voice else {})}
        warn_once(server.card.notice, server.run, printer)
        Chat(server, Conversation(server.card.inputs, system), body, printer, is_played=is_played).run()


def check_chat(server: Server) -> None:
    """Raise UsageError for a deployment without a chat route."""
    if ROUTE not in server.card.routes:
        raise UsageError(
            f"{server.name} has no chat: its model maps no chat route",
            f"its routes: {', '.join(server.card.routes)}",
            f'mstarctl call {server.name} --text "Hello there"',
        )


class Chat:
    """The loop of one conversation. Owned by the command."""

    def __init__(
        self, server: Server, talk: Conversation, body: dict[str, Any], printer: Printer, *, is_played: bool | None
    ) -> None:
        self._server, self._talk, self._body, self._printer = server, talk, body, printer
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._player = find_player() if is_played or (is_played is None and self._is_terminal) else None
        self._saved = 0

    def run(self) -> None:
        """Read lines and answer them until the input ends. A failed answer does not end a terminal's conversation."""
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history of input()
            self._printer.say(f"{self._server.name}: /help lists the commands; Ctrl-D leaves")
        while True:
            try:
                line = self._read()
            except EOFError:
                break
            except KeyboardInterrupt:
                self._printer.say("\nCtrl-D or /quit leaves")
                continue
            try:
                if not self._take(line.strip()):
                    break
            except MstarError as error:
                if not self._is_terminal:
                    raise
                self._printer.problem(render_error(error))
        if self._is_terminal:
            self._printer.say("")

    def _read(self) -> str:
        if self._is_terminal:
            return input("\x01\x1b[1m\x02> \x01\x1b[0m\x02" if self._printer.options.is_coloured() else "> ")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    def _take(self, line: str) -> bool:
        """Handle one line. Returns False for /quit."""
        if not line:
            return True
        word, _, rest = line.partition(" ")
        match word:
            case "/quit" | "/exit":
                return False
            case "/new":
                self._talk.clear()
                self._printer.say("a new conversation")
            case "/image" | "/audio" | "/video":
                if not rest.strip():
                    raise UsageError(f"{word} needs a file", hint=f"{word} FILE")
                self._printer.say(self._talk.attach(word[1:], Path(rest.strip().strip("'\""))))
            case "/help":
                for name, what in HELP:
                    self._printer.say(f"  {name:<14} {what}")
            case _ if word.startswith("/") and "/" not in word[1:]:
                raise UsageError(f"unknown command {word!r}", hint="/help lists the commands")
            case _:
                self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        messages = self._talk.ask(text)
        said, sound, player = "", b"", None
        try:
            with closing(self._server.client.chat({**self._body, "messages": messages})) as events:
                for event in events:
                    piece, pcm, _ = delta_of(event)
                    said += piece
                    self._show(piece)
                    sound += pcm
                    if pcm and self._player is not None:
                        player = player or Player(self._player)
                        player.write(pcm, RATE, 1)
            self._show("\n")
            if player is not None:
                player.close()
        except KeyboardInterrupt:
            self._show("\n")
            self._printer.say("[stopped]")
            if not self._is_terminal:
                raise typer.Exit(ExitCode.INTERRUPTED) from None
        finally:
            if player is not None:
                player.stop()
            self._talk.answered(said)
        if sound and (player is None or player.is_broken):
            self._save(sound)

    def _show(self, text: str) -> None:
        shown = "".join(char if char in "\n\t" else escape(char) for char in text)
        sys.stdout.write(shown)
        sys.stdout.flush()

    def _save(self, pcm: bytes) -> None:
        self._saved += 1
        while (path := Path(f"chat-{self._saved}.wav")).exists():
            self._saved += 1
        with WavFile.create(path, RATE) as file:
            file.write(pcm)
        self._printer.say(f"saved {duration_text(len(pcm) / 2 / RATE)} of speech: {path}")
