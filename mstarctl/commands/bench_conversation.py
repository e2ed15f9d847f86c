"""`mstarctl bench conversation`: a load of spoken conversations over /v1/realtime."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mstar_core.errors import ConfigError, ExitCode, UsageError
from mstarctl.complete import ServedName
from mstarctl.output import Printer
from mstarctl.output.durations import parse_duration

if TYPE_CHECKING:
    from mstarctl.commands.call import Server
    from mstarctl.talk.turns import SoundTurn

SPREADS: Final = ("first_audio", "gap", "interrupt", "lag")
COUNTS: Final = ("underruns", "false_starts", "unanswered", "errors")


def conversation(
    ctx: typer.Context,
    target: ServedName = None,
    url: Annotated[str | None, typer.Option("--url", help="any server with /v1/realtime, in place of NAME")] = None,
    sessions: Annotated[int, typer.Option("--sessions", min=1, help="conversations at once")] = 1,
    turns: Annotated[int, typer.Option("--turns", min=1, help="spoken turns of each")] = 8,
    interrupts: Annotated[
        float, typer.Option("--interrupts", min=0, max=1, help="share of answers that the next turn interrupts")
    ] = 0.25,
    files: Annotated[
        list[Path] | None,
        typer.Option("--in", metavar="FILE", help="WAV file of a turn; repeatable; default: the model's samples"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="draws sounds, pauses and interrupts")] = 0,
    timeout: Annotated[str, typer.Option("--timeout", help="of one answer")] = "30s",
    api_key: Annotated[str | None, typer.Option("--api-key", help="also MSTAR_API_KEY")] = None,
) -> None:
    """Measure spoken conversations: microphones that stay open, pauses, interrupts.

    The server finds the turns, so it needs the extra realtime. Exits with 8 if no turn was answered.
    """
    from mstarctl.bench.conversation.client import converse
    from mstarctl.bench.conversation.figures import DEFINITIONS, figures
    from mstarctl.bench.conversation.plan import planned
    from mstarctl.commands.call import served
    from mstarctl.talk.turns import read_turn

    printer = Printer.of(ctx)
    timeout_s = parse_duration(timeout, "--timeout")
    sounds = [read_turn(path) for path in files or ()]
    with served(printer.options, target, api_key, printer, url=url) as server:
        if not {"audio"} <= set(server.card.inputs) or "audio" not in server.card.outputs:
            raise UsageError(
                f"{server.card.name} does not hear and speak",
                f"inputs: {', '.join(server.card.inputs)}; outputs: {', '.join(server.card.outputs)}",
                "mstarctl bench run measures other requests",
            )
        sounds = sounds or _sampled(server)
        plans = planned(sounds, sessions=sessions, turns=turns, interrupt_share=interrupts, seed=seed)
        printer.say(f"{sessions * turns} turns in {sessions} conversations at once")
        outcomes = asyncio.run(converse(server.address, server.card.name, plans, timeout_s))
    found = figures(outcomes)
    for message in dict.fromkeys(error for outcome in outcomes for error in outcome.errors):
        printer.warn(message)
    if printer.is_machine:
        printer.data({"kind": "conversations", "seed": seed, "figures": found, "definitions": dict(DEFINITIONS)})
    else:
        for line in _lines(found):
            printer.text(line)
    if found["unanswered"] == found["turns"]:
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


def _lines(found: dict[str, Any]) -> list[str]:
    """Return the figures as a table."""
    lines = [f"{'ms':<14}{'n':>6}{'p50':>10}{'p95':>10}{'max':>10}"]
    for name in SPREADS:
        values = found[name]
        cells = "".join(f"{values[key]:>10.1f}" if key in values else f"{'-':>10}" for key in ("p50", "p95", "max"))
        lines.append(f"{name:<14}{values['n']:>6}{cells}")
    lines += [f"{name:<14}{found[name]:>6}" for name in COUNTS]
    cached = "-" if found["cached"] is None else f"{100 * found['cached']:.0f}%"
    return [*lines, f"{'cached':<14}{cached:>6}"]
