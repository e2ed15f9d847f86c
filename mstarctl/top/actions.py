"""What keys do beyond the picture: sheets, questions that are asked first, files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from mstar_core.errors import MstarError
from mstarctl.top import navigation
from mstarctl.top.drawing.line import Line, cells, safe
from mstarctl.top.export import FORMS, export, perfetto, save
from mstarctl.top.layout import dialogs
from mstarctl.top.widgets.dialog import Dialog

if TYPE_CHECKING:
    from mstarctl.top.app import TopApp
    from mstarctl.top.data.deployments import OtherDeployment


def open_help(app: TopApp) -> None:
    """The keys that are active."""
    keys = app.active_keys()
    _open(
        app, Dialog("keys that work here", lambda width: dialogs.help_rows(keys, width), app.session.glyphs, app.mode)
    )


def describe(app: TopApp) -> None:
    """Every field of what is marked."""
    name, item = marked(app)
    _open(app, Dialog(name, lambda width: dialogs.fields_rows(item, width), app.session.glyphs, app.mode))


def show_json(app: TopApp) -> None:
    """What is marked, as JSON; `c` copies it."""
    name, item = marked(app)
    text = msgspec.json.format(msgspec.json.encode(item, enc_hook=str)).decode()

    def copy(key: str) -> bool:
        if key == "c":
            app.copy_to_clipboard(text)
        return key == "c"

    rows = lambda width: dialogs.json_rows(item, width)  # noqa: E731  as the other sheets
    _open(app, Dialog(name, rows, app.session.glyphs, app.mode, hint="c copy   esc close", on_key=copy))


def marked(app: TopApp) -> tuple[str, msgspec.Struct]:
    """(kind/name, what keys are about): the marked request, node, rank or event; else the deployment."""
    view, state = app.view(), app.state
    store = view.store
    key = navigation.marked_request(view, state)
    if key is not None:
        return f"request/{safe(store.requests[key].id)}", store.requests[key]
    if state.page == "graph" and state.node:
        node = next((node for node in store.nodes.values() if node.name == state.node), None)
        if node is not None:
            return f"node/{safe(node.name)}", node
    if state.rank in store.ranks and (state.page == "ranks" or (state.page, state.panel) == ("overview", "ranks")):
        return f"rank/{state.rank}", store.ranks[str(state.rank)]
    event = next((e for e in store.events if state.page == "events" and str(e.n) == state.events.cursor), None)
    if event is not None:
        return f"event/{event.n}", event
    return f"deployment/{safe(store.deployment.name)}", store.deployment


def copy_id(app: TopApp) -> None:
    """The id of the marked request to the clipboard."""
    key = navigation.marked_request(app.view(), app.state)
    if key is None:
        app.tell("mark a request first, with the arrows")
        return
    request = app.view().store.requests[key]
    app.copy_to_clipboard(request.id)
    app.tell(f"copied {request.id}")


# -- questions ----------------------------------------------------------------------------------------------------


def ask_cancel(app: TopApp) -> None:
    """Cancel the marked request, once that is said twice."""
    view = app.view()
    key = navigation.marked_request(view, app.state)
    if key is None:
        app.tell("mark a request first, with the arrows")
        return
    request = view.store.requests[key]
    if request.has_ended:
        app.tell(f"{request.id} has ended already")
        return
    question = f"Cancel {request.id}? It ends now and its pages are freed."
    _ask(app, question, "cancel it", "leave it", lambda: app.asking.cancel(request))


def ask_drain(app: TopApp) -> None:
    """Drain the deployment, or let it take requests again."""
    head = app.view().store.deployment
    is_draining = head.state == "draining"
    question = f"Drain {head.name}? It takes no new requests; {head.running + head.waiting} in flight go on."
    if is_draining:
        question = f"Let {head.name} take requests again?"
    _ask(app, question, "resume" if is_draining else "drain", "leave it", lambda: app.asking.drain(is_draining))


def _ask(app: TopApp, question: str, yes: str, no: str, act: Callable[[], str]) -> None:
    answers = (("y", yes), ("n", no))
    sheet = Dialog(
        "sure?",
        lambda width: dialogs.question_rows(question, answers, width),
        app.session.glyphs,
        app.mode,
        answers={"y": "yes", "n": ""},
        hint="y or n",
    )
    app.push_screen(sheet, lambda word: _act(app, act) if word == "yes" else None)


def _act(app: TopApp, act: Callable[[], str]) -> None:
    def run() -> None:
        try:
            said, is_bad = act(), False
        except MstarError as error:
            said, is_bad = in_words(error), True
        app.call_from_thread(lambda: app.tell(said, is_bad=is_bad))

    app.run_worker(run, thread=True, group="act")


# -- other deployments --------------------------------------------------------------------------------------------

NAMES: Final = "123456789abdefgh"
"""Keys of a list to choose from, but those that move in a sheet or close it."""


def ask_other(app: TopApp) -> None:
    """List the deployments that run beside this one, and go to the one that is chosen."""
    others = app.others
    if others is None:
        app.tell("a replay is one deployment; leave it and start top without --replay")
        return

    def look() -> None:
        try:
            found = others.running()
        except MstarError as error:
            said = in_words(error)
            app.call_from_thread(lambda: app.tell(said, is_bad=True))
            return
        app.call_from_thread(lambda: _choose_other(app, found))

    app.run_worker(look, thread=True, exclusive=True, group="others")


def _choose_other(app: TopApp, found: Sequence[OtherDeployment]) -> None:
    here = app.view().store.deployment.name
    names = [other for other in found if other.name != here]
    if not names:
        app.tell(f"no other deployment runs beside {here}; start one with: mstarctl up MODEL -d --name NAME")
        return
    shown = list(zip(NAMES, names, strict=False))
    answers = {key: other.name for key, other in shown}
    wide = max(cells(other.name) for other in names) + 2

    def rows(width: int) -> list[Line]:
        return dialogs.other_rows(here, shown, len(names), wide, app.view(), width)

    sheet = Dialog("go to", rows, app.session.glyphs, app.mode, answers=answers, hint="a key, or esc to stay")
    app.push_screen(sheet, lambda name: _go(app, name) if name else None)


def _go(app: TopApp, name: str) -> None:
    others = app.others
    assert others is not None, "asked only where there are others"

    def open_it() -> None:
        try:
            session, asking = others.go(name)
        except MstarError as error:
            said = in_words(error)
            app.call_from_thread(lambda: app.tell(said, is_bad=True))
            return
        app.call_from_thread(lambda: app.look_at(session, asking))

    app.tell(f"going to {name}")
    app.run_worker(open_it, thread=True, exclusive=True, group="others")


# -- files --------------------------------------------------------------------------------------------------------


def ask_export(app: TopApp) -> None:
    """Which form, then a file in the folder where top was started."""
    forms = [(key, what) for key, _, what in FORMS]
    sheet = Dialog(
        "write to a file",
        lambda width: dialogs.question_rows(f"In {app.folder}:", forms, width),
        app.session.glyphs,
        app.mode,
        answers={key: form for key, form, _ in FORMS},
    )
    app.push_screen(sheet, lambda form: _export(app, form))


def _export(app: TopApp, form: str | None) -> None:
    if form:
        _write(app, lambda: export(form, app.view(), app.state.sort, app.picture, app.folder))


def write_perfetto(app: TopApp) -> None:
    """The opened request's spans."""
    trace = app.state.trace
    if trace is None or not trace.lanes:
        app.tell("no spans are known of this request")
        return
    _write(app, lambda: save(app.folder, app.view(), "trace", "json", perfetto(trace.request, trace.lanes)))


def _write(app: TopApp, write: Callable[[], Path]) -> None:
    try:
        app.tell(f"wrote {write()}")
    except MstarError as error:
        app.tell(in_words(error), is_bad=True)


def toggle_recording(app: TopApp) -> None:
    """Begin a recording under the first free name, or end the one that runs."""
    name = app.view().store.deployment.name or "mstar"
    number = 1
    while (path := app.folder / f"{name}-{number}.mstar.gz").exists():
        number += 1
    try:
        app.tell(app.session.toggle_recording(path))
    except MstarError as error:
        app.tell(in_words(error), is_bad=True)


def in_words(error: MstarError) -> str:
    """An error in one line."""
    return "; ".join(word for word in (error.title, error.detail, error.hint) if word)


def _open(app: TopApp, sheet: Dialog) -> None:
    app.push_screen(sheet)
