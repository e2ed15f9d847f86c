"""`mstarctl top`: shows a deployment live. Textual is imported only for the full-screen view."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mstar_core.errors import MstarError, UsageError, did_you_mean
from mstar_core.host.run_dir import RunDirectory, deployments
from mstar_core.observe.filter import Filter
from mstarctl.client import AdminClient
from mstarctl.client.deployments import ending_of
from mstarctl.client.gateways import find_gateway, running_gateways
from mstarctl.client.reach import Reached, context_of, only_here, reached
from mstarctl.client.store import Store
from mstarctl.complete import DeploymentName, screen_names
from mstarctl.output import Printer
from mstarctl.output.errors import save_traceback
from mstarctl.output.theme import Mode, sgr
from mstarctl.top import once
from mstarctl.top.data.gateway import read_gateway
from mstarctl.top.data.host import ReadHost, here, there
from mstarctl.top.data.view import View
from mstarctl.top.drawing.glyphs import ASCII, UNICODE, Glyphs
from mstarctl.top.layout.gateway.models import models_screen
from mstarctl.top.layout.hosts.screen import host_screen
from mstarctl.top.layout.request_list import Sort
from mstarctl.top.layout.state import MODELS, PAGES, State
from mstarctl.top.saved_view import load_view, save_view
from mstarctl.top.web import DRIVER

if TYPE_CHECKING:
    from mstarctl.output.options import GlobalOptions
    from mstarctl.top.data.deployments import DeploymentSwitcher
    from mstarctl.top.data.history import History
    from mstarctl.top.data.session import Session

SSH_INTERVAL_S = 0.5
SSH_FPS = "15"
THEMES: Final = ("dark", "light", "terminal")
LEFT: Final = ""
"""Choice of none: the list was printed or left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Drawing style, and whether the terminal is remote."""

    glyphs: Glyphs
    mode: Mode
    is_remote: bool


def top(
    ctx: typer.Context,
    name: DeploymentName = None,
    is_once: Annotated[bool, typer.Option("--once", help="print the screen once and end")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="S", min=0.1, max=10, help="seconds between frames; over ssh 0.5")
    ] = 0.25,
    page: Annotated[
        str | None,
        typer.Option(
            "--view",
            metavar="V",
            help=f"the first screen, by default the last one: {', '.join(PAGES)}; {MODELS} of a gateway",
            autocompletion=screen_names,
        ),
    ] = None,
    filter_text: Annotated[
        str | None,
        typer.Option("--filter", metavar="EXPR", help="only requests that match; default: the last one"),
    ] = None,
    is_readonly: Annotated[
        bool, typer.Option("--readonly", help="no cancel, no drain, no files written by keys")
    ] = False,
    record: Annotated[Path | None, typer.Option("--record", metavar="F", help="record the frames in a file")] = None,
    replay: Annotated[Path | None, typer.Option("--replay", metavar="F", help="play a recorded file")] = None,
    speed: Annotated[float, typer.Option("--speed", metavar="N", min=1 / 16, max=64, help="speed of the replay")] = 1.0,
    is_ascii: Annotated[bool, typer.Option("--ascii", help="use no line-drawing characters")] = False,
    theme: Annotated[
        str, typer.Option("--theme", metavar="T", help=f"colours: {', '.join(THEMES)}; the terminal's own are 16")
    ] = "dark",
    is_mono: Annotated[bool, typer.Option("--mono", help="use bold and reverse instead of colours")] = False,
    has_no_mouse: Annotated[bool, typer.Option("--no-mouse", help="leave the mouse to the terminal")] = False,
    web_port: Annotated[
        int | None,
        typer.Option("--web", metavar="PORT", min=1, max=65535, help="show it in a browser of this host, read-only"),
    ] = None,
) -> None:
    """Watch a deployment live in the terminal."""
    printer = Printer.of(ctx)
    if theme not in THEMES:
        raise UsageError(f"no theme {theme!r}", hint=did_you_mean(theme, THEMES))
    if page is not None and page not in (*PAGES, MODELS):
        raise UsageError(f"no screen {page!r}", hint=did_you_mean(page, (*PAGES, MODELS)))
    if page == MODELS and replay is not None:
        raise UsageError(f"--view {MODELS} shows a running gateway", hint="omit --replay")
    if replay is not None and record is not None:
        raise UsageError("--record and --replay exclude each other", hint="a recording can be copied")
    request_filter = Filter.parse(filter_text or "", expressions=True)
    if web_port is not None:
        if is_once or record is not None or printer.is_machine:
            raise UsageError("--web shows the full screen", hint="without --once, --record and -o")
        from mstarctl.top.web import serve_top

        serve_top(sys.argv[1:], web_port)
        return
    look = look_of(printer, is_ascii=is_ascii, is_mono=is_mono, theme=theme)
    if page == MODELS:
        only_here(printer.options, f"top --view {MODELS}")
        show_gateway(find_gateway(name), printer, look, is_once=is_once)
        return
    state = State(page=page or "overview")
    if name is None and replay is None and not printer.is_machine:
        choice = _choice(printer, look, is_once=is_once)
        if choice is LEFT:
            return
        name = choice
    if name is not None and replay is None and (gateway := named_gateway(printer.options, name)) is not None:
        show_gateway(gateway, printer, look, is_once=is_once)
        return
    hz = 1 / (max(interval, SSH_INTERVAL_S) if look.is_remote else interval)
    where: AbstractContextManager[Reached | None]
    where = nullcontext() if replay is not None else reached(printer.options, name)
    with where as target:
        admin = None if target is None else target.admin
        if is_once or printer.is_machine:
            _print(printer, admin, replay, look, state, request_filter, hz=hz, is_once=is_once)
            return
        if not (DRIVER in os.environ or (sys.stdin.isatty() and sys.stdout.isatty())):
            raise UsageError("top needs a terminal", "stdin or stdout is none", "mstarctl top --once, or -o json")
        if look.is_remote:
            # Textual reads these variables at import.
            os.environ.setdefault("TEXTUAL_FPS", SSH_FPS)
            os.environ.setdefault("TEXTUAL_SMOOTH_SCROLL", "0")
            os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")

        def open_session(admin: AdminClient) -> Session:
            return _session(admin, None, look, hz=hz, speed=speed, is_readonly=is_readonly)

        if target is not None:
            saved = load_view(target.name)
            state = replace(state, page=page or saved.page, sort=Sort(key=saved.sort, is_rising=saved.is_rising))
            request_filter = Filter.parse(saved.filter if filter_text is None else filter_text, expressions=True)
        session = _session(admin, replay, look, hz=hz, speed=speed, is_readonly=is_readonly)
        session.filter = request_filter
        if record is not None:
            session.toggle_recording(record)
        _run(
            session,
            admin,
            look,
            state,
            _switcher(printer.options, open_session),
            has_mouse=not has_no_mouse,
            may_save=not is_readonly,
        )


def named_gateway(options: GlobalOptions, name: str) -> RunDirectory | None:
    """Return the running gateway of this host that is called `name`, None if there is none."""
    if options.socket is not None or not context_of(options).is_local:
        return None
    return running_gateways().get(name)


def show_gateway(run: RunDirectory, printer: Printer, look: Look, *, is_once: bool) -> None:
    """Show the models of a gateway. Raises UsageError without a terminal."""
    with AdminClient.of(run) as admin:
        gateway = read_gateway(admin)
        if printer.is_machine:
            printer.item("gateway", {"name": gateway.name, **admin.get("/v1/snapshot")}, "")
            return
        if is_once:
            size = shutil.get_terminal_size((120, 34))
            view = View(store=Store(), glyphs=look.glyphs)
            for row in once.without_gaps(models_screen(gateway, view, size.columns, 200)[:-1]):
                coloured = printer.options.is_coloured() and look.mode != "mono"
                printer.text(sgr(row, look.mode) if coloured else row.plain.rstrip())
            return
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UsageError("top needs a terminal", "stdin or stdout is none", "mstarctl top --once, or -o json")
        from mstarctl.top.gateway_app import GatewayApp

        GatewayApp(lambda: read_gateway(admin), gateway, mode=look.mode, glyphs=look.glyphs).run()


def _choice(printer: Printer, look: Look, *, is_once: bool) -> str | None:
    """Return the deployment that is chosen from several, None if there is no choice, LEFT if the list was enough."""
    options = printer.options
    if options.socket is not None:
        return None
    context = context_of(options)
    if not context.is_local and context.socket is not None:
        return None
    read: ReadHost = here if context.is_local else partial(there, context)
    is_full_screen = not is_once and sys.stdin.isatty() and sys.stdout.isatty()
    if not is_once and not is_full_screen:
        return None
    if context.is_local and sum(run.holder() is not None for run in deployments()) < 2:
        return None
    host = read()
    if len(host.deployments) < 2:
        return None
    if is_once:
        size = shutil.get_terminal_size((120, 34))
        view = View(store=Store(), glyphs=look.glyphs)
        for row in once.without_gaps(host_screen(host, view, -1, size.columns, 200)[:-1]):
            coloured = printer.options.is_coloured() and look.mode != "mono"
            printer.text(sgr(row, look.mode) if coloured else row.plain.rstrip())
        return LEFT
    from mstarctl.top.host_app import HostApp

    return HostApp(read, host, mode=look.mode, glyphs=look.glyphs).run() or LEFT


def look_of(printer: Printer, *, is_ascii: bool, is_mono: bool, theme: str = "dark") -> Look:
    """Choose the style from flags and environment: truecolour if the terminal declares it, else 16 colours."""
    depth = os.environ.get("COLORTERM", "").lower()
    term = os.environ.get("TERM", "")
    is_plain = is_mono or not printer.options.color or bool(os.environ.get("NO_COLOR")) or term in ("dumb", "vt100")
    is_deep = depth in ("truecolor", "24bit") or "256color" in term or "direct" in term
    deep: Mode = "light" if theme == "light" else "true"
    mode: Mode = "mono" if is_plain else deep if is_deep and theme != "terminal" else "ansi"
    needs_ascii = is_ascii or (sys.stdout.encoding or "").lower().replace("-", "") not in ("utf8", "utf16")
    is_remote = bool(os.environ.get("SSH_CONNECTION"))
    if DRIVER in os.environ:
        mode = "mono" if is_plain else deep
    return Look(glyphs=ASCII if needs_ascii else UNICODE, mode=mode, is_remote=is_remote)


def _session(
    admin: AdminClient | None, replay: Path | None, look: Look, *, hz: float, speed: float, is_readonly: bool
) -> Session:
    from mstarctl.top.data.feed import Feed, LogFeed
    from mstarctl.top.data.recording import read_recording
    from mstarctl.top.data.session import LiveSession, ReplaySession

    if replay is not None or admin is None:
        return ReplaySession(read_recording(replay or Path()), speed=speed, glyphs=look.glyphs)
    feed = Feed(admin, hz, ending=partial(ending_of, admin.run))
    return LiveSession(feed, LogFeed(admin), glyphs=look.glyphs, readonly=is_readonly, hz=hz)


def _switcher(options: GlobalOptions, open_session: Callable[[AdminClient], Session]) -> DeploymentSwitcher:
    from mstarctl.top.data.deployments import DeploymentSwitcher

    return DeploymentSwitcher(options, open_session)


def _run(
    session: Session,
    admin: AdminClient | None,
    look: Look,
    state: State,
    switcher: DeploymentSwitcher,
    *,
    has_mouse: bool,
    may_save: bool,
) -> None:
    from mstarctl.top.app import TopApp
    from mstarctl.top.data.queries import DeploymentQueries

    app = TopApp(
        session,
        DeploymentQueries(admin, session),
        mode=look.mode,
        state=state,
        is_animated=not look.is_remote,
        switcher=switcher if session.is_live else None,
        may_save=may_save,
    )
    with switcher:
        try:
            app.run(mouse=has_mouse)
        finally:
            app.session.stop()
    shown = app.session.view().store.deployment.name
    if may_save and session.is_live and shown:
        save_view(shown, app.saved_view())
    if isinstance(app.failure, MstarError):
        raise app.failure
    if app.failure is not None:
        raise crashed(app.failure, app.session)


def crashed(error: Exception, session: Session) -> MstarError:
    """Return the error of a crashed screen, with a file of the traceback and the last snapshot."""
    from mstarctl.top.export import snapshot_json

    path = save_traceback(error)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\nThe last snapshot:\n{snapshot_json(session.view())}")
    log = {} if path is None else {"log": str(path)}
    detail = f"{type(error).__name__}: {error}"
    return MstarError("top has ended by a bug of its own", detail, "report the saved traceback and snapshot", **log)


def _print(
    printer: Printer,
    admin: AdminClient | None,
    replay: Path | None,
    look: Look,
    state: State,
    request_filter: Filter,
    *,
    hz: float,
    is_once: bool,
) -> None:
    if not is_once and admin is not None:
        if printer.format != "json":
            raise UsageError(f"top -o {printer.format} prints one picture", hint="add --once, or use -o json")
        for line in once.raw_frames(admin, hz, request_filter.text):
            printer.text(line, is_flushed=True)
        return
    store, history = _pictured(admin, replay)
    if printer.is_machine:
        item: dict[str, Any] = {"name": store.deployment.name, **_builtins(store)}
        printer.item("snapshot", item, "")
        return
    from mstarctl.top.data.queries import DeploymentQueries
    from mstarctl.top.data.view import Link

    link = Link(state="replay", progress=1.0) if replay is not None else Link(hz=hz)
    logs = once.log_lines(admin) if admin is not None and state.page == "logs" else ()
    tests = DeploymentQueries(admin, None).recordings() if admin is not None and state.page == "bench" else ()
    view = View(
        store=store,
        history=history,
        glyphs=look.glyphs,
        filter=request_filter,
        link=link,
        logs=logs,
        recordings=tests,
    )
    size = shutil.get_terminal_size((120, 34))
    is_terminal = sys.stdout.isatty()
    for row in once.screen_lines(view, state, size.columns, size.lines - 1 if is_terminal else None):
        plain = row.plain.rstrip()
        printer.text(sgr(row, look.mode) if printer.options.is_coloured() and look.mode != "mono" else plain)


def _pictured(admin: AdminClient | None, replay: Path | None) -> tuple[Store, History]:
    from mstarctl.top.data.history import History
    from mstarctl.top.data.recording import read_recording

    if replay is not None or admin is None:
        return once.last_state(read_recording(replay or Path()))
    return once.first_state(admin), History()


def _builtins(store: Store) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(store.snapshot(events=200), enc_hook=str)
    return plain
