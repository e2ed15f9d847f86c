"""`mstarctl bench conversation`: a load of spoken conversations over /v1/realtime."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mstar_core.errors import ConfigError, ExitCode, UsageError
from mstarctl.complete import ServedName
from mstarctl.output import Printer
from mstarctl.output.durations import parse_duration
from mstarctl.output.units import counted

if TYPE_CHECKING:
    from mstarctl.commands.call import Server
    from mstarctl.talk.turns import SoundTurn

DEFAULT_TURNS: Final = 8


def conversation(
    ctx: typer.Context,
    target: ServedName = None,
    url: Annotated[
        str | None, typer.Option("--url", help="any server with /v1/realtime; NAME is then a model of it")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="a model of a gateway; optional if it has only one")
    ] = None,
    sessions: Annotated[int, typer.Option("--sessions", min=1, help="conversations at once")] = 1,
    turns: Annotated[int | None, typer.Option("--turns", min=1, help="spoken turns of each  [default: 8]")] = None,
    duration: Annotated[
        str | None, typer.Option("--duration", help="in place of --turns: no turn begins after this time")
    ] = None,
    interrupts: Annotated[
        float, typer.Option("--interrupts", min=0, max=1, help="share of answers that the next turn interrupts")
    ] = 0.25,
    files: Annotated[
        list[Path] | None,
        typer.Option("--in", metavar="FILE", help="WAV file of a turn; repeatable; default: the model's samples"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="draws sounds, pauses and interrupts")] = 0,
    timeout: Annotated[str, typer.Option("--timeout", help="of one answer")] = "30s",
    params: Annotated[
        list[str] | None, typer.Option("--param", metavar="KEY=VALUE", help="a parameter of the model; repeatable")
    ] = None,
    asserts: Annotated[
        str | None,
        typer.Option("--assert", metavar="TERMS", help='"p50.first_audio<300ms, underruns<=0"; else exit 8'),
    ] = None,
    allow_few: Annotated[bool, typer.Option("--allow-few", help="assert percentiles of few samples too")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="folder of the result")] = None,
    label: Annotated[str, typer.Option("--label", help="name of the run in its result")] = "",
    api_key: Annotated[str | None, typer.Option("--api-key", help="also MSTAR_API_KEY")] = None,
) -> None:
    """Measure spoken conversations: microphones that stay open, pauses, interrupts.

    The server finds the turns, so it needs the extra realtime. Exits with 8 if no turn was answered or an assertion
    fails.
    """
    from mstarctl.bench.conversation.client import Conversations
    from mstarctl.bench.conversation.figures import DEFINITIONS, METRICS, by_metric, figures
    from mstarctl.bench.conversation.memory import reading_memory
    from mstarctl.bench.conversation.plan import planned
    from mstarctl.bench.conversation.stored import KIND, lines_of, places_of, reserve, store
    from mstarctl.bench.environment import deployment_facts, host_environment
    from mstarctl.bench.measure.terms import judge, parse_terms
    from mstarctl.call.ask import parse_params
    from mstarctl.client.admin import AdminClient
    from mstarctl.commands.call import served
    from mstarctl.talk.turns import read_turn

    printer = Printer.of(ctx)
    if turns is not None and duration is not None:
        raise UsageError("--turns and --duration exclude each other", hint="choose one of them")
    terms = parse_terms(asserts or "", "--assert", is_goal=False, known=METRICS)
    timeout_s = parse_duration(timeout, "--timeout")
    duration_s = None if duration is None else parse_duration(duration, "--duration")
    count = turns or (DEFAULT_TURNS if duration_s is None else None)
    sounds = [read_turn(path) for path in files or ()]
    fields = parse_params(params or [])
    with served(printer.options, target, api_key, printer, url=url, model=model) as server:
        if not {"audio"} <= set(server.card.inputs) or "audio" not in server.card.outputs:
            raise UsageError(
                f"{server.card.name} does not hear and speak",
                f"inputs: {', '.join(server.card.inputs)}; outputs: {', '.join(server.card.outputs)}",
                "mstarctl bench run measures other requests",
            )
        sounds = sounds or _sampled(server)
        partial = None if out is None else reserve(out)
        plans = [
            planned(sounds, session=number, turns=count, interrupt_share=interrupts, seed=seed)
            for number in range(sessions)
        ]
        length = f"{duration} long" if count is None else f"{counted(count, 'turn')} each"
        printer.say(f"{counted(sessions, 'conversation')} at once, {length}")
        held = Conversations(
            address=server.address,
            model=server.card.name,
            timeout_s=timeout_s,
            turns=count or 0,
            duration_s=duration_s,
            params=fields,
        )
        admin = None if server.run is None else AdminClient.of(server.run)
        with reading_memory(admin) as memory:
            outcomes = asyncio.run(held.hold(plans))
        where = {"url": server.address.url, "model": server.card.name}
        environment = {**host_environment(), "server": where if admin is None else {**where, **deployment_facts(admin)}}
    found = {**figures(outcomes), "memory_growth": memory.growth}
    judged = [judge(term, by_metric(found), allows_few=allow_few) for term in terms]
    facts: dict[str, Any] = {
        "kind": KIND,
        "label": label,
        "seed": seed,
        "interrupts": interrupts,
        "params": fields,
        "duration_s": duration_s,
        "figures": found,
        "memory": places_of(memory.facts()),
        "asserts": [dataclasses.asdict(one) for one in judged],
        "definitions": dict(DEFINITIONS),
    }
    for message in dict.fromkeys(error for outcome in outcomes for error in outcome.errors):
        printer.warn(message)
    if out is not None and partial is not None:
        printer.say(f"result: {store(partial, out, facts, outcomes, environment, memory.facts())}")
    if printer.is_machine:
        printer.data(facts)
    else:
        for line in lines_of(facts):
            printer.text(line)
    if found["unanswered"] == found["turns"] or not all(one.holds for one in judged):
        raise typer.Exit(ExitCode.ASSERTION)


def _sampled(server: Server) -> list[SoundTurn]:
    """Return the WAV files of the model's samples. Raises UsageError without any."""
    from mstarctl.talk.turns import turn_of

    sounds = []
    for sample in server.client.samples():
        for (name, data), kind in zip(sample.files, sample.kinds, strict=True):
            if kind != "audio":
                continue
            try:
                sounds.append(turn_of(Path(name), data))
            except ConfigError:
                continue  # of another format; one WAV file is enough
    if not sounds:
        raise UsageError("the model has no spoken samples as WAV files", hint="--in FILE.wav")
    return sounds
