"""`mstarctl context`: manages names of other hosts, which are reached through ssh."""

from __future__ import annotations

from typing import Annotated

import typer

from mstar_core.host.other_hosts.contexts import Context, Contexts, contexts_file
from mstarctl.complete import context_names
from mstarctl.output import Column, Printer

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Name other hosts and choose one."
)

COLUMNS = (
    Column("NAME", "name"),
    Column("IN USE", "in_use"),
    Column("SSH", "ssh"),
    Column("SOCKET", "socket"),
)
Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=context_names)]


@app.command("ls")
def list_contexts(ctx: typer.Context) -> None:
    """List the named hosts."""
    contexts = Contexts.load()
    Printer.of(ctx).items("context", [_item(item, contexts.current) for item in contexts.all()], COLUMNS)


def _item(context: Context, current: str) -> dict[str, object]:
    return {
        "name": context.name,
        "in_use": context.name == current,
        "ssh": context.ssh,
        "socket": context.socket,
    }


@app.command("add")
def add_context(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the host")],
    ssh: Annotated[str, typer.Option("--ssh", metavar="USER@HOST", help="destination for ssh")],
    socket: Annotated[
        str | None, typer.Option("--socket", metavar="THERE", help="the admin socket there; default: found through ssh")
    ] = None,
) -> None:
    """Name a host that ssh can reach; no connection is made."""
    Contexts.load().added(Context(name=name, ssh=ssh, socket=socket)).save()
    printer = Printer.of(ctx)
    printer.say(f"added {name}; use it once: mstarctl -c {name} ps    or by default: mstarctl context use {name}")


@app.command("use")
def use_context(ctx: typer.Context, name: Name) -> None:
    """Use this host by default; `local` is this one."""
    contexts = Contexts.load()
    contexts.get(name)
    Contexts(current=name, remote=contexts.remote).save()
    Printer.of(ctx).say(f"{name} is in use")


@app.command("show")
def show_context(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="default: the one in use", autocompletion=context_names)
    ] = None,
) -> None:
    """Show one context; by default the one in use."""
    contexts = Contexts.load()
    item = _item(contexts.chosen(name), contexts.current)
    lines = [f"{item['name']}{'  in use' if item['in_use'] else ''}"]
    lines += [f"  ssh     {item['ssh']}" if item["ssh"] else "  this host"]
    lines += [f"  socket  {item['socket']}"] if item["socket"] else []
    lines += [f"  file    {contexts_file()}"]
    Printer.of(ctx).item("context", item, lines)


@app.command("rm")
def remove_context(ctx: typer.Context, name: Name) -> None:
    """Remove a context."""
    Contexts.load().removed(name).save()
    Printer.of(ctx).say(f"removed {name}")
