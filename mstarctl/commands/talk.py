"""`mstarctl talk`: a voice conversation with a deployment that has the realtime route."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

import typer

from mstar_core.errors import ConfigError, UsageError, did_you_mean
from mstarctl.call.ask import Card, parse_params
from mstarctl.call.notice import warn_once
from mstarctl.call.player import find_player, required_player
from mstarctl.chat.documents import read_tools
from mstarctl.chat.session import is_interactive
from mstarctl.client.realtime import PATH, RealtimeAddress, conversation
from mstarctl.commands.call import KEY_VARIABLE, Server, served
from mstarctl.complete import ServedName, turn_names, voice_names
from mstarctl.output import Printer
from mstarctl.talk.recorder import required_recorder
from mstarctl.talk.session import TalkSession
from mstarctl.talk.settings import TURNS, TalkSettings
from mstarctl.talk.turns import Turn, read_turn
from mstarctl.talk.view import TalkView


def talk(
    ctx: typer.Context,
    target: ServedName = None,
    url: Annotated[
        str | None, typer.Option("--url", help=f"any server with {PATH}; NAME is then a model of it")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="a model or adapter of the server; default: its first or only"),
    ] = None,
    instructions: Annotated[
        str | None,
        typer.Option("--system", "--instructions", metavar="TEXT", help="instruction before the conversation"),
    ] = None,
    voice: Annotated[
        str | None, typer.Option("--voice", help="speaker of the answers", autocompletion=voice_names)
    ] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--in", metavar="FILE", help="a WAV file as a spoken turn; repeatable")
    ] = None,
    is_fast: Annotated[
        bool, typer.Option("--fast", help="send files at once, not at the speed of their sound")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="save the sound of answers as DIR/answer-N.wav")
    ] = None,
    has_microphone: Annotated[
        bool | None, typer.Option("--mic/--no-mic", help="speak, or type; default: speak in a terminal without --in")
    ] = None,
    is_played: Annotated[
        bool | None, typer.Option("--play/--no-play", help="play answers; default: in a terminal with a player")
    ] = None,
    turns: Annotated[
        str,
        typer.Option("--turns", help="end of a spoken turn: server (a silence), semantic", autocompletion=turn_names),
    ] = "server",
    interrupts: Annotated[
        bool,
        typer.Option("--interrupt/--no-interrupt", help="speech ends an answer; without, it is not heard meanwhile"),
    ] = True,
    has_transcripts: Annotated[
        bool, typer.Option("--transcript/--no-transcript", help="show the words of spoken turns")
    ] = True,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", metavar="FILE.json", help="functions to offer, as /tools of chat reads them"),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option("--run", metavar="COMMAND", help="computes results of functions; default: lines are results"),
    ] = None,
    params: Annotated[
        list[str] | None, typer.Option("--param", metavar="KEY=VALUE", help="a parameter of the model; repeatable")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help=f"API key for a gateway or a deployment of another host; also {KEY_VARIABLE}"),
    ] = None,
) -> None:
    """Speak with a model: microphone or files in, speech out.

    In a terminal the microphone is open and answers are played; speech or a typed line interrupts an answer. With --in,
    or with lines in a pipe, each file or line is a turn, and the first failure ends the command with its exit code. It
    ends with 0 after /quit, Ctrl-D and the last turn, and with 130 after Ctrl-C, which in a terminal first stops the
    answer.
    """
    printer = Printer.of(ctx)
    if turns not in TURNS:
        raise UsageError(f"--turns is {turns!r}", hint=did_you_mean(turns, TURNS))
    if files and has_microphone:
        raise UsageError("--in and --mic exclude each other", hint="omit one of them")
    if out is not None and not out.is_dir():
        raise ConfigError(f"{out} is not a folder", hint=f"mkdir -p {out}", file=str(out), key="out")
    if program is not None and tools is None:
        raise UsageError("--run needs --tools", hint="--tools FILE.json declares the functions")
    functions = () if tools is None else tuple(read_tools(tools))
    spoken: list[Turn] | None = [read_turn(path) for path in files] if files else None
    is_terminal = is_interactive() and spoken is None
    player = required_player() if is_played else find_player() if is_played is None and is_terminal else None
    with served(printer.options, target, api_key, printer, url=url, model=model) as server:
        card = server.card
        check_realtime(server, card)
        hears = "audio" in card.inputs
        if not hears and (files or has_microphone):
            raise UsageError(f"{card.name} hears no sound", f"its inputs: {', '.join(card.inputs)}", "type lines")
        if has_microphone is None:
            has_microphone = is_terminal and hears
        settings = TalkSettings(
            is_terminal=is_terminal,
            recorder=required_recorder() if has_microphone else None,
            player=player,
            folder=out,
            turns="semantic" if turns == "semantic" else "server",
            hears=hears,
            interrupts=interrupts,
            has_transcripts=has_transcripts and hears,
            is_fast=is_fast,
            instructions=instructions,
            voice=voice,
            params=parse_params(params or []),
            tools=functions,
            command=tuple(shlex.split(program or "")),
        )
        warn_once(card.notice, server.run, printer)
        asyncio.run(_talk(server.address, card, settings, spoken, TalkView(printer, card.name, out)))


async def _talk(
    address: RealtimeAddress, card: Card, settings: TalkSettings, turns: list[Turn] | None, view: TalkView
) -> None:
    async with conversation(address, card.name, view.connection) as connection:
        await connection.configure(settings.session())
        if settings.is_terminal:
            verb = "type a line" if settings.recorder is None else "speak, or type a line"
            view.say(f"{card.name}: {verb}; Ctrl-D leaves")
        if settings.player is None and settings.folder is None and "audio" in card.outputs:
            view.say("the sound of answers is dropped: --out DIR saves it, and --play plays it")
        await TalkSession(connection, settings, view).run(turns)


def check_realtime(server: Server, card: Card) -> None:
    """Raise UsageError for a deployment without the realtime route. Servers of other kinds list no routes."""
    if card.capabilities is not None and PATH not in card.routes:
        raise UsageError(
            f"{server.name} has no voice conversations: its model maps no chat and no speech route",
            f"its routes: {', '.join(card.routes)}",
            f"mstarctl call {server.name}",
        )
