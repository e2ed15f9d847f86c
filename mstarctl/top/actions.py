"""Actions of keys beyond navigation: dialogs, confirmed calls, other deployments, files. Called by the app."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from mstar_core.errors import MstarError
from mstarctl.output.line import Line, cells, line, safe
from mstarctl.output.theme import Mode
from mstarctl.top import navigation
from mstarctl.top.data.deployments import OtherDeployment, Switcher
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.session import Session
from mstarctl.top.data.view import View
from mstarctl.top.export import FORMS, export, perfetto, save
from mstarctl.top.keys import Key
from mstarctl.top.layout import dialogs
from mstarctl.top.layout.state import State
from mstarctl.top.widgets.dialog import Dialog

T = TypeVar("T")

Find = Callable[[View], msgspec.Struct | None]
"""Returns an object of a view, None if it is gone."""

SELECT_FIRST: Final = "select a request first, with the arrow keys"


class Host(Protocol):
    """The part of the app that actions use."""

    session: Session
    queries: DeploymentQueries
    mode: Mode
    state: State
    folder: Path
    switcher: Switcher | None

    @property
    def lines(self) -> list[Line]: ...

    def view(self) -> View: ...
    def active_keys(self) -> list[Key]: ...
    def show_notice(self, text: str, *, is_error: bool = False) -> None: ...
    def open_dialog(self, dialog: Dialog, then: Callable[[str], None] | None = None) -> None: ...
    def in_background(self, work: Callable[[], T], then: Callable[[T], None], group: str) -> None: ...
    def switch_to(self, session: Session, queries: DeploymentQueries) -> None: ...
    def copy_to_clipboard(self, text: str) -> None: ...


def error_text(error: MstarError) -> str:
    """Return an error in one line."""
    return "; ".join(part for part in (error.title, error.detail, error.hint) if part)


def _dialog(app: Host, title: str, rows: Callable[[int], Sequence[Line]], **options: Any) -> Dialog:
    return Dialog(title, rows, app.session.glyphs, app.mode, **options)


def open_help(app: Host) -> None:
    """Show the active keys."""
    keys = app.active_keys()
    app.open_dialog(_dialog(app, "active keys", lambda width: dialogs.help_rows(keys, width)))


def describe(app: Host) -> None:
    """Show all fields of the selected object as they change; its last ones once it is gone."""
    name, find = selection(app)
    kept = [subject for subject in [find(app.view())] if subject is not None]

    def rows(width: int) -> list[Line]:
        view = app.view()
        subject = find(view)
        kept[:] = kept if subject is None else [subject]
        drawn = dialogs.fields_rows(view, kept[0], width)
        return drawn if subject is not None else [line(("no longer shown", "warn")), *drawn]

    app.open_dialog(_dialog(app, name, rows, is_live=True))


def show_json(app: Host) -> None:
    """Show the selected object as JSON; `c` copies it."""
    name, item = selected(app)
    text = msgspec.json.format(msgspec.json.encode(item, enc_hook=str)).decode()

    def copy(key: str) -> bool:
        if key == "c":
            app.copy_to_clipboard(text)
        return key == "c"

    hint = "c copy   esc close"
    app.open_dialog(_dialog(app, name, lambda width: dialogs.json_rows(item, width), hint=hint, on_key=copy))


def selected(app: Host) -> tuple[str, msgspec.Struct]:
    """Return (kind/name, object) of the selected request, node, rank or event; else of the deployment."""
    name, find = selection(app)
    return name, find(app.view()) or app.view().store.deployment


def selection(app: Host) -> tuple[str, Find]:
    """Return kind/name of the selected object, and a function that finds it in a view; None if it is gone."""
    view, state = app.view(), app.state
    store = view.store
    key = navigation.selected_request(view, state)
    if key is not None:
        return f"request/{safe(store.requests[key].id)}", lambda view: view.store.requests.get(key)
    if state.page == "graph" and state.node:
        at = next((key for key, node in store.nodes.items() if node.name == state.node), None)
        if at is not None:
            return f"node/{safe(state.node)}", lambda view: view.store.nodes.get(at)
    rank = state.rank
    if rank in store.ranks and (state.page == "ranks" or (state.page, state.panel) == ("overview", "ranks")):
        return f"rank/{rank}", lambda view: view.store.ranks.get(str(rank))
    event = next((e for e in store.events if state.page == "events" and str(e.n) == state.events.cursor), None)
    if event is not None:
        return f"event/{event.n}", lambda view: event
    return f"deployment/{safe(store.deployment.name)}", lambda view: view.store.deployment


def copy_id(app: Host) -> None:
    """Copy the id of the selected request to the clipboard."""
    view = app.view()
    key = navigation.selected_request(view, app.state)
    if key is None:
        app.show_notice(SELECT_FIRST)
        return
    app.copy_to_clipboard(view.store.requests[key].id)
    app.show_notice(f"copied {view.store.requests[key].id}")


# -- confirmed calls ----------------------------------------------------------------------------------------------


def ask_cancel(app: Host) -> None:
    """Cancel the selected request after a confirmation."""
    view = app.view()
    key = navigation.selected_request(view, app.state)
    if key is None:
        app.show_notice(SELECT_FIRST)
        return
    request = view.store.requests[key]
    if request.has_ended:
        app.show_notice(f"{request.id} has already ended")
        return
    question = f"Cancel {request.id}? It ends now and its pages are freed."
    _confirm(app, question, "cancel it", lambda: app.queries.cancel(request))


def ask_drain(app: Host) -> None:
    """Drain the deployment, or let it accept requests again, after a confirmation."""
    head = app.view().store.deployment
    if head.state == "draining":
        _confirm(app, f"Let {head.name} accept requests again?", "resume", lambda: app.queries.drain(True))
        return
    open_requests = head.running + head.waiting
    question = f"Drain {head.name}? It refuses new requests; {open_requests} in flight continue."
    _confirm(app, question, "drain", lambda: app.queries.drain(False))


def _confirm(app: Host, question: str, yes: str, act: Callable[[], str]) -> None:
    answers = (("y", yes), ("n", "leave it"))
    dialog = _dialog(
        app,
        "confirm",
        lambda width: dialogs.question_rows(question, answers, width),
        answers={"y": "yes", "n": ""},
        hint="y or n",
    )
    app.open_dialog(dialog, lambda word: app.in_background(act, app.show_notice, "act") if word == "yes" else None)


# -- other deployments --------------------------------------------------------------------------------------------

NAMES: Final = "123456789abdefgh"
"""Keys of a list of choices, without the keys that scroll or close a dialog."""


def ask_other(app: Host) -> None:
    """List the other running deployments, and switch to the chosen one."""
    switcher = app.switcher
    if switcher is None:
        app.show_notice("a replay shows one deployment; start top without --replay to see others")
        return
    app.in_background(switcher.running, lambda others: _choose_other(app, switcher, others), "others")


def _choose_other(app: Host, switcher: Switcher, others: Sequence[OtherDeployment]) -> None:
    here = app.view().store.deployment.name
    names = [other for other in others if other.name != here]
    if not names:
        app.show_notice("no other deployment is running; start one with: mstarctl up MODEL -d --name NAME")
        return
    shown = list(zip(NAMES, names, strict=False))
    wide = max(cells(other.name) for other in names) + 2

    def rows(width: int) -> list[Line]:
        return dialogs.other_rows(here, shown, len(names), wide, app.view(), width)

    def go(name: str) -> None:
        if name:
            app.show_notice(f"switching to {name}")
            app.in_background(lambda: switcher.go(name), lambda opened: app.switch_to(*opened), "others")

    answers = {key: other.name for key, other in shown}
    app.open_dialog(_dialog(app, "go to", rows, answers=answers, hint="a key, or esc to stay"), go)


# -- files --------------------------------------------------------------------------------------------------------


def ask_export(app: Host) -> None:
    """Ask for a form, then write a file to the folder in which top was started."""
    forms = [(key, doc) for key, _, doc in FORMS]

    def write(form: str) -> None:
        if form:
            _write(app, lambda: export(form, app.view(), app.state.sort, app.lines, app.folder))

    dialog = _dialog(
        app,
        "write a file",
        lambda width: dialogs.question_rows(f"In {app.folder}:", forms, width),
        answers={key: form for key, form, _ in FORMS},
    )
    app.open_dialog(dialog, write)


def write_perfetto(app: Host) -> None:
    """Write the spans of the open request for Perfetto."""
    trace = app.state.trace
    if trace is None or not trace.lanes:
        app.show_notice("this request has no recorded spans")
        return
    _write(app, lambda: save(app.folder, app.view(), "trace", "json", perfetto(trace.request, trace.lanes)))


def _write(app: Host, write: Callable[[], Path]) -> None:
    try:
        app.show_notice(f"wrote {write()}")
    except MstarError as error:
        app.show_notice(error_text(error), is_error=True)


def toggle_recording(app: Host) -> None:
    """Start a recording under the first free name, or end the running one."""
    name = app.view().store.deployment.name or "mstar"
    number = 1
    while (path := app.folder / f"{name}-{number}.mstar.gz").exists():
        number += 1
    try:
        app.show_notice(app.session.toggle_recording(path))
    except MstarError as error:
        app.show_notice(error_text(error), is_error=True)
