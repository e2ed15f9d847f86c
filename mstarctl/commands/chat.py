"""`mstarctl chat`: a conversation in the terminal with a deployment that has a chat route."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mstar_core.errors import ConfigError, UsageError
from mstarctl.call.ask import CHAT_ROUTE, Card, parse_params
from mstarctl.call.notice import warn_once
from mstarctl.call.player import find_player, required_player
from mstarctl.chat.conversation import ChatMessages
from mstarctl.chat.documents import read_conversation, read_schema, read_tools
from mstarctl.chat.session import ChatOptions, ChatSession, is_interactive
from mstarctl.chat.settings import ChatSettings
from mstarctl.chat.state import ChatState
from mstarctl.commands.call import KEY_VARIABLE, Server, served
from mstarctl.complete import ServedName, voice_names
from mstarctl.output import Printer


def chat(
    ctx: typer.Context,
    target: ServedName = None,
    url: Annotated[
        str | None, typer.Option("--url", help="any server with the OpenAI routes; NAME is then a model of it")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="a model or adapter of the server; default: its first or only"),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="instruction before the conversation")
    ] = None,
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    ] = None,
    tools: Annotated[
        Path | None, typer.Option("--tools", metavar="FILE", help="JSON file of functions; their results are typed")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", metavar="FILE", help="JSON schema that answers obey")
    ] = None,
    is_spoken: Annotated[
        bool, typer.Option("--speech", help="ask for spoken answers: played, or saved without a player")
    ] = False,
    voice: Annotated[
        str | None, typer.Option("--voice", help="speaker of spoken answers", autocompletion=voice_names)
    ] = None,
    is_played: Annotated[
        bool | None, typer.Option("--play/--no-play", help="play spoken answers, or save them as chat-N.wav")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="folder of the sound and images of answers")
    ] = Path(),
    params: Annotated[
        list[str] | None, typer.Option("--param", metavar="KEY=VALUE", help="a parameter of the model; repeatable")
    ] = None,
    is_literal: Annotated[
        bool, typer.Option("--literal", help="send each line as it is, without commands and @FILE")
    ] = False,
    keeps_history: Annotated[
        bool, typer.Option("--history/--no-history", help="keep typed lines for the next start")
    ] = True,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help=f"API key for a gateway or a deployment of another host; also {KEY_VARIABLE}"),
    ] = None,
) -> None:
    """Talk with a model in the terminal.

    /help lists the commands. Lines of a pipe are messages: stdout has the answers alone, and the first failure ends the
    command with its exit code. It ends with 0 after /quit, Ctrl-D and the end of the input, and with 130 after Ctrl-C,
    which has to come twice in a terminal.
    """
    printer = Printer.of(ctx)
    if is_played:
        required_player()
    if not out.is_dir():
        raise ConfigError(f"{out} is not a folder", hint=f"mkdir -p {out}", file=str(out), key="out")
    talk = ChatMessages() if load is None else read_conversation(load)
    talk.system = talk.system if system is None else system
    with served(printer.options, target, api_key, printer, url=url, model=model) as server:
        check_chat(server)
        models = tuple(Card.of(facts) for facts in server.client.models())
        settings = ChatSettings(card=server.card, voice=voice)
        settings.params = parse_params(params or [])
        if tools is not None:
            settings.check("tools", "tools")
            settings.tools = read_tools(tools)
        if schema is not None:
            settings.check("structured_outputs", "answers that are held to a schema")
            settings.format = read_schema(schema)
        if is_spoken:
            settings.set_outputs(["text", "audio"] if "text" in settings.card.outputs else ["audio"])
        warn_once(settings.card.notice, server.run, printer)
        is_terminal = is_interactive()
        options = ChatOptions(
            is_terminal=is_terminal,
            player=find_player() if is_played or (is_played is None and is_terminal) else None,
            folder=out,
            is_literal=is_literal,
            keeps_history=keeps_history,
        )
        state = ChatState(talk=talk, settings=settings, models=models, saved=load)
        ChatSession(server.client, state, printer, options).run()


def check_chat(server: Server) -> None:
    """Raise UsageError for a deployment without a chat route."""
    if CHAT_ROUTE not in server.card.routes:
        raise UsageError(
            f"{server.name} has no chat: its model maps no chat route",
            f"its routes: {', '.join(server.card.routes)}",
            f'mstarctl call {server.name} --text "Hello there"',
        )
