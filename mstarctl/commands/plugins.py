"""`mstarctl plugins`: lists, checks and creates plugins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from mstar_core.errors import ExitCode
from mstar_core.plugin.loader import plugin_entries
from mstarctl.complete import plugin_names
from mstarctl.output import Column, Printer

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="List, check and create plugins."
)

LISTED = (
    Column("NAME", "name"),
    Column("DISTRIBUTION", "distribution"),
    Column("VERSION", "version"),
    Column("MODELS", "models"),
    Column("STATE", "state_text"),
    Column("IMPORT MS", "import_ms", is_wide=True, is_right=True),
    Column("MODULE", "module", is_wide=True),
)
NAMED = (Column("NAME", "name"), Column("DISTRIBUTION", "distribution"), Column("VERSION", "version"))
CHECKED = (
    Column("CHECK", "name"),
    Column("GRADE", "grade"),
    Column("RESULT", "outcome"),
    Column("MODEL", "model"),
    Column("", "detail"),
)


@app.command("ls")
def list_plugins(
    ctx: typer.Context,
    is_names: Annotated[bool, typer.Option("--names", help="read only metadata; import nothing")] = False,
) -> None:
    """List the installed plugins and their state."""
    printer = Printer.of(ctx)
    empty = "no plugin is installed; try: pip install mstar-orpheus"
    if is_names:
        items = [{"name": e.name, "distribution": e.distribution, "version": e.version} for e in plugin_entries()]
        printer.items("plugin", items, NAMED, empty=empty)
        return
    from mstarctl.plugins import Plugins

    printer.items("plugin", [summary(item) for item in Plugins.discover().loaded], LISTED, empty=empty)


def summary(item: Any) -> dict[str, Any]:
    """Return one plugin as `plugins ls` lists it. item: a Loaded."""
    entry, problem = item.entry, item.problem
    facts = {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "module": entry.target,
        "state": item.state,
    }
    return {
        **facts,
        "models": [spec.name for spec in item.models],
        "state_text": item.text,
        "heavy": list(item.heavy),
        "import_ms": round(item.import_s * 1000, 1),
        "problem": None
        if problem is None
        else {
            "phase": problem.phase,
            "cause": problem.cause,
            "file": problem.file,
            "detail": problem.detail,
            "hint": problem.hint,
        },
    }


@app.command("info")
def plugin_info(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="plugin or distribution", autocompletion=plugin_names)],
) -> None:
    """Show one plugin: version, requirements, models; with --debug also the traceback of a broken one."""
    describe_plugin(name, Printer.of(ctx))


def describe_plugin(name: str, printer: Printer) -> None:
    """Print one plugin. Raises NotFound with the nearest name."""
    from mstarctl.plugins import Plugins

    item = Plugins.discover().plugin(name)
    facts = {**summary(item), "requires": list(item.entry.requires)}
    lines = [
        f"{item.entry.name}  {item.entry.distribution} {item.entry.version}  {item.text}",
        f"  module    {item.entry.target}",
    ]
    lines += [f"  requires  {line}" for line in item.entry.requires]
    lines += [f"  model     {spec.name}  {spec.title}" for spec in item.models]
    if item.problem is not None:
        lines += [f"  in        {item.problem.file}"] if item.problem.file else []
        lines += [f"  {line}" for line in item.problem.detail.splitlines()]
        if printer.options.debug:
            lines += item.problem.trace.splitlines()
    printer.item("plugin", facts, lines)


@app.command("check")
def check_plugin(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="plugin or distribution", autocompletion=plugin_names)],
) -> None:
    """Run the conformance checks and print the grade; exit 3 if one fails.

    -v shows what the engines log, injected faults included; --debug also the traceback of each failed check.
    """
    from mstarctl.authoring.checks import facts_of, grade_of, run_checks, tracebacks

    printer = Printer.of(ctx)
    if not (printer.options.verbose or printer.options.debug):
        # The checks inject faults, and the engines log each with its traceback.
        logging.getLogger().addHandler(logging.NullHandler())
    results = run_checks(name)
    grade = grade_of(results)
    if printer.is_machine and printer.format != "name":
        printer.data(
            {
                "kind": "check",
                "plugin": name,
                "grade": grade,
                "items": [facts_of(result) for result in results],
                "truncated": 0,
            }
        )
    else:
        printer.items("check", [facts_of(result) for result in results], CHECKED)
        skipped = [result.name for result in results if result.outcome == "skipped"]
        printer.say(
            f"grade: {grade or 'none yet'}"
            + (f"; skipped and not counted: {', '.join(dict.fromkeys(skipped))}" if skipped else "")
        )
    if any(result.outcome == "failed" for result in results):
        if printer.options.debug:
            printer.say("\n".join(tracebacks(results)))
        else:
            printer.say(f"  try: mstarctl plugins check {name} --debug, which shows tracebacks")
        raise typer.Exit(ExitCode.INVALID)


@app.command("new")
def new_plugin(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the distribution, such as mstar-foo")],
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="where to write it; default ./NAME")] = None,
    shape: Annotated[
        str, typer.Option(help="kind of model: llm, encdec, audio-in, tts-codec, diffusion or encoder; default a toy")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="of a toy: engine of the first node, stateless, or kv for a language model")
    ] = "stateless",
    partitions: Annotated[int, typer.Option(help="of a toy: number of partitions, joined by streams")] = 1,
) -> None:
    """Write a working plugin to start from, with a tiny checkpoint, a reference and tests."""
    from mstarctl.authoring.scaffold import write_plugin

    printer = Printer.of(ctx)
    files = write_plugin(name, folder or Path(name), engine=engine, partitions=partitions, kind=shape)
    home = folder or Path(name)
    printer.items("file", [{"name": str(path)} for path in files], (Column("WROTE", "name"),))
    printer.say(f"  try: pip install -e {home} && pytest {home}")
    model = name.removeprefix("mstar-").replace("-", "_")
    printer.say(f"       mstarctl plugins check {model}")
    printer.say(f"       mstarctl up {model}:tiny")
