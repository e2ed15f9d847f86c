"""`mstarctl cordon` and `uncordon`: take a rank out of service for new requests, and back."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer

from mstar_core.errors import UsageError
from mstarctl.client.reach import reached
from mstarctl.complete import bare, rank_words
from mstarctl.output import Printer

POLL_S: Final = 0.2

RankWords = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME] RANK",
        help="a rank; NAME is optional if only one deployment runs",
        autocompletion=rank_words,
        callback=bare,
    ),
]
"""The arguments of commands for a rank of a running deployment."""


def cordon(
    ctx: typer.Context,
    words: RankWords,
    is_waiting: Annotated[bool, typer.Option("--wait", help="return when the rank has no request")] = False,
) -> None:
    """Send a rank no new requests; those that it has finish."""
    printer = Printer.of(ctx)
    name, rank = name_and_rank(words)
    with reached(printer.options, name) as target:
        cordons = target.admin.post(f"/v1/ranks/{rank}/cordon")
        who = f"{target.name} {rank}"
        printer.say(f"rank {rank} gets no new requests; mstarctl uncordon {who} sends it some again")
        leaders = set(cordons["ranks"])
        while is_waiting and leaders <= set((head := target.admin.head())["cordoned"]):
            if leaders <= set(head["drained_ranks"]):
                printer.say(f"rank {rank} has no request")
                break
            time.sleep(POLL_S)
    _data(printer, target.name, cordons)


def uncordon(ctx: typer.Context, words: RankWords) -> None:
    """Send a rank new requests again."""
    printer = Printer.of(ctx)
    name, rank = name_and_rank(words)
    with reached(printer.options, name) as target:
        cordons = target.admin.post(f"/v1/ranks/{rank}/uncordon")
        printer.say(f"rank {rank} gets new requests again")
    _data(printer, target.name, cordons)


def name_and_rank(words: list[str]) -> tuple[str | None, int]:
    """Return the deployment's name, None without one, and the rank. Raises UsageError."""
    *names, rank = [word.removeprefix("rank/") for word in words]
    if len(names) > 1 or not (rank.isascii() and rank.isdigit()):
        raise UsageError(f"{' '.join(words)!r} is not a deployment and a rank", hint="for example: mstarctl cordon 1")
    return (names[0] if names else None), int(rank)


def _data(printer: Printer, name: str, cordons: dict[str, Any]) -> None:
    if printer.is_machine:
        printer.item("deployment", {"name": name, "cordoned": cordons["cordoned"]}, "")
