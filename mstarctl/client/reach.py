"""Connection to a deployment by NAME, --context and --socket. Used by every command for running deployments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar_core.errors import NotFound, UsageError, did_you_mean
from mstar_core.host.other_hosts.contexts import LOCAL, Context, Contexts
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client.admin import AdminClient
from mstarctl.client.deployments import Known
from mstarctl.client.gateways import running_gateways, running_here
from mstarctl.client.tunnel import forwarded, remote_items
from mstarctl.output.options import GlobalOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A reachable deployment. run: its run directory, None on another host or behind --socket.

    context: its host; None if only its socket is known.
    """

    name: str
    admin: AdminClient
    run: RunDirectory | None = None
    context: Context | None = None


def context_of(options: GlobalOptions) -> Context:
    """Return the context of a command line. Raises NotFound, and UsageError if --socket is given too."""
    if options.socket is not None:
        if options.context is not None:
            raise UsageError("--socket and --context exclude each other", hint="omit one of them")
        return Context(name=LOCAL)
    return Contexts.load().chosen(options.context)


def only_here(options: GlobalOptions, verb: str) -> None:
    """Raise UsageError if a command that works only on this host is used with another context."""
    context = context_of(options)
    if not context.is_local:
        raise UsageError(
            f"{verb} works only on this host",
            f"context {context.name!r} is in use",
            f"ssh -t {context.ssh} mstarctl {verb}, or here: mstarctl -c {LOCAL} {verb}",
        )


@contextmanager
def reached(
    options: GlobalOptions, name: str | None, *, serve: Sequence[str] = ("ls",), takes_gateways: bool = False
) -> Iterator[Reached]:
    """Connect to the running deployment called `name`, or to the only one, while the block runs.

    serve: commands of `mstarctl serve` that do for a gateway what the caller does for a deployment. takes_gateways: a
    gateway of this host is connected to as well. Raises NotFound with the nearest name, UsageError for a gateway that
    is not taken, Unreachable if its host or its supervisor does not answer.
    """
    context = context_of(options)
    if options.socket is not None:
        yield _behind(options.socket, name)
        return
    if context.is_local:
        gateway = running_gateways().get(name or "") if takes_gateways else None
        run = gateway or running_here(name, serve)
        yield Reached(name=run.name, admin=AdminClient.of(run), run=run, context=context)
        return
    if context.socket is not None:
        with forwarded(context, context.socket) as local:
            yield _behind(local, name, context)
        return
    item = chosen_item(remote_items(context), name, context)
    with forwarded(context, str(item["socket"])) as local:
        admin = AdminClient(local, str(item["name"]), through=context.name)
        yield Reached(name=str(item["name"]), admin=admin, context=context)


def known_at(options: GlobalOptions, name: str | None) -> Known:
    """Return a running deployment of any host. Raises as `reached`."""
    with reached(options, name) as target:
        snapshot = target.admin.snapshot(("children", "ranks", "nodes", "edges", "gpus", "hosts"))
        head = snapshot["deployment"]
        return Known(
            name=target.name,
            state=str(head["state"]),
            run=target.run,
            pid=int(head["pid"]),
            snapshot=snapshot,
            log_dir=Path(head["log_dir"]),
        )


def _behind(path: Path, name: str | None, context: Context | None = None) -> Reached:
    through = "" if context is None else context.name
    admin = AdminClient(path, name or str(path), through=through)
    actual = str(admin.head()["name"])
    if name is not None and name != actual:
        raise NotFound(
            f"{path} is the socket of {actual!r}, not of {name!r}",
            hint=did_you_mean(name, [actual]),
            kind="deployment",
            name=name,
        )
    return Reached(name=actual, admin=AdminClient(path, actual, through=through), context=context)


def chosen_item(items: list[dict[str, Any]], name: str | None, context: Context) -> dict[str, Any]:
    """Choose a running deployment of another host from the items of its `ps -o json`. Raises NotFound."""
    live = {str(item["name"]): item for item in items if item.get("pid") is not None and item.get("socket")}
    if name is None and len(live) == 1:
        return next(iter(live.values()))
    if name in live:
        return live[name]
    there = f"on {context.name}"
    if name is None:
        title = f"no deployment is running {there}" if not live else f"{len(live)} deployments are running {there}"
        hint = f"name one of: {', '.join(sorted(live))}" if live else f"ssh {context.ssh} mstarctl up MODEL -d"
    else:
        title = f"no deployment {name!r} is running {there}"
        hint = did_you_mean(name, live)
    raise NotFound(title, hint=hint, kind="deployment", name=name or "")
